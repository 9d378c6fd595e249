"""Who is asking: from the Authorization header to a `Principal`, without a query per request.

What a token proved is remembered for ten seconds at most, by its hash, and forgotten at the first
notification that something was revoked. So a revocation holds at once where the notification
arrives, and after ten seconds where it does not.
"""

import asyncio
import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from uuid import UUID

from app.auth.api_keys import hash_of, is_api_key, is_same, prefix_of
from app.auth.jwt_verifier import MAX_TOKEN_BYTES, JwtVerifier
from app.auth.principal import Principal
from app.auth.token_store import TokenStore
from app.core.database import is_transient
from app.core.errors import (
    InvalidTokenError,
    UnauthenticatedError,
)
from app.core.listener import TOKENS, Listener
from app.core.settings import Settings

_REMEMBER_SECONDS = 10.0
_MAX_REMEMBERED = 10_000
_USE_PERIOD_SECONDS = 10.0
_HOW = "Send `Authorization: Bearer` with an API key or a JWT; `python -m app token --help` makes them."
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_UNKNOWN_KEY = "there is no such API key"


@dataclass(slots=True, frozen=True)
class _Answer:
    """What is remembered of a token: its owner, or why it has none."""

    principal: Principal | None
    reason: str
    expires: float
    key_id: UUID | None = None


class _Memory:
    """Answers by a token's hash, so many; the oldest make room."""

    def __init__(self) -> None:
        self._answers: dict[bytes, _Answer] = {}

    def get(self, digest: bytes, now: float) -> _Answer | None:
        answer = self._answers.get(digest)
        return answer if answer is not None and answer.expires > now else None

    def put(self, digest: bytes, answer: _Answer) -> None:
        self._answers.pop(digest, None)
        if len(self._answers) >= _MAX_REMEMBERED:
            del self._answers[next(iter(self._answers))]
        self._answers[digest] = answer

    def clear(self) -> None:
        self._answers.clear()


class Authenticator:
    """Turns bearer tokens into principals; `run` keeps what it needs for that."""

    def __init__(self, tokens: TokenStore, settings: Settings) -> None:
        self._tokens = tokens
        self._jwt = JwtVerifier(settings)
        # Apart: who guesses pushes out guesses, and no good answer.
        self._good, self._bad = _Memory(), _Memory()
        self._forgotten = 0  # times: an answer asked for before the last one is not remembered
        self._used: set[UUID] = set()

    def subscribe(self, listener: Listener) -> None:
        """Forget everything at each revocation, and when some may have been missed."""
        listener.subscribe(TOKENS, lambda _: self.forget())

    def forget(self) -> None:
        """Ask the database again about every token."""
        self._forgotten += 1
        self._good.clear()
        self._bad.clear()

    async def run(self) -> None:
        """Write last uses, and keep the issuer's keys fresh, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._write_uses(), name="last uses")
            if self._jwt.keys is not None:
                group.create_task(self._jwt.keys.run(), name="signing keys")

    async def authenticate(self, headers: Iterable[tuple[bytes, bytes]]) -> Principal:
        """The owner of a request.

        Raises UnauthenticatedError where no bearer token is sent, InvalidTokenError for one that
        proves nothing, and ServiceError of status 503 while that cannot be told.
        """
        token = _bearer_token(headers)
        digest = hashlib.sha256(token).digest()
        now = asyncio.get_running_loop().time()
        answer = self._good.get(digest, now) or self._bad.get(digest, now)
        if answer is None:
            answer = await self._ask(token, digest, now)
        if answer.principal is None:
            raise InvalidTokenError(answer.reason)
        if answer.key_id is not None:
            self._used.add(answer.key_id)
        return answer.principal

    async def write_uses(self) -> None:
        """Write the last use of the keys that were used since the last time."""
        used, self._used = self._used, set()
        if used:
            await self._tokens.mark_used(list(used))

    async def _ask(self, token: bytes, digest: bytes, now: float) -> _Answer:
        forgotten = self._forgotten
        try:
            text = token.decode("ascii")
        except UnicodeDecodeError:
            raise InvalidTokenError("a token is made of ASCII characters") from None
        if is_api_key(text):
            answer = await self._ask_key(text, now)
        else:
            answer = await self._ask_jwt(text, now)
        if forgotten == self._forgotten:
            (self._bad if answer.principal is None else self._good).put(digest, answer)
        return answer

    async def _ask_key(self, text: str, now: float) -> _Answer:
        prefix = prefix_of(text)
        if prefix is None:
            raise InvalidTokenError(_UNKNOWN_KEY)
        key, until = await self._tokens.find(prefix), now + _REMEMBER_SECONDS
        if key is None or not is_same(hash_of(text), key.hash):
            return _Answer(None, _UNKNOWN_KEY, until)
        if key.is_revoked:
            return _Answer(None, "the API key was revoked", until)
        left = _REMEMBER_SECONDS if key.seconds_left is None else key.seconds_left
        if left <= 0:
            return _Answer(None, "the API key has expired", until)
        return _Answer(key.principal, "", min(until, now + left), key.id)

    async def _ask_jwt(self, text: str, now: float) -> _Answer:
        verified = await self._jwt.verify(text)
        principal, until = verified.principal, now + _REMEMBER_SECONDS
        assert principal.token_id is not None
        if await self._tokens.is_revoked(principal.team_id, principal.token_id):
            return _Answer(None, "the token was revoked", until)
        if verified.seconds_left is not None:
            until = min(until, now + verified.seconds_left)
        return _Answer(principal, "", until)

    async def _write_uses(self) -> None:
        while True:
            await asyncio.sleep(_USE_PERIOD_SECONDS)
            try:
                await self.write_uses()
            except Exception as error:
                if not is_transient(error):
                    raise


def _bearer_token(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    values = [value for name, value in headers if name == b"authorization"]
    if not values:
        raise UnauthenticatedError(_HOW)
    if len(values) > 1:
        raise UnauthenticatedError("There are several Authorization headers; send one.")
    scheme, _, token = values[0].strip().partition(b" ")
    token = token.strip()
    if scheme.lower() != b"bearer" or not token:
        raise UnauthenticatedError(_HOW)
    if len(token) > MAX_TOKEN_BYTES:
        raise InvalidTokenError(f"a token has at most {MAX_TOKEN_BYTES} bytes")
    return token
