"""Statements of the token store: which keys and tokens they list, and which one they revoke."""

from collections.abc import AsyncIterator
from uuid import UUID

import pytest

from app.auth.token_store import ApiKey, TokenStore
from app.core.database import Database
from app.core.errors import NotFoundError
from app.core.settings import Settings
from tests.integration.support import UNKNOWN_ID


@pytest.fixture
async def store(settings: Settings) -> AsyncIterator[TokenStore]:
    async with Database(settings, "test") as database:
        yield TokenStore(database, settings)


async def test_keys_are_listed_by_team_then_age(store: TokenStore) -> None:
    for owner, name in (("red", "1"), ("blue", "2"), ("red", "3"), ("blue", "4")):
        await store.create(owner, name=name)
    expected = {
        None: [("blue", "2"), ("blue", "4"), ("red", "1"), ("red", "3")],
        "red": [("red", "1"), ("red", "3")],
        "green": [],
    }
    for team, keys in expected.items():
        assert [(key.team_id, key.name) for key in await store.list(team)] == keys


async def test_revoked_tokens_are_listed_by_team_then_id(store: TokenStore) -> None:
    for owner, token_id in (("red", "a"), ("red", "d"), ("blue", "c"), ("blue", "b")):
        await store.revoke_token(owner, token_id)
    expected = {
        None: [("blue", "b"), ("blue", "c"), ("red", "a"), ("red", "d")],
        "red": [("red", "a"), ("red", "d")],
        "green": [],
    }
    for team, tokens in expected.items():
        found = await store.list_revoked(team)
        assert [(token.team_id, token.token_id) for token in found] == tokens


@pytest.mark.parametrize("by", ["id", "prefix"])
async def test_one_key_is_revoked_and_only_once(store: TokenStore, by: str) -> None:
    for name in ("kept", "other", "leaked"):
        await store.create("red", name=name)
    leaked = (await store.list())[2]

    async def revoke() -> ApiKey:
        return await (store.revoke(leaked.id) if by == "id" else store.revoke(None, leaked.prefix))

    first = await revoke()
    assert (first.id, first.name) == (leaked.id, "leaked")
    assert first.revoked_at is not None
    assert await revoke() == first  # the time of the first revocation stays
    assert [key.name for key in await store.list() if key.revoked_at] == ["leaked"]


async def test_an_unknown_key_is_not_revoked(store: TokenStore) -> None:
    await store.create("red")
    for name in ((UUID(UNKNOWN_ID), None), (None, "llm_0123456789ab")):
        with pytest.raises(NotFoundError):
            await store.revoke(*name)
    assert [key.revoked_at for key in await store.list()] == [None]
