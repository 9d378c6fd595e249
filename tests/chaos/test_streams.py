"""Streams through disconnects and deaths: what a client joined is what is stored, byte for byte."""

import asyncio
import signal

from app.cli.up.triton import EmbeddedTriton
from tests.chaos.history import check_history, check_logs
from tests.chaos.stack import (
    LEASE_SECONDS,
    SPEAKING,
    Stack,
    ask_directly,
    check_completed,
    revive,
    until,
)
from tests.chaos.stream_client import StreamReader, any_of, random_cuts

CLIENTS = 200
CUTS = 20
# They run for 30 s: an API ends and starts meanwhile, also on a machine with other work.
PROMPTS = [f"Streamed {number} {{{{chunks=120 delay_ms=250}}}}" for number in range(CLIENTS // 2)]


def cuts(number: int) -> list[float]:
    """The first come soon: each client is cut off before and after the death of an API."""
    return random_cuts(number, 6, 200) + random_cuts(f"later {number}", CUTS - 6, 900)


async def test_disconnects_and_deaths_splice_no_text(stack: Stack, triton: EmbeddedTriton) -> None:
    """Two clients for each result, 20 disconnects for each client, an API and a worker killed."""
    asking = asyncio.create_task(ask_directly(triton, PROMPTS))
    other_api = await stack.start_api("other")
    for name in ("alice", "bob"):
        await stack.start_worker(name, LLM_WORKER_SLOTS=str(len(PROMPTS) * 3 // 5))
    accepted = await stack.send(PROMPTS)
    readers = [StreamReader(result_id) for result_id in accepted for _ in range(2)]
    ports = list(stack.ports.values())
    reading = [
        asyncio.create_task(reader.read_to_the_end(any_of(ports, number), cuts(number)))
        for number, reader in enumerate(readers)
    ]

    async def are_reading(connections: int) -> bool:
        return all(reader.connections >= connections for reader in readers)

    await until(lambda: are_reading(3), 60, "all were cut off at least twice")
    other_api.send_signal(signal.SIGKILL)
    await revive(other_api)
    await until(lambda: are_reading(6), 60, "all read again")
    killed = await stack.count("state = 'pending' AND worker_id IS NOT NULL")
    assert killed == len(PROMPTS)
    stack.workers["alice"].send_signal(signal.SIGKILL)
    await revive(stack.workers["alice"])

    await asyncio.wait_for(asyncio.gather(*reading), 90)
    for reader in readers:
        reader.check_end()
        assert reader.connections > CUTS
    await check_completed(stack, accepted, await asking)
    # Readers of the dead worker's result were notified of its second attempt.
    again = {
        str(row["id"]) for row in await stack.fetch("SELECT id FROM results WHERE attempt = 2")
    }
    assert len(again) >= len(PROMPTS) // 3
    assert all(reader.attempts == [1, 2] for reader in readers if reader.result_id in again)
    assert all(reader.attempts == [1] for reader in readers if reader.result_id not in again)
    await check_history(stack)
    check_logs(stack)


async def test_a_frozen_process_shows_its_lost_attempt_to_no_reader(
    stack: Stack, triton: EmbeddedTriton
) -> None:
    """It serves and works, sleeps for two leases, and is asked for results that run elsewhere now.

    Its own readers saw text that was never stored; those of another process wait for its return.
    """
    solo = await stack.start_api("solo", "serve --with-worker")
    prompts = [long_words(number) for number in range(20)]
    accepted = await stack.send(prompts)
    await stack.until(SPEAKING, len(prompts), 60)
    own, foreign = ([StreamReader(one) for one in accepted] for _ in range(2))
    port_of = stack.ports.__getitem__
    reading = [
        asyncio.create_task(reader.read_to_the_end(lambda: port_of("solo"))) for reader in own
    ] + [asyncio.create_task(reader.read_to_the_end(lambda: port_of("api"))) for reader in foreign]

    async def have_read(attempt: int, readers: list[StreamReader]) -> bool:
        return all(reader.attempt == attempt and reader.deltas for reader in readers)

    await until(lambda: have_read(1, [*own, *foreign]), 60, "all read")
    solo.send_signal(signal.SIGSTOP)
    stopped_at = asyncio.get_running_loop().time()
    await stack.start_worker("bob")
    try:
        for reader in foreign:
            reader.deltas = 0
        await until(lambda: have_read(2, foreign), 60, "the second attempts are read")
        # They move to the sleeping process, which answers when it wakes, before it knows.
        moved = [
            StreamReader(r.result_id, r.text, r.attempt, list(r.attempts), r.position)
            for r in foreign
        ]
        reading += [
            asyncio.create_task(reader.read_to_the_end(lambda: port_of("solo"))) for reader in moved
        ]
        # Two leases of the frozen process, by the clock of the machine.
        await asyncio.sleep(
            max(0.0, stopped_at + 2 * LEASE_SECONDS - asyncio.get_running_loop().time())
        )
    finally:
        solo.send_signal(signal.SIGCONT)
    await asyncio.wait_for(asyncio.gather(*reading), 90)
    for reader in (*own, *foreign, *moved):
        reader.check_end()
        assert reader.attempts == [1, 2]
    await check_completed(stack, accepted, {prompt: said(prompt) for prompt in prompts})
    assert "fenced" in stack.log("solo")
    await check_history(stack)
    check_logs(stack)


def long_words(number: int) -> str:
    """A prompt whose text is longer than one event, for ten seconds."""
    words = " ".join(f"{number}-{place}-".ljust(400, "é") for place in range(40))
    return f"{{{{delay_ms=250 text={words}}}}}"


def said(prompt: str) -> str:
    """The model's output for such a prompt."""
    return prompt.partition("text=")[2].removesuffix("}}")
