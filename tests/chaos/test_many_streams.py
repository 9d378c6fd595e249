"""Streams in crowds: of slow readers, and of readers whose worker dies."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.history import check_history, check_logs
from tests.chaos.stack import PARAMETERS, Stack, revive, until
from tests.chaos.stream_client import StreamReader

RESULTS = 4
SLOW = 12  # readers of each result
# A result: 8 MB, as the kernel alone takes up to 4 MB for a client that does not read.
CHUNKS, CHARACTERS = 800, 2400
WATCHED = 0.75  # of it; the end, an event with the whole text in it, is seconds away then
GROWTH = 120_000  # kB; what the kernel does not take, is 180 MB, a machine that stalled 100

STREAMS = 2000
RUNNING = 50  # at once


@dataclass
class SlowReader(StreamReader):
    """Stops reading after the first block until it may go on."""

    may_go_on: asyncio.Event = field(default_factory=asyncio.Event)

    async def pause(self) -> None:
        await self.may_go_on.wait()


async def test_slow_readers_cost_no_memory_and_delay_no_other(stack: Stack) -> None:
    """48 stop reading while 32 MB of text are produced, which others read live; 12 then read on."""
    # At its end each text is read as a whole by all its readers: 16 at once, of one team.
    await stack.restart_api(LLM_MAX_BODY_BYTES="10000000", LLM_MAX_BYTES_IN_FLIGHT=str(2**30))
    await stack.start_worker("alice")
    ids = await asyncio.gather(*(send_text(stack, number) for number in range(RESULTS)))
    may_go_on = asyncio.Event()
    slow = [
        SlowReader(one, receive_buffer=4096, may_go_on=may_go_on)
        for one in ids
        for _ in range(SLOW)
    ]
    fast = [StreamReader(one) for one in ids]
    before = pss(stack.api.pid)
    reading_slowly = [asyncio.create_task(read(stack, reader)) for reader in slow]
    reading = [asyncio.create_task(read(stack, reader)) for reader in fast]

    async def is_mostly_said() -> bool:
        return all(len(reader.text) > WATCHED * CHUNKS * CHARACTERS for reader in fast)

    async with highest_pss(stack.api.pid) as seen:
        await until(is_mostly_said, 60, "the fast ones have read most of it")
    assert max(seen) - before < GROWTH, (before, seen)
    await asyncio.wait_for(asyncio.gather(*reading), 60)
    for reader in fast:
        gaps = [b - a for a, b in zip(reader.news_at, reader.news_at[1:], strict=False)]
        assert max(gaps) < 5.0
        assert reader.deltas > 20

    assert not any(reader.is_over for reader in slow)
    # All of them would read 800 MB in blocks of 4 kB: a minute of a busy machine.
    reading_on, leaving = reading_slowly[::4], [t for n, t in enumerate(reading_slowly) if n % 4]
    for task in leaving:
        task.cancel()
    await asyncio.gather(*leaving, return_exceptions=True)
    may_go_on.set()
    await asyncio.wait_for(asyncio.gather(*reading_on), 60)
    for reader in (*fast, *slow[::4]):
        reader.check_end()
        assert len(reader.text) == CHUNKS * (CHARACTERS + 1) - 1
    check_logs(stack)


async def test_watched_results_stay_live_when_their_worker_dies(stack: Stack) -> None:
    """Thousands are read, 50 of them run: the next worker learns of all, and notifies at once.

    No reader waits for periodic writes, and no reader of a queued result is forgotten.
    """
    await stack.restart_api(LLM_MAX_STREAMS=str(STREAMS + 1000))
    environment = {"LLM_FLUSH_SECONDS": "10", "LLM_WORKER_SLOTS": str(RUNNING)}
    victim = await stack.start_worker("alice", **environment)
    prompt = "Watched {{chunks=100 delay_ms=100}}"
    ids = [await stack.send_one(prompt) for _ in range(RUNNING)]
    await stack.until("worker_id IS NOT NULL", RUNNING, 60)
    for _ in range(RUNNING, STREAMS, 975):
        body = [{"model": "scripted", "content": prompt, "parameters": PARAMETERS}] * 975
        ids += [item["id"] for item in (await stack.client.post("/results/", body)).json]
    readers = [StreamReader(one) for one in ids]
    reading = [asyncio.create_task(read(stack, reader)) for reader in readers]

    async def are_live(attempt: int) -> bool:
        return sum(r.attempt == attempt and r.deltas >= 10 for r in readers) >= RUNNING

    await until(lambda: are_live(1), 60, "the running ones are read")
    for reader in readers:
        reader.deltas = 0
    victim.send_signal(signal.SIGKILL)
    await revive(victim)
    await stack.until("attempt = 2 AND worker_id IS NOT NULL", RUNNING, 60)
    await until(lambda: are_live(2), 9, "they are live again, before anything is flushed")
    assert sum(reader.attempts == [1, 2] for reader in readers) == RUNNING

    answer = await stack.client.post("/results/cancel?model_name=scripted", None)
    assert answer.status == 200
    await asyncio.wait_for(asyncio.gather(*reading), 60)
    for reader in readers:
        reader.check_end()
    await check_history(stack)
    check_logs(stack)


async def read(stack: Stack, reader: StreamReader) -> None:
    # 503: the texts of its team's other readers fill the memory (LLM_MAX_BYTES_IN_FLIGHT).
    await reader.read_to_the_end(lambda: stack.ports["api"], again=(503,))


async def send_text(stack: Stack, number: int) -> str:
    """A result that outputs long words, for about ten seconds."""
    words = " ".join(f"{number:02}é{place:03}".ljust(CHARACTERS, "🙂") for place in range(CHUNKS))
    prompt = f"{{{{delay_ms=12 text={words}}}}}"
    return await stack.send_one(prompt, max_tokens=CHUNKS)


def pss(pid: int) -> int:
    """Memory of a process in kB; pages shared with others count in proportion."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


@contextlib.asynccontextmanager
async def highest_pss(pid: int) -> AsyncIterator[list[int]]:
    """Samples of the process's memory."""
    seen: list[int] = []

    async def look() -> None:
        while True:
            seen.append(pss(pid))
            await asyncio.sleep(0.2)

    looking = asyncio.create_task(look())
    try:
        yield seen
    finally:
        seen.append(pss(pid))
        looking.cancel()
