"""The cache of verdicts: none outlives its token, and each saves a query."""

import asyncio
import time
from typing import cast

import pytest
from pydantic import SecretStr

from app.auth import authenticator as module
from app.auth.api_keys import hash_of
from app.auth.authenticator import Authenticator
from app.auth.jwt_verifier import LEEWAY_SECONDS, MAX_TOKEN_BYTES, encode_with_secret
from app.auth.principal import Principal
from app.auth.token_store import KeyVerification, TokenStore
from app.core.errors import InvalidTokenError
from app.core.ids import new_id
from app.core.settings import Settings
from tests.unit.api.test_startup_checks import STRONG
from tests.unit.auth.test_jwt import make_settings

KEY = "llm_0123456789ab_" + "a" * 43


class Tokens:
    """Stored keys and revocations, and how often they are read."""

    def __init__(self, seconds_left: float | None = None) -> None:
        self.seconds_left = seconds_left
        self.reads = 0

    async def find(self, _prefix: str) -> KeyVerification:
        self.reads += 1
        principal = Principal("red", frozenset({"use"}))
        return KeyVerification(
            id=new_id(),
            hash=hash_of(KEY),
            principal=principal,
            is_revoked=False,
            seconds_left=self.seconds_left,
        )

    async def is_revoked(self, _team: str, _token: str) -> bool:
        self.reads += 1
        return False


def jwt_of(seconds_left: float, name: str = "ci") -> str:
    """A token that is valid for so many seconds, the leeway included."""
    claims = {"team_id": "red", "token_id": name}
    expires = time.time() + seconds_left - LEEWAY_SECONDS
    return encode_with_secret(claims | {"exp": expires}, SecretStr(STRONG))


def bearer(token: str) -> list[tuple[bytes, bytes]]:
    return [(b"authorization", f"Bearer {token}".encode())]


@pytest.fixture
def settings() -> Settings:
    return make_settings(JWT_SECRET=STRONG)


@pytest.mark.parametrize(
    ("key", "seconds_left", "reads"),
    [
        (KEY, None, 1),
        (KEY, 60.0, 1),
        (KEY, 8.0, 2),
        (KEY, 6.0, 2),
        (None, 600.0, 1),
        (None, 66.0, 1),
        (None, 6.0, 2),
    ],
    ids=["key", "long_key", "key_that_ends_now", "short_key", "jwt", "long_jwt", "short_jwt"],
)
async def test_a_verdict_ends_with_its_token(
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    key: str | None,
    seconds_left: float | None,
    reads: int,
) -> None:
    tokens = Tokens(seconds_left)
    authenticator = Authenticator(cast(TokenStore, tokens), settings)
    token = key or jwt_of(seconds_left or 0.0)
    loop, began = asyncio.get_running_loop(), 1000.0
    for later in (0.0, 1.0, 8.0):  # verdicts of longer tokens are cached for ten seconds
        monkeypatch.setattr(loop, "time", lambda now=began + later: now)
        assert (await authenticator.authenticate(bearer(token))).team_id == "red"
    monkeypatch.undo()
    assert tokens.reads == reads


async def test_a_renewed_verdict_is_evicted_last(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MAX_CACHED", 3)
    tokens = Tokens()
    authenticator = Authenticator(cast(TokenStore, tokens), settings)
    texts = {name: jwt_of(600.0, name) for name in "abcd"}
    loop, began = asyncio.get_running_loop(), 1000.0
    # The verdict of `a` is renewed after ten seconds; `d` evicts that of `b`.
    for name, later in (("a", 0), ("b", 0), ("a", 11), ("c", 12), ("d", 12), ("a", 13)):
        monkeypatch.setattr(loop, "time", lambda now=began + later: now)
        await authenticator.authenticate(bearer(texts[name]))
    monkeypatch.undo()
    assert tokens.reads == 5


async def test_clearing_ends_refusals_too(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CACHE_TTL_SECONDS", 10_000.0)
    tokens = Tokens()
    authenticator = Authenticator(cast(TokenStore, tokens), settings)
    for reads in (1, 1, 2):
        if reads == 2:
            authenticator.clear_cache()
        with pytest.raises(InvalidTokenError):
            await authenticator.authenticate(bearer(KEY[:-1] + "b"))
        assert tokens.reads == reads


async def test_a_key_has_expired_when_no_time_is_left(settings: Settings) -> None:
    authenticator = Authenticator(cast(TokenStore, Tokens(0.0)), settings)
    with pytest.raises(InvalidTokenError, match="expired"):
        await authenticator.authenticate(bearer(KEY))


@pytest.mark.parametrize("text", ["llm_", KEY[:-1], KEY + "a", KEY.replace("ab_", "AB_")])
async def test_a_malformed_key_costs_no_query(settings: Settings, text: str) -> None:
    tokens = Tokens()
    authenticator = Authenticator(cast(TokenStore, tokens), settings)
    with pytest.raises(InvalidTokenError, match="no such API key"):
        await authenticator.authenticate(bearer(text))
    assert tokens.reads == 0


async def test_a_token_has_a_bounded_length(settings: Settings) -> None:
    authenticator = Authenticator(cast(TokenStore, Tokens()), settings)
    claims = {"team_id": "red", "token_id": "ci"}
    room = MAX_TOKEN_BYTES - len(encode_with_secret(claims | {"x": ""}, SecretStr(STRONG)))
    longest, longer = (
        encode_with_secret(claims | {"x": "x" * (room * 3 // 4 + more)}, SecretStr(STRONG))
        for more in (1, 2)
    )
    assert len(longest) == MAX_TOKEN_BYTES < len(longer)
    assert (await authenticator.authenticate(bearer(longest))).team_id == "red"
    with pytest.raises(InvalidTokenError, match=f"at most {MAX_TOKEN_BYTES} bytes"):
        await authenticator.authenticate(bearer(longer))
