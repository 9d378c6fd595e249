"""Readers of results that run in another process: text from notifications, or from the table."""

from collections.abc import AsyncGenerator
from dataclasses import astuple
from typing import cast
from uuid import UUID

import pytest

from app.core.database import Database
from app.core.ids import new_id
from app.core.listener import APPENDED, Listener
from app.core.settings import Settings
from app.queue.live_text import channel_of, notifications
from app.queue.progress import Chunk
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

    async def text_since(
        self, _result_id: UUID, attempt: int, offset: int, *, continues: bool
    ) -> StoredText:
        assert not continues
        self.reads += 1
        known = offset if attempt == self.attempt else 0
        return StoredText(True, self.attempt, known, self.text[known:])


class Stream:
    """A reader, and the worker that writes what it reads."""

    def __init__(self, *, with_tokens: bool = False) -> None:
        self.table, self.id = Table(), new_id()
        self.hub = StreamHub(cast(Database, None), cast(ResultStore, None), SETTINGS)
        self._listener = Subscriptions()
        self.hub.subscribe(cast(Listener, self._listener))
        reader = ResultReader(
            *(self.hub, cast(ResultStore, self.table), "default", self.id, Position(), 1e6),
            with_tokens=with_tokens,
        )
        self._events: AsyncGenerator[Event, None] = reader.events()

    def write(self, text: str, attempt: int = 1, *, is_sent: bool = True) -> None:
        """Store the text, and send it unless its notification is lost."""
        table = self.table
        if attempt > table.attempt:
            table.attempt, table.text = attempt, ""
        chunk = Chunk(self.id, attempt, len(table.text), text, 1, len(table.text) + len(text))
        table.text += text
        if is_sent:
            self.notify(chunk)

    def notify(self, chunk: Chunk) -> None:
        for channel, payload in notifications([chunk], {self.id: [self.hub.id.hex]}):
            self._listener.callbacks[channel](payload)

    def wake(self) -> None:
        self._listener.callbacks[APPENDED](self.id.hex)

    async def next(self) -> Event:
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
    assert isinstance(await stream.next(), AttemptStarted)
    assert isinstance(await stream.next(), TextDelta)
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
    await stream.close()


async def test_a_lost_notification_is_made_up_for_by_a_read() -> None:
    stream = await begun(Stream())
    stream.write("b", is_sent=False)
    stream.write("c")
    assert await stream.delta() == (1, 3, "bc", None)
    stream.write("d")
    assert await stream.delta() == (1, 4, "d", 4)
    assert stream.table.reads == 2
    await stream.close()


async def test_a_repeated_notification_repeats_no_text() -> None:
    stream = await begun(Stream())
    chunk = Chunk(stream.id, 1, 1, "bc", 1, 3)
    stream.table.text = "abc"
    stream.notify(chunk)
    stream.notify(chunk)
    stream.write("d")
    assert await stream.delta() == (1, 4, "bcd", 4)
    stream.notify(chunk)
    stream.write("e")
    assert await stream.delta() == (1, 5, "e", 5)
    assert stream.table.reads == 1
    await stream.close()


async def test_the_next_attempt_is_announced_and_an_older_one_ignored() -> None:
    stream = await begun(Stream())
    late = Chunk(stream.id, 1, 1, "old", 1, 4)
    stream.write("x", attempt=2)
    assert await stream.next() == AttemptStarted(Position(2, 0))
    assert await stream.delta() == (2, 1, "x", 1)
    stream.notify(late)
    stream.write("y", attempt=2)
    assert await stream.delta() == (2, 2, "y", 2)
    assert stream.table.reads == 1
    await stream.close()


async def test_text_of_two_attempts_at_once_is_read_from_the_table() -> None:
    stream = await begun(Stream())
    stream.write("b")
    stream.write("x", attempt=2)
    assert await stream.next() == AttemptStarted(Position(2, 0))
    assert await stream.delta() == (2, 1, "x", None)
    assert stream.table.reads == 2
    await stream.close()


async def test_an_attempt_whose_beginning_was_not_sent_is_read_from_the_table() -> None:
    stream = await begun(Stream())
    stream.write("kept", attempt=2, is_sent=False)
    stream.write(" more", attempt=2)
    assert await stream.next() == AttemptStarted(Position(2, 0))
    assert await stream.delta() == (2, 9, "kept more", None)
    assert stream.table.reads == 2
    await stream.close()


async def test_a_late_reader_holds_little_and_reads_the_table() -> None:
    stream = await begun(Stream())
    for _ in range(100):
        stream.write("x" * 1_000)
    (signal,) = stream.hub._readers._signals[stream.id]
    assert sum(len(one.text) for one in signal._texts) <= 8192
    assert await stream.text(100_000) == "x" * 100_000
    assert stream.table.reads == 2
    await stream.close()


@pytest.mark.parametrize("is_woken", [False, True])
async def test_readers_of_tokens_read_the_table(*, is_woken: bool) -> None:
    """So does one that is woken without text."""
    stream = await begun(Stream(with_tokens=not is_woken))
    stream.write("b", is_sent=not is_woken)
    if is_woken:
        stream.wake()
    assert await stream.delta() == (1, 2, "b", None)
    assert stream.table.reads == 2
    await stream.close()


async def test_a_reconnection_reads_the_table_once() -> None:
    """Each channel is notified of it."""
    stream = await begun(Stream())
    stream.write("b", is_sent=False)
    for channel in (channel_of(stream.hub.id.hex), APPENDED):
        stream._listener.callbacks[channel]("")
    assert await stream.delta() == (1, 2, "b", None)
    assert stream.table.reads == 2
    await stream.close()
