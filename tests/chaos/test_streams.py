"""Streams through disconnects and deaths: what a client joined is what is stored, byte for byte."""

import asyncio
import random
import signal
from collections.abc import Callable

from app.embedded.triton import EmbeddedTriton
from tests.chaos.history import check_history, check_logs
from tests.chaos.stack import Stack, ask_directly, check_completed, revive, until
from tests.chaos.stream_client import StreamReader, random_cuts

CLIENTS = 200
CUTS = 20
PROMPTS = [f"Streamed {number} {{{{chunks=60 delay_ms=150}}}}" for number in range(CLIENTS // 2)]


def any_of(ports: list[int], seed: object) -> Callable[[], int]:
    """A client's choice among the APIs, anew for each connection."""
    chosen = random.Random(str(seed))  # noqa: S311 - not for secrets
    return lambda: chosen.choice(ports)


async def test_disconnects_and_deaths(stack: Stack, triton: EmbeddedTriton) -> None:
    """Two clients for each result, 20 disconnects for each client, an API and a worker killed."""
    asking = asyncio.create_task(ask_directly(triton, PROMPTS))
    other_api = await stack.start_api("other")
    for name in ("alice", "bob"):
        await stack.start_worker(name, LLM_WORKER_SLOTS=str(len(PROMPTS) * 3 // 5))
    told = await stack.send(PROMPTS)
    readers = [StreamReader(result_id) for result_id in told for _ in range(2)]
    ports = list(stack.ports.values())
    reading = [
        asyncio.create_task(
            reader.read_to_the_end(any_of(ports, number), random_cuts(number, CUTS, 900))
        )
        for number, reader in enumerate(readers)
    ]

    async def are_reading(connections: int) -> bool:
        return all(reader.connections >= connections for reader in readers)

    await until(lambda: are_reading(3), 20, "all were cut off at least twice")
    other_api.send_signal(signal.SIGKILL)
    await revive(other_api)
    await until(lambda: are_reading(6), 20, "all read again")
    killed = await stack.count("state = 'pending' AND worker_id IS NOT NULL")
    assert killed == len(PROMPTS)
    stack.workers["alice"].send_signal(signal.SIGKILL)
    await revive(stack.workers["alice"])

    await asyncio.wait_for(asyncio.gather(*reading), 60)
    for reader in readers:
        reader.check_end()
        assert reader.connections > CUTS
    await check_completed(stack, told, await asking)
    # Who read a result of the dead worker was told of its second attempt.
    again = {
        str(row["id"]) for row in await stack.fetch("SELECT id FROM results WHERE attempt = 2")
    }
    assert len(again) >= len(PROMPTS) // 3
    assert all(reader.attempts == [1, 2] for reader in readers if reader.result_id in again)
    assert all(reader.attempts == [1] for reader in readers if reader.result_id not in again)
    await check_history(stack)
    check_logs(stack)
