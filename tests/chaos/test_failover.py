"""A primary with a synchronous standby: one dies, one is unreachable, and they change places."""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path

import pytest

from app.cli.up.triton import EmbeddedTriton
from bench.standby import execute, fetch
from tests.chaos.failover import Plan, fail_over, make_prompts, open_service
from tests.chaos.history import check_history, check_logs
from tests.chaos.http_client import Answer
from tests.chaos.replication import Pair, address, open_pair
from tests.chaos.stack import (
    LEASE_SECONDS,
    PARAMETERS,
    SPEAKING,
    Stack,
    ask_directly,
    check_completed,
    revive,
    until,
)

pytestmark = pytest.mark.shard("failover")
# Time-out of a request while the database is unavailable: longer than a lease.
TIMEOUT_SECONDS = 1.5 * LEASE_SECONDS


async def test_nothing_is_lost_with_the_primary(triton: EmbeddedTriton, tmp_path: Path) -> None:
    """A smaller `make failover`."""
    plan = Plan(results=300, per_second=75, promoted_after=1.0, stalls_for=0.5)
    outcome = await fail_over(plan, tmp_path, triton)
    assert (outcome.accepted, outcome.lost, outcome.doubled) == (300, 0, 0)


Post = Callable[[], Coroutine[None, None, Answer]]


@dataclass
class House:
    """The service on a pair of servers."""

    pair: Pair
    stack: Stack

    async def post(self, prompt: str, key: str | None = None) -> Answer:
        body = {"model": "scripted", "content": prompt, "parameters": PARAMETERS}
        return await self.stack.client.post("/results/", body | {"idempotency_key": key})

    async def restart_primary(self) -> None:
        """Have it crash, and recover what it had on its own disk."""
        self.pair.primary.send_signal(signal.SIGKILL)
        await revive(self.pair.primary)

    async def send_until_waiting(self, *posts: Post) -> list[asyncio.Task[Answer]]:
        """Send these, again if all were refused, until a commit of each waits for the standby."""
        query = """SELECT FROM pg_stat_activity
          WHERE wait_event = 'SyncRep' AND application_name = 'llm api'"""
        async with asyncio.timeout(60):
            while True:
                sent = [asyncio.ensure_future(post()) for post in posts]
                while not all(one.done() for one in sent):
                    if len(await fetch(self.pair.primary, query)) >= len(posts):
                        return sent
                    await asyncio.sleep(0.05)

    async def until_all_listen(self) -> None:
        """Wait until the API and both workers listen on the promoted standby."""
        query = "SELECT FROM pg_stat_activity WHERE query = 'SELECT ''listening'''"

        async def do_they() -> bool:
            return len(await fetch(self.pair.standby, query)) == 3

        await until(do_they, 30, "all listen on the new primary")


@pytest.fixture
async def house(triton: EmbeddedTriton, tmp_path: Path) -> AsyncIterator[House]:
    async with open_pair(tmp_path) as pair:
        await pair.make_synchronous()
        times = {
            "LLM_DATABASE_TIMEOUT_SECONDS": str(TIMEOUT_SECONDS),
            "LLM_LEASE_SECONDS": str(LEASE_SECONDS),
        }
        async with open_service(tmp_path, triton, pair, **times) as stack:
            yield House(pair, stack)


async def test_a_standby_that_is_away_and_a_change_of_places(
    house: House, triton: EmbeddedTriton
) -> None:
    pair, stack = house.pair, house.stack
    keyed = [f"Refused {n} {{{{chunks=2}}}}" for n in range(5)]
    long = [f"Long {n} {{{{chunks=10 delay_ms=1500}}}}" for n in range(20)]
    accepted = await stack.send(long)
    await stack.until(SPEAKING, len(long), 60)

    # Writes wait, and fail after their time-out; reads and running results go on.
    await pair.standby.stop()
    answers = await asyncio.gather(*(house.post(prompt, key=prompt) for prompt in keyed))
    assert {(answer.status, answer.json["code"]) for answer in answers} == {
        (503, "database_unavailable")
    }
    assert await stack.count("true") == len(accepted)  # a commit that was cancelled would show
    assert {row["state"] for row in await stack.read(accepted)} == {"pending"}
    assert not [name for name in stack.workers if "fenced" in stack.log(name)]

    # Started again without its standby, the primary shows what it had committed alone: to a
    # request for a key, and to a repeated request.
    await house.restart_primary()
    (stored, *_) = [
        row["key"] for row in await fetch(pair.primary, "SELECT key FROM idempotency_keys")
    ]
    alone = 0

    def post_without_a_key() -> Coroutine[None, None, Answer]:
        nonlocal alone
        alone += 1
        return house.post("Alone {{chunks=2}}")

    sent = await house.send_until_waiting(
        lambda: house.post(stored, key=stored), post_without_a_key
    )
    await house.restart_primary()
    assert [(await one).status for one in sent] == [503, 503]

    await pair.standby.start()
    await pair.until_streaming("sync")
    for prompt in keyed:
        answer = await house.post(prompt, key=prompt)
        assert answer.status in (200, 202), answer  # 200: it was stored, and has ended
        accepted[str(answer.json["id"])] = prompt

    # A planned change: nothing dies, the old primary only refuses to write.
    await execute(pair.primary, "ALTER SYSTEM SET default_transaction_read_only = on")
    await execute(pair.primary, "SELECT pg_reload_conf()")
    late = asyncio.create_task(stack.send(make_prompts(20)))
    await asyncio.sleep(0.5)  # requests come while no server takes writes
    await pair.standby.promote()
    stack.postgres = address(pair.standby)
    accepted |= await late
    await house.until_all_listen()
    await stack.until_terminal(60)
    await check_completed(stack, accepted, await ask_directly(triton, list(accepted.values())))
    # No client knows if the results without a key are stored.
    assert await stack.count("true") <= len(accepted) + alone
    await check_history(stack)
    check_logs(stack)
