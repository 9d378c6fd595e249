"""The hub alone: places of readers and waiters, announcements, and the waits of one process."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, cast
from uuid import UUID

import pytest

from app.core.database import Database
from app.core.errors import (
    DatabaseUnavailableError,
    NotFoundError,
    TooManyStreamsError,
    TooManyWaitersError,
)
from app.core.ids import new_id
from app.core.listener import APPENDED, ENDED, WATCHED
from app.core.settings import Settings
from app.results.rows import ResultRow
from app.results.store import ResultStore
from app.results.streams.hub import StreamHub
from app.results.streams.subscribers import Subscribers
from tests.result_rows import result_row
from tests.unit.results.test_result_reader import Subscriptions
from tests.unit.worker.test_attempt import Scripted, claim_of
from tests.virtual_time import run_in_virtual_time

TEAM = "default"


class Store:
    """The stored rows, and the times at which each was read."""

    def __init__(self) -> None:
        self.rows: dict[UUID, ResultRow] = {}
        self.reads: list[float] = []

    async def get(self, team_id: str, result_id: UUID) -> ResultRow:
        assert team_id == TEAM
        self.reads.append(asyncio.get_running_loop().time())
        if result_id not in self.rows:
            raise NotFoundError("It was deleted.")
        return self.rows[result_id]

    async def get_charged(self, team_id: str, result_id: UUID) -> tuple[ResultRow, int]:
        return await self.get(team_id, result_id), 0


class Announcements:
    """A database that keeps what is notified."""

    def __init__(self) -> None:
        self.found: list[tuple[float, set[UUID]]] = []
        self.errors: list[Exception] = []
        self.began = asyncio.get_running_loop().time()

    async def fetch(self, _sql: str, _channel: str, payloads: list[str]) -> None:
        ids = {UUID(one) for payload in payloads for one in payload.split(" ")[1].split(",")}
        self.found.append((asyncio.get_running_loop().time() - self.began, ids))
        if self.errors:
            raise self.errors.pop(0)


def hub_of(store: Store | None = None, database: object = None, **options: Any) -> StreamHub:
    settings = Settings.model_construct(max_streams=4, max_waiters=4, **options)
    return StreamHub(cast(Database, database), cast(ResultStore, store), settings)


def listening(hub: StreamHub) -> Subscriptions:
    listener = Subscriptions()
    hub.subscribe(cast(Any, listener))
    return listener


# --- places -----------------------------------------------------------------------------------------


def test_a_team_leaves_as_many_places_free_as_it_has() -> None:
    places = Subscribers(4, is_shared=True)
    with places.placed("red"), places.subscribed("blue", new_id()):
        assert not places.are_full_for("red")
        with places.subscribed("red", new_id()):
            assert places.count == 3
            assert places.are_full_for("red")
            assert places.are_full_for("blue")
            assert not places.are_full_for("green")
            with places.placed("green"):
                assert places.are_full_for("white")
    assert places.count == 0
    assert places._by_team == {}
    assert "red" not in places._by_team
    assert list(places) == []


def test_a_service_without_authentication_has_one_team_for_all_places() -> None:
    places = Subscribers(2, is_shared=False)
    with places.placed("default"):
        assert not places.are_full_for("default")
        with places.placed("default"):
            assert places.are_full_for("default")


def test_a_full_hub_refuses_waiters_and_readers_apart() -> None:
    hub, results = hub_of(auth="none"), [new_id() for _ in range(4)]
    with hub.downloading(TEAM), hub.downloading(TEAM), hub.downloading(TEAM):
        hub.reserve_place(TEAM)
        with hub.reading(TEAM, results[0]):
            with pytest.raises(TooManyStreamsError):
                hub.reserve_place(TEAM)
            assert not hub.is_full_for(TEAM)
    signals = [hub.expecting(TEAM, one) for one in results]
    for one in signals:
        one.__enter__()
    with pytest.raises(TooManyWaitersError):
        hub.expecting(TEAM, results[0])
    for one in signals:
        one.__exit__(None, None, None)
    hub.expecting(TEAM, results[0])


def test_two_readers_of_a_result_leave_one_after_the_other() -> None:
    hub, result_id = hub_of(), new_id()
    with hub.reading(TEAM, result_id) as first:
        with hub.reading(TEAM, result_id):
            pass
        assert hub.awaits(result_id)
        hub._readers.wake(result_id)
        assert first.is_set()
    assert not hub.awaits(result_id)


# --- notifications ----------------------------------------------------------------------------------


async def test_an_end_is_notified_unless_its_row_is_about_to_come() -> None:
    """The statement that ends a result of this process returns its row."""
    hub = hub_of()
    listener, attempt = listening(hub), Scripted(claim_of())
    result_id = attempt.claim.id
    for is_running, is_over, is_set in (
        (True, True, False),
        (True, False, True),
        (False, True, True),
    ):
        attempt.is_over = is_over
        if is_running:
            hub.attach(attempt)
        with hub.reading(TEAM, result_id) as reader, hub.expecting(TEAM, result_id) as waiter:
            listener.callbacks[ENDED](f"{new_id().hex},{result_id.hex}")
            assert [one.is_set() for one in (reader, waiter)] == [is_set] * 2
            assert [one.is_end for one in (reader, waiter)] == [is_set] * 2
        if is_running:
            hub.detach(attempt)


async def test_more_text_wakes_the_readers_of_its_result() -> None:
    hub = hub_of()
    listener, attempt = listening(hub), Scripted(claim_of())
    result_id = attempt.claim.id
    with hub.reading(TEAM, result_id) as reader, hub.reading(TEAM, new_id()) as other:
        changes: list[Callable[[], None]] = [
            partial(listener.callbacks[APPENDED], result_id.hex),
            partial(hub.attach, attempt),
            partial(hub.on_text, attempt),
            partial(hub.detach, attempt),
        ]
        for change in changes:
            reader.clear()
            change()
            assert (reader.is_set(), other.is_set()) == (True, False)
            assert not reader.is_end
    with hub.expecting(TEAM, result_id) as waiter:
        hub.detach(attempt)
        assert waiter.is_set()


async def test_a_younger_attempt_is_not_detached_by_an_older_one() -> None:
    hub, claim = hub_of(), claim_of()
    first, second = Scripted(claim), Scripted(claim)
    hub.attach(first)
    hub.attach(second)
    hub.detach(first)
    assert hub.running(claim.id) is second
    hub.detach(second)
    assert hub.running(claim.id) is None


def test_a_delivered_row_is_that_of_readers_and_waiters() -> None:
    hub, row = hub_of(), result_row()
    with hub.reading(TEAM, row.id) as reader, hub.expecting(TEAM, row.id) as waiter:
        hub.deliver(cast(Any, row._asdict()))
        for signal in (reader, waiter):
            assert signal.is_set()
            assert (signal.is_end, signal.row) == (True, row)
        hub._readers.notify_end(row.id)  # the notification comes later: the row stays
        assert reader.row == row


# --- announcements ----------------------------------------------------------------------------------


def test_results_that_are_read_here_are_announced_again_and_again() -> None:
    """Every twenty seconds, unless they run here; at once if a reader or a worker asks for it."""

    async def work() -> None:
        notified = Announcements()
        hub = hub_of(database=notified)
        listener, attempt = listening(hub), Scripted(claim_of())
        hub.attach(attempt)
        running = asyncio.create_task(hub.run())
        first, second = new_id(), new_id()
        with hub.reading(TEAM, first), hub.reading(TEAM, attempt.claim.id):
            await asyncio.sleep(41)
            assert notified.found == [(20, {first}), (40, {first})]
            hub.announce(second)
            await asyncio.sleep(1)
            assert notified.found[2:] == [(41, {second})]
            for payload in ("?", "", f"{new_id().hex} {new_id().hex}"):
                listener.callbacks[WATCHED](payload)
                await asyncio.sleep(1)
            assert notified.found[3:] == [(42, {first}), (43, {first})]
            notified.errors = [DatabaseUnavailableError("away")]
            hub.announce(second)
            await asyncio.sleep(1)
            hub.announce(first)
            await asyncio.sleep(1)
            assert notified.found[5:] == [(45, {second}), (46, {first, second})]
        await asyncio.sleep(60)
        assert len(notified.found) == 7
        notified.errors = [RuntimeError("a bug")]
        hub.announce(first)
        with pytest.raises(RuntimeError, match="a bug"):
            await running

    run_in_virtual_time(work())


# --- waits ------------------------------------------------------------------------------------------


def test_a_wait_ends_with_the_result_or_with_its_time() -> None:
    async def work() -> None:
        store, loop = Store(), asyncio.get_running_loop()
        hub, pending = hub_of(store), result_row(state="pending")
        store.rows[pending.id] = pending
        began = loop.time()
        assert await hub.wait_terminal(TEAM, pending.id, 0) is pending
        assert (loop.time() - began, len(store.reads)) == (0, 1)
        assert await hub.wait_terminal(TEAM, pending.id, 0.5) is pending
        assert (loop.time() - began, len(store.reads)) == (0.5, 3)
        # With a signal from before its storage, the table is read only at the end.
        with hub.expecting(TEAM, pending.id) as signal:
            assert await hub.wait_terminal(TEAM, pending.id, 5, signal, is_new=True) is pending
        assert (loop.time() - began, len(store.reads)) == (5.5, 4)
        waiting = asyncio.create_task(hub.wait_terminal(TEAM, pending.id, 60))
        await asyncio.sleep(1)
        hub._waiters.wake(pending.id)  # for nothing
        await asyncio.sleep(1)
        assert not waiting.done()
        done = store.rows[pending.id] = pending._replace(state="completed")
        hub._waiters.wake(pending.id)
        assert await waiting is done
        assert loop.time() - began == 7.5

    run_in_virtual_time(work())


def test_a_wait_ends_when_its_client_or_the_process_leaves() -> None:
    async def work() -> None:
        store, has_left = Store(), list[bool]()
        hub, pending = hub_of(store), result_row(state="pending")
        store.rows[pending.id] = pending
        waiting = asyncio.create_task(
            hub.wait_terminal(TEAM, pending.id, 60, is_disconnected=lambda: bool(has_left))
        )
        await asyncio.sleep(1)
        has_left.append(True)
        hub._waiters.wake(pending.id)
        assert await waiting is pending
        waiting = asyncio.create_task(hub.wait_terminal(TEAM, pending.id, 60))
        with hub.reading(TEAM, pending.id) as reader:
            await asyncio.sleep(1)
            was_closing = hub.is_closing
            hub.close()
            assert (was_closing, hub.is_closing) == (False, True)
            assert reader.is_set()
        assert await waiting is pending

    run_in_virtual_time(work())


def test_a_delivered_row_is_charged_and_only_its_team_gets_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    charges = list[int]()

    async def charge(size: int) -> int:
        charges.append(size)
        return 0

    monkeypatch.setattr("app.results.streams.hub.charge", charge)

    async def work() -> None:
        for team, is_own in ((TEAM, True), ("other", False)):
            store = Store()
            hub, row = hub_of(store), result_row(team_id=team, output="text", logprobs="[1]")
            store.rows[row.id] = stored = row._replace(team_id=TEAM)
            with hub.expecting(TEAM, row.id) as signal:
                hub.deliver(cast(Any, row._asdict()))
                found = await hub.wait_terminal(TEAM, row.id, 60, signal, is_new=True)
            assert found is (signal.row if is_own else stored)
            assert len(store.reads) == (0 if is_own else 1)

    run_in_virtual_time(work())
    assert charges == [7]
