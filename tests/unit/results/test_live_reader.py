"""Readers of results that run in another process: text from notifications, or from the table."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import astuple
from typing import cast
from uuid import UUID

import pytest

from app.core.database import Database
from app.core.ids import new_id
from app.core.listener import APPENDED, Listener
from app.core.settings import Settings
from app.queue.live_text import LiveText, channel_of, text_notifications
from app.results.store import ResultStore
from app.results.stored_text import StoredText
from app.results.streams.hub import StreamHub
from app.results.streams.result_reader import (
    AttemptStarted,
    Event,
    Position,
    ResultReader,
    TextDelta,
)
from tests.unit.results.test_result_reader import Subscriptions

SETTINGS = Settings.model_construct(max_streams=10, max_waiters=10)


class Table:
    """The stored text of one result. A read of it is counted."""

    def __init__(self) -> None:
        self.attempt, self.text, self.reads = 1, "", 0
        self.on_read: Callable[[], None] = lambda: None

    async def text_since(
        self, _result_id: UUID, attempt: int, offset: int, *, continues: bool
    ) -> StoredText:
        assert not continues
        self.reads += 1
        self.on_read()
        known = offset if attempt == self.attempt else 0
        return StoredText(True, self.attempt, known, self.text[known:])


class Stream:
    """A reader, and the worker whose text it reads."""

    def __init__(self, *, with_tokens: bool = False) -> None:
        self.table, self.id = Table(), new_id()
        self.attempt, self.written = 1, ""  # of the worker
        self.hub = StreamHub(cast(Database, None), cast(ResultStore, None), SETTINGS)
        self._listener = Subscriptions()
        self.hub.subscribe(cast(Listener, self._listener))
        reader = ResultReader(
            *(self.hub, cast(ResultStore, self.table), "default", self.id, Position(), 1e6),
            with_tokens=with_tokens,
        )
        self._events: AsyncGenerator[Event, None] = reader.events()

    def write(self, text: str, attempt: int = 1, *, is_sent: bool = True) -> None:
        """Generate text, and send it unless its notification is lost."""
        if attempt > self.attempt:
            self.attempt, self.written = attempt, ""
        offset, self.written = len(self.written), self.written + text
        if is_sent:
            self.notify(offset, text)

    def notify(self, offset: int, text: str, attempt: int | None = None) -> None:
        live = LiveText(self.id, attempt or self.attempt, offset, offset + len(text), text)
        for channel, payload in text_notifications([(live, [self.hub.id.hex])]):
            self._listener.callbacks[channel](payload)

    def store(self) -> None:
        """Store all text, which wakes no reader: see `wake`."""
        self.table.attempt, self.table.text = self.attempt, self.written

    def take_announced(self) -> bool:
        """Return whether the worker was asked to store the text since the last look."""
        asked, self.hub._to_announce = bool(self.hub._to_announce), set()
        return asked

    def wake(self) -> None:
        self._listener.callbacks[APPENDED](self.id.hex)

    async def next(self) -> Event:
        async with asyncio.timeout(20):  # text that is missing is a failure, and not a hang
            return await anext(self._events)

    async def delta(self) -> tuple[int, int, str, int | None]:
        """The attempt, offset, text and number of tokens of the next event."""
        event = await self.next()
        assert isinstance(event, TextDelta)
        return (*astuple(event.position), event.text, event.completion_tokens)

    async def text(self, length: int) -> str:
        """The next text of the stream, of this length, behind one character."""
        text = ""
        while len(text) < length:
            _, offset, more, _ = await self.delta()
            text += more
            assert offset == len(text) + 1
        return text

    async def close(self) -> None:
        await self._events.aclose()


async def begun(stream: Stream) -> Stream:
    stream.write("a", is_sent=False)
    stream.store()
    assert isinstance(await stream.next(), AttemptStarted)
    assert await stream.delta() == (1, 1, "a", None)
    assert stream.take_announced()
    assert stream.table.reads == 1
    return stream


async def test_text_that_continues_the_readers_needs_no_read() -> None:
    stream = await begun(Stream())
    stream.write("b")
    stream.write("cd")
    assert await stream.delta() == (1, 4, "bcd", 4)
    stream.write("e")
    assert await stream.delta() == (1, 5, "e", 5)
    assert stream.table.reads == 1
    assert not stream.take_announced()
    await stream.close()


async def test_the_beginning_of_a_text_needs_no_read() -> None:
    stream = Stream()
    first = asyncio.create_task(stream.next())
    await asyncio.sleep(0)
    stream.write("a")
    assert await first == AttemptStarted(Position(1, 0))
    assert await stream.delta() == (1, 1, "a", 1)
    await stream.close()


async def test_a_lost_notification_is_made_up_for_by_a_read() -> None:
    stream = await begun(Stream())
    stream.write("b", is_sent=False)
    stream.store()
    stream.write("c")
    stream.store()
    assert await stream.delta() == (1, 3, "bc", None)
    stream.write("d")
    assert await stream.delta() == (1, 4, "d", 4)
    assert stream.table.reads == 2
    assert not stream.take_announced()
    await stream.close()


async def test_text_that_came_while_the_table_was_read_follows() -> None:
    stream = await begun(Stream())
    stream.write("b", is_sent=False)
    stream.store()
    stream.wake()
    waiting = asyncio.create_task(stream.delta())
    stream.table.on_read = lambda: stream.write("c")
    assert await waiting == (1, 2, "b", None)
    assert await stream.delta() == (1, 3, "c", 3)
    assert stream.table.reads == 2
    await stream.close()


async def test_a_repeated_notification_repeats_no_text() -> None:
    stream = await begun(Stream())
    for _ in range(2):
        stream.notify(1, "bc")
    stream.notify(3, "d")
    assert await stream.delta() == (1, 4, "bcd", 4)
    stream.notify(1, "bc")
    stream.notify(2, "cde")
    assert await stream.delta() == (1, 5, "e", 5)
    assert stream.table.reads == 1
    await stream.close()


async def test_the_next_attempt_is_announced_and_an_older_one_ignored() -> None:
    stream = await begun(Stream())
    stream.write("x", attempt=2)
    assert await stream.next() == AttemptStarted(Position(2, 0))
    assert await stream.delta() == (2, 1, "x", 1)
    stream.notify(1, "old", attempt=1)
    stream.write("y", attempt=2)
    assert await stream.delta() == (2, 2, "y", 2)
    assert stream.table.reads == 1
    await stream.close()


async def test_text_of_two_attempts_at_once_is_read_from_the_table() -> None:
    stream = await begun(Stream())
    stream.write("b")
    stream.write("x", attempt=2)
    stream.store()
    assert await stream.next() == AttemptStarted(Position(2, 0))
    assert await stream.delta() == (2, 1, "x", None)
    assert stream.table.reads == 2
    await stream.close()


async def test_an_attempt_whose_beginning_was_not_sent_is_read_from_the_table() -> None:
    """So is one that continues a text: its first notification has an offset."""
    stream = await begun(Stream())
    stream.write("kept", attempt=2, is_sent=False)
    stream.write(" more", attempt=2)
    stream.store()
    assert await stream.next() == AttemptStarted(Position(2, 0))
    assert await stream.delta() == (2, 9, "kept more", None)
    stream.write("!", attempt=2)
    assert await stream.delta() == (2, 10, "!", 10)
    assert stream.table.reads == 2
    await stream.close()


async def test_a_late_reader_holds_little_and_reads_the_table() -> None:
    stream = await begun(Stream())
    for _ in range(100):
        stream.write("x" * 1_000)
    (signal,) = stream.hub._readers._signals[stream.id]
    assert sum(len(one.text) for one in signal._texts) <= 8192
    stream.store()
    assert await stream.text(100_000) == "x" * 100_000
    assert stream.table.reads == 2
    await stream.close()


@pytest.mark.parametrize("is_woken", [False, True])
async def test_readers_of_tokens_read_the_table(*, is_woken: bool) -> None:
    """So does one that is woken without text."""
    stream = await begun(Stream(with_tokens=not is_woken))
    stream.write("b", is_sent=not is_woken)
    stream.store()
    if is_woken:
        stream.wake()
    assert await stream.delta() == (1, 2, "b", None)
    assert stream.table.reads == 2
    await stream.close()


async def test_a_reconnection_reads_the_table_once() -> None:
    """Each channel is notified of it."""
    stream = await begun(Stream())
    stream.write("b", is_sent=False)
    stream.store()
    for channel in (channel_of(stream.hub.id.hex), APPENDED):
        stream._listener.callbacks[channel]("")
    assert await stream.delta() == (1, 2, "b", None)
    assert stream.table.reads == 2
    await stream.close()
