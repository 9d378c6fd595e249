"""Announcements of readers, as a worker remembers them, by a virtual clock."""

import asyncio
from collections.abc import Iterable
from typing import Any, cast
from uuid import UUID, uuid4

from app.core.errors import DatabaseUnavailableError
from app.core.ids import new_id
from app.core.listener import WATCHED
from app.results.streams.interest import StreamInterest
from tests.unit.results.test_result_reader import Subscriptions
from tests.virtual_time import run_in_virtual_time

OWN = uuid4()


class Questions:
    """A database that keeps the notifications."""

    def __init__(self) -> None:
        self.found: list[tuple[object, ...]] = []
        self.error: Exception | None = None

    async def fetch(self, _sql: str, *arguments: object) -> None:
        self.found.append(arguments)
        if self.error is not None:
            raise self.error


def test_an_announced_result_is_remembered_for_three_periods() -> None:
    """Those of readers elsewhere alone; a repetition counts again, and a question means nothing."""

    async def work() -> None:
        listener, announced = Subscriptions(), list[UUID]()

        def on_announced(ids: Iterable[UUID]) -> None:
            announced.extend(ids)

        interest = StreamInterest(cast(Any, None), cast(Any, listener), OWN, on_announced)
        notify, reader = listener.callbacks[WATCHED], uuid4().hex
        first, second, own = new_id(), new_id(), new_id()
        notify(f"{reader} {first.hex}")
        notify(f"{OWN.hex} {own.hex}")
        notify("?")
        assert announced == [first]
        assert [bool(interest.readers(one)) for one in (first, second, own)] == [True, False, False]
        await asyncio.sleep(40)
        notify(f"{reader} {second.hex}")
        await asyncio.sleep(19)
        assert [bool(interest.readers(one)) for one in (first, second)] == [True, True]
        await asyncio.sleep(2)
        assert [bool(interest.readers(one)) for one in (first, second)] == [False, True]
        assert first in interest._forget_at
        notify(f"{reader} {second.hex}")
        assert interest._forget_at.keys() == {second}
        await asyncio.sleep(59)
        assert interest.readers(second)
        assert announced == [first, second, second]

    run_in_virtual_time(work())


def test_the_readers_of_a_result_are_remembered_one_by_one() -> None:
    async def work() -> None:
        listener, result_id = Subscriptions(), new_id()
        interest = StreamInterest(cast(Any, None), cast(Any, listener), OWN, lambda _: None)
        first, second = uuid4().hex, uuid4().hex
        for reader in (first, second):
            listener.callbacks[WATCHED](f"{reader} {result_id.hex}")
            await asyncio.sleep(30)
        assert interest.readers(result_id) == [second]
        listener.callbacks[WATCHED](f"{first} {result_id.hex}")
        assert interest.readers(result_id) == [first, second]
        assert interest.readers(new_id()) == []

    run_in_virtual_time(work())


def test_a_worker_that_has_reconnected_asks_all_readers() -> None:
    """If the database is unavailable, it waits for their next announcements."""

    async def work() -> None:
        listener, database = Subscriptions(), Questions()
        StreamInterest(cast(Any, database), cast(Any, listener), OWN, lambda _: None)
        for database.error in (None, DatabaseUnavailableError("away")):
            listener.callbacks[WATCHED]("")
            await asyncio.sleep(1)
        assert database.found == [(WATCHED, "?")] * 2

    run_in_virtual_time(work())
