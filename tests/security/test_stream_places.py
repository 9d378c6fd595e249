"""A team that opens every stream, or waits for every end; and another team."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Literal, cast

import pytest

from app.core.byte_budget import ACCOUNT, Account, ByteBudget
from app.core.database import Database
from app.core.errors import TooManyStreamsError, TooManyWaitersError
from app.core.ids import new_id
from app.core.settings import Settings
from app.results.store import ResultStore
from app.results.streams.hub import StreamHub

HOSTILE, POLITE = "hostile", "polite"
Fill = Callable[[StreamHub, str, contextlib.ExitStack], int]


def new_hub(auth: Literal["on", "off"] = "on") -> StreamHub:
    settings = Settings.model_construct(max_streams=8, max_waiters=8, auth=auth)
    return StreamHub(cast(Database, None), cast(ResultStore, None), settings)


def open_streams(hub: StreamHub, team: str, places: contextlib.ExitStack) -> int:
    """Open streams of one team until no more are allowed; their number."""
    for count in range(100):
        try:
            hub.reserve_place(team)
        except TooManyStreamsError:
            return count
        places.enter_context(hub.reading(team, new_id()))
    raise AssertionError("no bound")


def wait_for_ends(hub: StreamHub, team: str, places: contextlib.ExitStack) -> int:
    """Wait for ends for one team until no more waits are allowed; their number."""
    for count in range(100):
        try:
            places.enter_context(hub.expecting(team, new_id()))
        except TooManyWaitersError:
            return count
    raise AssertionError("no bound")


@pytest.mark.parametrize("fill", [open_streams, wait_for_ends])
async def test_streams_and_waits_leave_places_to_other_teams(fill: Fill) -> None:
    hub = new_hub()
    with contextlib.ExitStack() as places:
        taken = [fill(hub, team, places) for team in (HOSTILE, POLITE, HOSTILE, "third")]
    assert taken == [4, 2, 0, 1]
    with contextlib.ExitStack() as places:
        assert fill(hub, POLITE, places) == 4


@pytest.mark.parametrize("fill", [open_streams, wait_for_ends])
async def test_the_only_team_has_all_places(fill: Fill) -> None:
    hub = new_hub(auth="off")
    with contextlib.ExitStack() as places:
        assert fill(hub, "default", places) == 8


async def test_a_place_is_taken_where_it_is_checked() -> None:
    """A stream begins some rounds of the event loop after its request was admitted."""
    hub, accounts = new_hub(), list[Account]()

    async def request(team: str) -> None:
        ACCOUNT.set(account := Account(ByteBudget(1_000_000), team))
        accounts.append(account)
        hub.reserve_place(team)
        with hub.reading(team, new_id()):  # in the place that is reserved
            pass

    async def admitted(team: str, requests: int) -> int:
        outcomes = await asyncio.gather(
            *(asyncio.create_task(request(team)) for _ in range(requests)), return_exceptions=True
        )
        assert all(one is None or isinstance(one, TooManyStreamsError) for one in outcomes)
        return outcomes.count(None)

    assert [await admitted(team, 10) for team in (HOSTILE, POLITE, HOSTILE)] == [4, 2, 0]
    for account in accounts:
        account.close()
    assert await admitted(HOSTILE, 10) == 4


async def test_further_readers_of_a_request_take_places_of_their_own() -> None:
    hub = new_hub()
    ACCOUNT.set(account := Account(ByteBudget(1_000_000), HOSTILE))
    hub.reserve_place(HOSTILE)
    with hub.reading(HOSTILE, new_id()), hub.downloading(HOSTILE), hub.reading(HOSTILE, new_id()):
        assert hub._readers.count == 3
    assert hub._readers.count == 1
    with hub.downloading(HOSTILE):
        assert hub._readers.count == 1
    with hub.downloading(HOSTILE):
        account.close()
    assert hub._readers.count == 0
    with hub.reading(HOSTILE, new_id()):
        assert hub._readers.count == 1
