"""Network partitions between hosts, and a failover of a primary that is out of reach."""

import asyncio
from pathlib import Path

import pytest

from tests.chaos.history import check_history, check_logs
from tests.chaos.hosts import open_site
from tests.chaos.http_client import HttpClient
from tests.chaos.stack import (
    LEASE_SECONDS,
    PARAMETERS,
    SPEAKING,
    ask_directly,
    check_completed,
)
from tests.network_hosts import cut_off

pytestmark = [pytest.mark.shard("partitions"), pytest.mark.timeout(400)]

_PARTITION_SECONDS = 1.3 * LEASE_SECONDS
_SETTLING_SECONDS = LEASE_SECONDS / 2  # until what was under way has been answered
_SENDERS = 6  # at each API
_BETWEEN_SECONDS = LEASE_SECONDS / 2


class Senders:
    """Clients that send until they have an id, as docs/idempotency.md has them do."""

    def __init__(self, clients: list[HttpClient]) -> None:
        self.accepted: dict[str, str] = {}
        self.answers = [0 for _ in clients]  # ids received, by API
        self._clients = clients
        self._is_over = False

    async def run(self, number: int) -> None:
        count = 0
        while not self._is_over:
            count += 1
            prompt = f"Host {number} {count} {{{{chunks=10 delay_ms=200}}}}"
            place = number % len(self._clients)
            await self._send(self._clients[place], prompt)
            self.answers[place] += 1
            await asyncio.sleep(0.2)

    def stop(self) -> None:
        self._is_over = True

    async def _send(self, client: HttpClient, prompt: str) -> None:
        body = {"model": "scripted", "content": prompt, "parameters": PARAMETERS}
        while True:
            try:
                answer = await client.post("/results/", body | {"idempotency_key": prompt})
            except (OSError, TimeoutError):
                pass
            else:
                if answer.status < 500:
                    assert answer.status in (200, 202), answer
                    known = self.accepted.setdefault(str(answer.json["id"]), prompt)
                    assert known == prompt
                    return
                assert answer.status == 503, answer
            await asyncio.sleep(0.2)


async def test_partitions_between_any_two_hosts_lose_nothing(tmp_path: Path) -> None:
    """Each lasts longer than a lease, under load at both APIs; the primary stays away."""
    async with open_site(tmp_path) as site:
        stack, senders = site.stack, Senders(site.clients)
        numbers = range(_SENDERS * len(site.clients))
        sending = [asyncio.create_task(senders.run(number)) for number in numbers]
        answered: dict[str, list[bool]] = {}  # by API, while the fault lasted
        for name, fault in site.faults():
            await stack.until(SPEAKING, _SENDERS, 60)
            with fault:
                await asyncio.sleep(_SETTLING_SECONDS)  # answers that were under way still come
                before = list(senders.answers)
                await asyncio.sleep(_PARTITION_SECONDS - _SETTLING_SECONDS)  # the fault's duration
                answered[name] = [
                    now > then for now, then in zip(senders.answers, before, strict=True)
                ]
            await asyncio.sleep(_BETWEEN_SECONDS)  # the load goes on without a fault
        ids = len(senders.accepted)
        with cut_off(site.hosts["db"]):
            await asyncio.sleep(_PARTITION_SECONDS)  # the fault's duration
            await site.fail_over()
            await asyncio.sleep(_PARTITION_SECONDS)  # the load goes on at the new primary
        assert len(senders.accepted) > ids
        senders.stop()
        await asyncio.wait_for(asyncio.gather(*sending), 90)
        await stack.until_terminal(120)
        # Each pair was parted indeed: nothing is committed where a part of the database is out of reach.
        for parted in ("pool | db", "db | standby", "pool alone"):
            assert answered[parted] == [False, False], answered
        assert answered["a | pool"] == [False, True], answered
        assert answered["a | b"] == [True, True], answered
        assert await stack.count("lost_attempts > 0") > 0
        assert len(senders.accepted) > 100
        prompts = list(senders.accepted.values())
        await check_completed(stack, senders.accepted, await ask_directly(site.triton, prompts))
        assert len(set(prompts)) == len(prompts) == await stack.count("true")
        await check_history(stack)
        check_logs(stack)
