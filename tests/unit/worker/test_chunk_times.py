"""The times at which the text of running results is written, by a virtual clock; its counts, its trace."""

import asyncio
from typing import cast

import pytest

from app.core import metrics, tracing
from app.core.errors import DatabaseUnavailableError
from app.core.ids import new_id
from app.queue.claim import Claim
from app.queue.job_queue import JobQueue
from app.queue.live_text import Notification
from app.results.streams.hub import StreamHub
from app.results.streams.interest import StreamInterest
from app.worker.backends.triton_backend import Generation, TritonBackend
from app.worker.chunk_writer import ChunkWriter
from tests.unit.worker.desk import Elsewhere
from tests.unit.worker.test_chunk_writer import say
from tests.virtual_time import run_in_virtual_time


class Log:
    """A queue that keeps the texts, the number of notifications and the time of each write."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.writes: list[tuple[float, list[str], int]] = []
        self.seconds = seconds  # that a write takes
        self.outages = 0  # writes that fail first
        self.began = asyncio.get_running_loop().time()
        self.running: dict[object, Generation] = {}
        self.watched = Elsewhere()

    async def append(
        self, _worker: object, chunks: list[object], notifications: list[Notification]
    ) -> None:
        if self.outages:
            self.outages -= 1
            raise DatabaseUnavailableError("away")
        texts = sorted(getattr(chunk, "text") for chunk in chunks)  # noqa: B009
        now = asyncio.get_running_loop().time() - self.began
        self.writes.append((round(now, 3), texts, len(notifications)))
        await asyncio.sleep(self.seconds)  # in virtual time

    def is_read(self, _: object) -> bool:
        return False

    def writer(self, flush_seconds: float) -> ChunkWriter:
        return ChunkWriter(
            cast(JobQueue, self),
            new_id(),
            cast(dict[object, object], self.running),  # type: ignore[arg-type]
            cast(StreamHub, self),
            cast(StreamInterest, self.watched),
            flush_seconds,
        )

    def attempt(
        self, writer: ChunkWriter, *, watched: bool, trace: str | None = None
    ) -> Generation:
        claim = Claim(new_id(), 1, "m", "p", {}, 60.0, is_suspect=False, trace=trace)
        attempt = Generation(claim, cast(TritonBackend, None), writer.on_text)
        self.running[claim.id] = attempt
        if watched:
            self.watched.add(claim.id)
        writer.enter(attempt)
        return attempt


def test_all_text_is_written_at_each_flush_and_a_flush_without_text_writes_nothing() -> None:
    async def work() -> list[tuple[float, list[str], int]]:
        log = Log()
        writer = log.writer(2.0)
        writing = asyncio.create_task(writer.run())
        texts = [log.attempt(writer, watched=False) for _ in range(2)]
        for pause, text in ((1.0, "a"), (2.0, "b"), (4.0, "c")):
            await asyncio.sleep(pause)
            say(texts[0], text)
            say(texts[1], text)
        await asyncio.sleep(5)
        writing.cancel()
        return log.writes

    assert run_in_virtual_time(work()) == [
        (2.0, ["a", "a"], 0),
        (4.0, ["b", "b"], 0),
        (8.0, ["c", "c"], 0),
    ]


@pytest.mark.parametrize(("seconds", "pause"), [(0.01, 0.01), (1.0, 0.05)])
def test_after_a_write_of_watched_text_comes_a_short_pause(seconds: float, pause: float) -> None:
    """As long as the write took, but short: text that comes meanwhile shares the next write."""

    async def work() -> list[float]:
        log = Log(seconds)
        writer = log.writer(1e6)
        writing = asyncio.create_task(writer.run())
        await asyncio.sleep(1)
        attempt = log.attempt(writer, watched=True)
        say(attempt, "a")
        await asyncio.sleep(seconds / 2)
        say(attempt, "b")
        await asyncio.sleep(10)
        writing.cancel()
        return [at for at, _, _ in log.writes]

    assert run_in_virtual_time(work()) == [1.0, pytest.approx(1.0 + seconds + pause)]


def test_results_that_ended_are_not_written() -> None:
    async def work() -> None:
        log = Log()
        writer = log.writer(1e6)
        writing = asyncio.create_task(writer.run())
        kept, ended = (log.attempt(writer, watched=True) for _ in range(2))
        writer.on_announced([new_id()])  # runs elsewhere
        await asyncio.sleep(1)
        assert log.writes == []
        say(kept, "kept")
        say(ended, "ended")
        writer.on_announced([ended.claim.id])
        del log.running[ended.claim.id]
        await asyncio.sleep(1)
        assert [(texts, count) for _, texts, count in log.writes] == [(["kept"], 1)]
        writing.cancel()

    run_in_virtual_time(work())


def test_a_write_waits_for_the_database_and_is_observed_once() -> None:
    async def work() -> None:
        log = Log()
        log.outages = 3
        writer = log.writer(1.0)
        before = sum(metrics.FLUSH.counts)
        seconds = metrics.FLUSH.sum
        writing = asyncio.create_task(writer.run())
        say(log.attempt(writer, watched=False), "a")
        await asyncio.sleep(5)
        writing.cancel()
        assert len(log.writes) == 1
        assert sum(metrics.FLUSH.counts) - before == 1
        assert 0 <= metrics.FLUSH.sum - seconds < 60

    run_in_virtual_time(work())


def test_the_writes_of_a_traced_text_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only those that held some of its text, and only while the process traces."""

    async def work() -> None:
        log = Log()
        writer = log.writer(1.0)
        writing = asyncio.create_task(writer.run())
        traced = log.attempt(writer, watched=False, trace="00-1-2-01")
        silent = log.attempt(writer, watched=False, trace="00-1-3-01")
        plain = log.attempt(writer, watched=False)
        monkeypatch.setattr(tracing, "active", cast(tracing.Tracing, object()))
        for _ in range(2):
            say(traced, "a")
            say(plain, "a")
            await asyncio.sleep(1.5)
        assert traced.flushes is not None
        assert traced.flushes.count == 2
        assert traced.flushes.first <= traced.flushes.last
        assert silent.flushes is None
        assert plain.flushes is None
        monkeypatch.setattr(tracing, "active", None)
        say(traced, "a")
        await asyncio.sleep(2)
        assert len(log.writes) == 3
        assert traced.flushes.count == 2
        writing.cancel()

    run_in_virtual_time(work())
