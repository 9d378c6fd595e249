"""The text of running results: the parts that are written while they run, and their times."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, cast
from uuid import UUID

import pytest

from app.core.ids import new_id
from app.core.listener import APPENDED, split_ids
from app.inference.triton_messages import Delta
from app.queue.claim import Claim
from app.queue.job_queue import JobQueue
from app.queue.live_text import Notification, channel_of, from_payload
from app.queue.progress import Chunk
from app.results.streams.hub import StreamHub
from app.results.streams.interest import StreamInterest
from app.worker.attempt import Attempt
from app.worker.backends.triton_backend import Generation, TritonBackend
from app.worker.chunk_writer import ChunkWriter
from tests.unit.worker.desk import Elsewhere

READER = "a"
Write = tuple[list[str], list[str], list[UUID]]


class Table:
    """A queue that keeps what is appended; a write lasts until it may end.

    A write has the stored texts, the sent texts, and the results whose readers read the table.
    """

    def __init__(self) -> None:
        self.writes: list[Write] = []
        self.has_news = asyncio.Event()
        self.may_end = asyncio.Event()
        self.may_end.set()

    async def append(
        self, _worker_id: UUID, chunks: Sequence[Chunk], notifications: Sequence[Notification]
    ) -> None:
        sent, stored = list[str](), list[UUID]()
        for channel, payload in notifications:
            if channel == APPENDED:
                stored += split_ids(payload)
            else:
                assert channel == channel_of(READER)
                sent += [text.text for text in from_payload(payload)]
        self.writes.append(([chunk.text for chunk in chunks], sent, stored))
        self.has_news.set()
        await self.may_end.wait()


class Readers:
    """A hub whose streams read the results with these ids."""

    def __init__(self) -> None:
        self.ids: set[UUID] = set()

    def is_read(self, result_id: UUID) -> bool:
        return result_id in self.ids


class Desk:
    """A writer at work, and attempts with scripted outputs."""

    def __init__(self, flush_seconds: float) -> None:
        self.table = Table()
        self.running: dict[UUID, Attempt] = {}
        self.readers = Readers()
        self.watched = Elsewhere()
        self.writer = ChunkWriter(
            cast(JobQueue, self.table),
            new_id(),
            self.running,
            cast(StreamHub, self.readers),
            cast(StreamInterest, self.watched),
            flush_seconds,
        )

    def attempt(self, *, watched: bool = True) -> Generation:
        claim = Claim(new_id(), 1, "m", "p", {}, 60.0, is_suspect=False)
        attempt = Generation(claim, cast(TritonBackend, None), self.writer.on_text)
        self.running[claim.id] = attempt
        if watched:
            self.watched.add(claim.id)
        self.writer.enter(attempt)
        return attempt

    async def until_written(self, count: int) -> None:
        async with asyncio.timeout(10):
            while len(self.table.writes) < count:
                self.table.has_news.clear()
                await self.table.has_news.wait()


def say(attempt: Generation, text: str, finish_reason: str | None = None) -> None:
    attempt._on_delta(Delta(text, finish_reason, 1, 1, None, None))


@pytest.fixture
async def desk(request: pytest.FixtureRequest) -> AsyncIterator[Desk]:
    made = Desk(getattr(request, "param", 1e6))
    writing = asyncio.create_task(made.writer.run())
    yield made
    writing.cancel()
    await asyncio.wait([writing])


async def test_text_that_is_read_elsewhere_is_sent_at_once(desk: Desk) -> None:
    watched, other = desk.attempt(), desk.attempt(watched=False)
    say(other, "later")
    say(watched, "now")
    await desk.until_written(1)
    say(watched, " and then")
    await desk.until_written(2)
    assert desk.table.writes == [(["now"], ["now"], []), ([" and then"], [" and then"], [])]


@pytest.mark.parametrize("desk", [0.01], indirect=True)
async def test_all_text_is_stored_now_and_then(desk: Desk) -> None:
    say(desk.attempt(watched=False), "some")
    await desk.until_written(1)
    assert desk.table.writes == [(["some"], [], [])]


async def test_what_comes_during_a_write_shares_the_next(desk: Desk) -> None:
    first, second = desk.attempt(), desk.attempt()
    desk.table.may_end.clear()
    say(first, "a")
    await desk.until_written(1)
    for attempt in (first, second, first):
        say(attempt, "b")
    desk.table.may_end.set()
    await desk.until_written(2)
    stored, sent, ids = desk.table.writes[1]
    assert (sorted(stored), sorted(sent), ids) == (["b", "bb"], ["b", "bb"], [])


async def test_text_that_came_before_the_attempt_was_ours_is_sent_then(desk: Desk) -> None:
    attempt = desk.attempt(watched=False)
    del desk.running[attempt.claim.id]
    say(attempt, "early")
    desk.watched.add(attempt.claim.id)
    desk.writer.on_announced([attempt.claim.id])
    desk.running[attempt.claim.id] = attempt
    desk.writer.enter(attempt)
    await desk.until_written(1)
    assert desk.table.writes == [(["early"], ["early"], [])]


async def test_the_last_words_are_left_to_the_end(desk: Desk) -> None:
    """Their commit would delay the end, which writes and notifies them as well."""
    ended, other = desk.attempt(), desk.attempt()
    say(ended, "all", finish_reason="stop")
    say(other, "some")
    await desk.until_written(1)
    assert desk.table.writes == [(["some"], ["some"], [])]


async def test_an_end_waits_for_the_write_under_way(desk: Desk) -> None:
    desk.table.may_end.clear()
    say(desk.attempt(), "a")
    await desk.until_written(1)
    ending: asyncio.Task[Any] = asyncio.create_task(desk.writer.until_idle())
    for _ in range(5):
        await asyncio.sleep(0)
    assert not ending.done()
    desk.table.may_end.set()
    await ending


async def test_the_text_is_stored_for_a_new_reader(desk: Desk) -> None:
    """Later text is sent."""
    attempt, other = desk.attempt(), desk.attempt()
    say(attempt, "some")
    await desk.until_written(1)
    say(attempt, " more")
    say(other, "else")
    desk.writer.on_announced([attempt.claim.id, new_id()])
    await desk.until_written(2)
    stored, sent, ids = desk.table.writes[1]
    assert (sorted(stored), sent, ids) == ([" more", "else"], ["else"], [attempt.claim.id])
    say(attempt, "!")
    await desk.until_written(3)
    assert desk.table.writes[2] == (["!"], ["!"], [])


async def test_the_text_that_nothing_read_is_stored_for_its_first_reader(desk: Desk) -> None:
    """No more of it need come."""
    attempt, other = desk.attempt(watched=False), desk.attempt(watched=False)
    say(attempt, "some")
    say(other, "else")
    desk.watched.add(attempt.claim.id)
    desk.writer.on_announced([attempt.claim.id])
    await desk.until_written(1)
    assert desk.table.writes == [(["some"], [], [attempt.claim.id])]
    say(attempt, " more")
    await desk.until_written(2)
    assert desk.table.writes[1] == ([" more"], [" more"], [])


async def test_an_attempt_that_has_gone_is_not_announced(desk: Desk) -> None:
    """Its end was committed between the announcement and the write."""
    gone, other = desk.attempt(), desk.attempt()
    say(gone, "some")
    desk.writer.on_announced([gone.claim.id, other.claim.id])
    del desk.running[gone.claim.id]
    await desk.until_written(1)
    assert desk.table.writes == [([], [], [other.claim.id])]


async def test_a_reader_that_comes_when_all_is_stored_is_notified(desk: Desk) -> None:
    """The rest of its text may come much later."""
    attempt = desk.attempt()
    say(attempt, "some")
    await desk.until_written(1)
    for count in (2, 3):
        desk.writer.on_announced([attempt.claim.id])
        await desk.until_written(count)
    assert desk.table.writes[2] == ([], [], [attempt.claim.id])


async def test_log_probabilities_and_long_texts_are_stored_for_their_readers(desk: Desk) -> None:
    scored, long, short = desk.attempt(), desk.attempt(), desk.attempt()
    scored.tokens.append("[{}]")
    long_text = "\U0001f642" * 3_000
    for attempt, text in ((scored, "scored"), (long, long_text), (short, "short")):
        say(attempt, text)
    await desk.until_written(1)
    ((stored, sent, ids),) = desk.table.writes
    assert sorted(stored) == ["scored", "short", long_text]
    assert sent == ["short"]
    assert set(ids) == {scored.claim.id, long.claim.id}


@pytest.mark.parametrize("desk", [0.01], indirect=True)
async def test_text_that_a_stream_reads_is_live_and_otherwise_not(desk: Desk) -> None:
    """Text of this process or another: at once for a new reader, with the next flush after the last."""
    here, elsewhere, unread = (desk.attempt(watched=False) for _ in range(3))
    desk.readers.ids.add(here.claim.id)
    desk.watched.add(elsewhere.claim.id)
    desk.writer.on_announced([elsewhere.claim.id])
    assert [one.live.is_on for one in (here, elsewhere, unread)] == [False, True, False]
    desk.writer.enter(here)
    assert here.live.is_on
    unread.live.set(True)
    changed = asyncio.Event()
    unread.live.on_change = lambda _: changed.set()
    await asyncio.wait_for(changed.wait(), 20)
    assert [one.live.is_on for one in (here, elsewhere, unread)] == [True, True, False]
