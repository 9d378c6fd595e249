"""The cache of accepted tokens: no verdict outlives its token."""

import asyncio
import time
from typing import cast

import pytest
from pydantic import SecretStr

from app.auth.api_keys import hash_of
from app.auth.authenticator import Authenticator
from app.auth.jwt_verifier import LEEWAY_SECONDS, encode_with_secret
from app.auth.principal import Principal
from app.auth.token_store import KeyVerification, TokenStore
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


def jwt_of(seconds_left: float) -> str:
    """A token that is valid for so many seconds, the leeway included."""
    claims = {"team_id": "red", "token_id": "ci"}
    expires = time.time() + seconds_left - LEEWAY_SECONDS
    return encode_with_secret(claims | {"exp": expires}, SecretStr(STRONG))


@pytest.fixture
def settings() -> Settings:
    return make_settings(JWT_SECRET=STRONG)


@pytest.mark.parametrize(
    ("key", "seconds_left", "reads"),
    [
        (KEY, None, 1),
        (KEY, 60.0, 1),
        (KEY, 6.0, 2),
        (None, 600.0, 1),
        (None, 66.0, 1),
        (None, 6.0, 2),
    ],
    ids=["key", "long_key", "short_key", "jwt", "long_jwt", "short_jwt"],
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
    headers = [(b"authorization", b"Bearer " + token.encode())]
    loop, began = asyncio.get_running_loop(), 1000.0
    for later in (0.0, 1.0, 8.0):  # verdicts of longer tokens are cached for ten seconds
        monkeypatch.setattr(loop, "time", lambda now=began + later: now)
        assert (await authenticator.authenticate(headers)).team_id == "red"
    monkeypatch.undo()
    assert tokens.reads == reads
