"""Keep-alives of a reader: after each silence, in spite of its reads and of its notifications."""

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any, cast
from uuid import UUID

import pytest

from app.core.database import Database
from app.core.errors import DatabaseUnavailableError
from app.core.ids import new_id
from app.core.settings import Settings
from app.results.store import ResultStore
from app.results.stored_text import StoredText
from app.results.streams.hub import StreamHub
from app.results.streams.result_reader import KeepAlive, Position, ResultReader, TextDelta
from tests.virtual_time import run_in_virtual_time

SETTINGS = Settings.model_construct(max_streams=10, max_waiters=10)
SILENCE_SECONDS = 15.0


class Table:
    """The stored text of one result, which `events` watches; each read takes a while."""

    def __init__(self, read_seconds: float, silence_seconds: float = SILENCE_SECONDS) -> None:
        self.read_seconds = read_seconds
        self.text, self.reads, self.is_down = "", 0, False
        self.hub = StreamHub(cast(Database, None), cast(ResultStore, None), SETTINGS)
        self.id = new_id()
        self.events = ResultReader(
            *(self.hub, cast(ResultStore, self), "default", self.id, Position(1), silence_seconds)
        ).events()

    async def text_since(
        self, _id: UUID, _attempt: int, offset: int, *, continues: bool
    ) -> StoredText:
        assert not continues
        self.reads += 1
        await asyncio.sleep(self.read_seconds)  # in virtual time: the database is slow
        if self.is_down:
            raise DatabaseUnavailableError("down")
        return StoredText(True, 1, offset, self.text[offset:])

    def wake(self) -> None:
        self.hub._readers.wake(self.id)

    async def wake_each(self, seconds: float) -> None:
        while True:
            await asyncio.sleep(seconds)
            self.wake()

    async def next(self) -> tuple[type, float]:
        """The kind of the next event, and the time until then."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        async with asyncio.timeout(1_000):
            event = await anext(self.events)
        return type(event), loop.time() - began


def check(work: Coroutine[Any, Any, None]) -> None:
    run_in_virtual_time(work)


@pytest.mark.parametrize("is_down", [False, True])
def test_slow_reads_do_not_delay_them(*, is_down: bool) -> None:
    """One read at a time, and a keep-alive behind each that took longer than the silence."""

    async def watch() -> None:
        table = Table(read_seconds=20)
        table.is_down = is_down
        for number in range(1, 6):
            assert await table.next() == (KeepAlive, 20)
            assert table.reads == number
        await table.events.aclose()

    check(watch())


def test_notifications_without_text_do_not_delay_them() -> None:
    """Half a character, or text of a lost attempt: clients see nothing of it."""

    async def watch() -> None:
        table = Table(read_seconds=0.1)
        waking = asyncio.create_task(table.wake_each(5))
        for _ in range(5):
            kind, seconds = await table.next()
            assert kind is KeepAlive
            assert SILENCE_SECONDS <= seconds < SILENCE_SECONDS + 1
        waking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waking
        await table.events.aclose()

    check(watch())


def test_text_delays_them() -> None:
    async def watch() -> None:
        table = Table(read_seconds=0.0)
        for _ in range(3):
            loop = asyncio.get_running_loop()
            loop.call_later(SILENCE_SECONDS - 1, lambda: setattr(table, "text", table.text + "x"))
            loop.call_later(SILENCE_SECONDS - 1, table.wake)
            assert await table.next() == (TextDelta, SILENCE_SECONDS - 1)
        assert await table.next() == (KeepAlive, SILENCE_SECONDS)
        await table.events.aclose()

    check(watch())


def test_a_silence_of_no_length_does_not_spin() -> None:
    """Each read that finds nothing is followed by one keep-alive."""

    async def watch() -> None:
        table = Table(read_seconds=0.1, silence_seconds=0.0)
        asyncio.get_running_loop().call_later(0.05, table.wake)  # during the first read
        for number in range(1, 6):
            assert (await table.next())[0] is KeepAlive
            assert table.reads == number
        await table.events.aclose()

    check(watch())
