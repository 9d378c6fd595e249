"""Messages to a session of the scripted model that are refused, and the ends of sessions."""

import asyncio
import signal
from collections.abc import Iterator
from functools import partial

import grpc
import pytest

from app.cli.up import processes
from app.cli.up.triton import EmbeddedTriton
from tests.conftest import run_triton
from tests.e2e.session_client import SessionClient, connect, open_session
from tests.integration.inference.test_sessions import ENDLESS, MODEL, NEVER, submit
from tests.integration.support import until

# --- messages that are refused ----------------------------------------------------------------------


async def test_a_refused_message_does_nothing_and_the_session_goes_on(
    triton: EmbeddedTriton,
) -> None:
    async with open_session(triton, NEVER, MODEL) as session:
        await session.send(submit(1, "{{chunks=5 delay_ms=5}}"))
        for commands, message in (
            ([submit(2), b"{"], "not JSON"),
            ([submit(2), b"\xff"], "not JSON"),
            ([submit(2), 5], "one member"),
            ([submit(2), {"ack": 1, "close": True}], "one member"),
            ([submit(2), {"stop": [1]}], "unknown command 'stop'"),
            ([submit(2), {"cancel": 1}], "command cancel: 1 has the wrong type"),
            ([submit(2), {"live": ["1"]}], "command live: '1' has the wrong type"),
            ([submit(2), {"ack": True}], "command ack: True has the wrong type"),
            ([submit(2), {"submit": 5}], "command submit: 5 has the wrong type"),
            ([submit(2), {"submit": {"slot": 3}}], "command submit: wrong or missing members"),
            ([submit(2), submit(3, extra=1)], "command submit: wrong or missing members"),
            ([submit(2), submit(3, parameters=[1])], "wrong type"),
            ([submit(2), submit(3, resume={"token_ids": 5, "text": ""})], "wrong type"),
            ([submit(2), submit(3, resume={"text": ""})], "wrong or missing members"),
            ([submit(2), submit(2)], "slot 2 was used before"),
            ([submit(3), submit(2)], "slot 2 was used before"),
            ([submit(2), submit(1)], "slot 1 was used before"),
            ([{"cancel": [1]}, submit(1)], "slot 1 was used before"),
            ([submit(2), {"open": NEVER}], "the session is open already"),
            ([{"open": NEVER}], "the session is open already"),
        ):
            error = await session.until_refused(await session.send(*commands))
            assert error.startswith("INVALID_ARG: ")
            assert message in error, commands
        error = await session.until_refused(await session.send(submit(2), name="other"))
        assert error == "INVALID_ARG: the session is not open"
        await session.send(submit(2))  # its number is still free
        found = await session.until_ended(1, 2)
        assert [generation.finish_reason for generation in found] == ["stop", "stop"]
        assert [generation.tokens for generation in found] == [5, 20]


async def test_a_refused_opening_leaves_no_session(triton: EmbeddedTriton) -> None:
    async with connect(triton, MODEL) as session:
        for commands, message in (
            ([submit(1)], "the session is not open"),
            ([submit(1), {"open": NEVER}], "the session is not open"),
            ([{"open": NEVER}, {"open": NEVER}], "the session is open already"),
            ([{"open": NEVER}, submit(1), submit(1)], "slot 1 was used before"),
            ([{"open": {"window": "2"}}], "command open: '2' has the wrong type"),
            ([{"open": {"size": 2}}], "command open: wrong or missing members"),
            ([{"open": 5}], "command open: wrong or missing members"),
            ([{"close": True}], "the session is not open"),
        ):
            error = await session.until_refused(await session.send(*commands))
            assert error.startswith(f"INVALID_ARG: {message}")
        await session.send({"open": NEVER}, submit(1))
        (generation,) = await session.until_ended(1)
        assert generation.tokens == 20
        await session.close()


# --- ends -------------------------------------------------------------------------------------------


def is_answered(session: SessionClient, number: str) -> bool:
    return number in session.errors or session.slots[1].has_ended


async def reopen(session: SessionClient) -> None:
    """Open a session once the model has ended an earlier one of the same id."""
    async with asyncio.timeout(60):
        while not session.slots[1].has_ended:
            number = await session.send({"open": NEVER}, submit(1))
            await session.until(partial(is_answered, session, number))
            assert session.errors.get(number, "already").endswith("already")
    assert session.slots[1].tokens == 20
    await session.close()


async def test_close_ends_the_generations(triton: EmbeddedTriton) -> None:
    async with connect(triton, MODEL) as session:
        await session.send({"open": NEVER}, submit(1, ENDLESS), submit(2, ENDLESS))
        await session.until(lambda: session.slots[1].tokens and session.slots[2].tokens)
        await session.close()
        assert session.errors == {}
        assert not any(generation.has_ended for generation in session.slots.values())
    async with connect(triton, MODEL) as again:
        again.name = session.name
        await reopen(again)


async def test_a_broken_call_ends_its_session(triton: EmbeddedTriton) -> None:
    """While the model sends nothing: Triton 2.51 may crash if a call ends that it is answering."""
    async with connect(triton, MODEL) as session:
        await session.send({"open": NEVER}, submit(1, ENDLESS))
        await session.until(lambda: session.slots[1].tokens)
    async with connect(triton, MODEL) as again:
        again.name = session.name
        await reopen(again)


@pytest.fixture
def mortal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedTriton]:
    with run_triton(EmbeddedTriton, tmp_path_factory.mktemp("mortal")) as server:
        yield server
        assert server._process is not None
        server._process.kill()  # an orderly end would wait for the call


@pytest.mark.trial
async def test_a_crash_loses_all_slots_after_what_preceded_it(mortal: EmbeddedTriton) -> None:
    """On a server of its own, since the model stays dead there: it takes two seconds to start."""
    async with connect(mortal, MODEL) as session:
        await session.send({"open": NEVER}, submit(1, "{{chunks=1}}"))
        await session.until_ended(1)
        await session.send(
            submit(2, ENDLESS, live=True), submit(3, "{{chunks=9 crash_at=4 delay_ms=20}}")
        )
        await session.until(lambda: session.slots[3].tokens == 4)
        # Triton ends no call to a dead model. It refuses messages once it has noticed the death.
        # One time in 60 it aborts instead: boost cannot lock what the dead process shared with it.
        dead = "Stub process 'scripted_0_0' is not healthy."
        reading = asyncio.create_task(session.until(lambda: dead in session.errors.values()))

        async def is_refused() -> bool:
            await session.send({"ack": 1})
            return reading.done()

        try:
            await until(is_refused, 60)
            await reading
        except (asyncio.InvalidStateError, grpc.aio.AioRpcError):
            await asyncio.gather(reading, return_exceptions=True)
            assert mortal._process is not None
            assert await processes.wait_exit(mortal._process) == -signal.SIGABRT
        assert session.slots[2].tokens > 0
        assert not session.slots[2].has_ended
        assert not session.slots[3].has_ended
