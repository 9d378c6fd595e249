"""Authentication: from the request's headers to a `Principal`, with no query per request.

Verdicts are cached by the token's hash for at most ten seconds. A notification of a revocation clears
the cache. A process that misses the notification honours the revocation ten seconds later.
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
from app.core.errors import InvalidTokenError, UnauthenticatedError
from app.core.listener import TOKENS, Listener
from app.core.polling import PollingLoop
from app.core.program import PROGRAM
from app.core.settings import Settings

_CACHE_TTL_SECONDS = 10.0
_MAX_CACHED = 10_000
_USE_PERIOD_SECONDS = 10.0
_REMEDY = (
    f"Send `Authorization: Bearer` with an API key or a JWT; `{PROGRAM} token --help` makes them."
)
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_UNKNOWN_KEY = "invalid API key: there is no such API key"
_BEARER = re.compile(rb"\s*bearer\s+\S", re.IGNORECASE)


@dataclass(slots=True, frozen=True)
class _Verdict:
    principal: Principal | None
    reason: str
    expires_at: float  # loop time
    key_id: UUID | None = None


class _VerdictCache:
    """Bounded cache of verdicts by the token's hash; the oldest are evicted first."""

    def __init__(self) -> None:
        self._verdicts: dict[bytes, _Verdict] = {}

    def get(self, digest: bytes, now: float) -> _Verdict | None:
        verdict = self._verdicts.get(digest)
        return verdict if verdict is not None and verdict.expires_at > now else None

    def put(self, digest: bytes, verdict: _Verdict) -> None:
        self._verdicts.pop(digest, None)
        if len(self._verdicts) >= _MAX_CACHED:
            del self._verdicts[next(iter(self._verdicts))]
        self._verdicts[digest] = verdict

    def clear(self) -> None:
        self._verdicts.clear()


class Authenticator:
    """Resolves bearer tokens to principals. `run` writes last uses and refreshes the issuer's keys."""

    def __init__(self, tokens: TokenStore, settings: Settings) -> None:
        self._tokens = tokens
        self._jwt = JwtVerifier(settings)
        # Two caches: guessed tokens evict other refusals, never an accepted token.
        self._accepted, self._refused = _VerdictCache(), _VerdictCache()
        self._generation = 0  # of the caches: a verdict of an earlier one is not stored
        self._used: set[UUID] = set()

    def subscribe(self, listener: Listener) -> None:
        """Clear the caches at each revocation, and after a gap in the notifications."""
        listener.subscribe(TOKENS, lambda _: self.clear_cache())

    def clear_cache(self) -> None:
        self._generation += 1
        self._accepted.clear()
        self._refused.clear()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            uses = PollingLoop("last uses", self.write_uses, seconds=_USE_PERIOD_SECONDS)
            group.create_task(uses.run(), name="last uses")
            if self._jwt.keys is not None:
                group.create_task(self._jwt.keys.run(), name="signing keys")

    async def authenticate(self, headers: Iterable[tuple[bytes, bytes]]) -> Principal:
        """The principal of a request.

        Raises UnauthenticatedError if the request has no bearer token, InvalidTokenError for a token
        that is not valid, and ServiceError of status 503 while the token cannot be verified.
        """
        token = _bearer_token(headers)
        digest = hashlib.sha256(token).digest()
        now = asyncio.get_running_loop().time()
        verdict = self._accepted.get(digest, now) or self._refused.get(digest, now)
        if verdict is None:
            verdict = await self._verify(token, digest, now)
        if verdict.principal is None:
            raise InvalidTokenError(verdict.reason)
        if verdict.key_id is not None:
            self._used.add(verdict.key_id)
        return verdict.principal

    async def write_uses(self) -> None:
        """Store the last use of all keys used since the previous call."""
        used, self._used = self._used, set()
        if used:
            await self._tokens.mark_used(list(used))

    async def _verify(self, token: bytes, digest: bytes, now: float) -> _Verdict:
        generation = self._generation
        try:
            text = token.decode("ascii")
        except UnicodeDecodeError:
            raise InvalidTokenError("a token is made of ASCII characters") from None
        if is_api_key(text):
            verdict = await self._verify_key(text, now)
        else:
            verdict = await self._verify_jwt(text, now)
        if generation == self._generation:
            cache = self._refused if verdict.principal is None else self._accepted
            cache.put(digest, verdict)
        return verdict

    async def _verify_key(self, text: str, now: float) -> _Verdict:
        prefix = prefix_of(text)
        if prefix is None:
            raise InvalidTokenError(_UNKNOWN_KEY)
        key, until = await self._tokens.find(prefix), now + _CACHE_TTL_SECONDS
        if key is None or not is_same(hash_of(text), key.hash):
            return _Verdict(None, _UNKNOWN_KEY, until)
        if key.is_revoked:
            return _Verdict(None, "the API key was revoked", until)
        left = _CACHE_TTL_SECONDS if key.seconds_left is None else key.seconds_left
        if left <= 0:
            return _Verdict(None, "the API key has expired", until)
        return _Verdict(key.principal, "", min(until, now + left), key.id)

    async def _verify_jwt(self, text: str, now: float) -> _Verdict:
        verified = await self._jwt.verify(text)
        principal, until = verified.principal, now + _CACHE_TTL_SECONDS
        assert principal.token_id is not None
        if await self._tokens.is_revoked(principal.team_id, principal.token_id):
            return _Verdict(None, "the token was revoked", until)
        if verified.seconds_left is not None:
            until = min(until, now + verified.seconds_left)
        return _Verdict(principal, "", until)


def _bearer_token(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The token of `Authorization`, or where that has none of `x-api-key`.

    An empty Authorization, or one of another scheme, is a client's default or a reverse proxy's own.
    """
    sent = list(headers)
    values = [value for name, value in sent if name == b"authorization"]
    keys = [b"Bearer " + value for name, value in sent if name == b"x-api-key"]
    if keys and not any(_BEARER.match(value) for value in values):
        values = keys
    if not values:
        raise UnauthenticatedError(_REMEDY)
    if len(values) > 1:
        raise UnauthenticatedError(
            "There are several Authorization or x-api-key headers; send one."
        )
    scheme, _, token = values[0].strip().partition(b" ")
    token = token.strip()
    if scheme.lower() != b"bearer" or not token:
        raise UnauthenticatedError(_REMEDY)
    if len(token) > MAX_TOKEN_BYTES:
        raise InvalidTokenError(f"a token has at most {MAX_TOKEN_BYTES} bytes")
    return token
