"""Two thousand long-polls and two hundred streams in one process: all are notified of the end."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import psutil
import pytest

from app.core.database import Database
from app.core.listener import _PING_SECONDS, _PING_TIMEOUT_SECONDS
from app.queue.job_queue import JobQueue
from tests.chaos.history import check_history, check_logs
from tests.chaos.http_client import HttpClient
from tests.chaos.stack import PARAMETERS, Stack, until
from tests.chaos.stream_client import StreamReader
from tests.conftest import make_settings
from tests.silent_proxy import SilentProxy

WAITERS = 2000
READERS = 200
POLL_SECONDS = 60
# Until a silent connection is noticed, and as much again for a busy machine.
NOTICED_SECONDS = 2 * (_PING_SECONDS + _PING_TIMEOUT_SECONDS)

_LISTENER = """
FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'llm api'
AND (query LIKE 'LISTEN%' OR query LIKE 'SELECT ''listening''%')"""


@dataclass
class Crowd:
    """The waiting clients, and the time of each one's notification."""

    stack: Stack
    proxy: SilentProxy
    told_at: list[float] = field(default_factory=list)
    states: set[str] = field(default_factory=set)

    async def wait(self, client: HttpClient, result_id: str) -> None:
        answer = await client.get(f"/results/{result_id}?wait={POLL_SECONDS}")
        assert answer.status == 200, answer
        self.states.add(answer.json["state"])
        self.told_at.append(asyncio.get_running_loop().time())

    async def read(self, reader: StreamReader) -> None:
        await reader.read_to_the_end(lambda: self.stack.ports["api"])
        reader.check_end()
        self.told_at.append(asyncio.get_running_loop().time())

    async def until_parked(self) -> None:
        """Wait until the API has nothing to do: all have asked, and wait."""
        process = psutil.Process(self.stack.api.pid)

        async def is_idle() -> bool:
            before = sum(process.cpu_times()[:2])
            await asyncio.sleep(0.4)  # CPU time is counted over so long
            return sum(process.cpu_times()[:2]) - before < 0.05

        await until(is_idle, 30, "the API has answered what can be answered")
        assert not self.told_at

    async def break_listener(self, fault: str) -> None:
        """Have the API listen to nothing, with or without its knowledge."""
        if fault == "terminated":
            ended = await self.stack.fetch(f"SELECT pg_terminate_backend(pid) {_LISTENER}")
            assert len(ended) == 1
        elif fault == "half-open":
            assert self.proxy.freeze_the_open(listening_only=True) == 1


@pytest.fixture
async def crowd(stack: Stack) -> AsyncIterator[Crowd]:
    """An API that reaches PostgreSQL through a proxy."""
    async with SilentProxy(stack.postgres.host, stack.postgres.port) as proxy:
        await stack.restart_api(LLM_DATABASE_URL=f"127.0.0.1:{proxy.port}")
        yield Crowd(stack, proxy)
        await stack.api.stop()


@pytest.mark.parametrize("fault", ["none", "terminated", "half-open"])
async def test_all_waiters_are_notified_of_the_end(crowd: Crowd, fault: str) -> None:
    stack, loop = crowd.stack, asyncio.get_running_loop()
    ids = await send_bulk(stack, WAITERS)
    settings = make_settings(stack.postgres, stack.database)
    async with (
        HttpClient("127.0.0.1", stack.ports["api"], WAITERS) as client,
        Database(settings, "tests") as database,
    ):
        waiting = [asyncio.create_task(crowd.wait(client, one)) for one in ids]
        readers = [StreamReader(one) for one in ids[:READERS]]
        waiting += [asyncio.create_task(crowd.read(reader)) for reader in readers]
        await crowd.until_parked()

        await crowd.break_listener(fault)
        ended_at = loop.time()
        assert await JobQueue(database, settings).cancel("default", model_name="scripted") == len(
            ids
        )
        await asyncio.wait_for(asyncio.gather(*waiting), POLL_SECONDS)

    assert len(crowd.told_at) == WAITERS + READERS
    assert crowd.states == {"failed"}
    assert max(crowd.told_at) - ended_at < NOTICED_SECONDS
    await check_history(stack)
    check_logs(stack)


async def test_streams_outlive_a_silent_listener(crowd: Crowd) -> None:
    """Text of the silence is shown when it is noticed; then the text is live again."""
    stack, loop = crowd.stack, asyncio.get_running_loop()
    await stack.start_worker("alice", LLM_FLUSH_SECONDS="10")
    accepted = await stack.send([f"Silence {n} {{{{chunks=2000 delay_ms=75}}}}" for n in range(20)])
    readers = [StreamReader(one) for one in accepted]
    reading = [asyncio.create_task(crowd.read(reader)) for reader in readers]

    async def have(deltas: int) -> bool:
        return all(reader.deltas >= deltas for reader in readers)

    await until(lambda: have(10), 60, "all read")
    silent_at = loop.time()
    await crowd.break_listener("half-open")

    async def are_live_again() -> bool:
        back = silent_at + _PING_TIMEOUT_SECONDS
        return all(sum(at > back for at in reader.news_at) > 20 for reader in readers)

    await until(are_live_again, 90, "all are live again")
    async with HttpClient("127.0.0.1", stack.ports["api"], 1) as client:
        answer = await client.post("/results/cancel?model_name=scripted", None)
        assert answer.status == 200, answer
    await asyncio.wait_for(asyncio.gather(*reading), 60)
    for reader in readers:
        gaps = [b - a for a, b in zip(reader.news_at, reader.news_at[1:], strict=False)]
        assert max(gaps) < NOTICED_SECONDS
    check_logs(stack)


async def send_bulk(stack: Stack, count: int) -> list[str]:
    """Results that no worker takes; their ids."""
    ids: list[str] = []
    for _ in range(0, count, 1000):
        body = [{"model": "scripted", "content": "Wait", "parameters": PARAMETERS}] * 1000
        answer = await stack.client.post("/results/", body)
        assert answer.status == 202
        ids += [item["id"] for item in answer.json]
    return ids
