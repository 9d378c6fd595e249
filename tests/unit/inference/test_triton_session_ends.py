"""Ends of a session: idle, retired, refused, dead, broken."""

import asyncio

import grpc
import pytest

from app.inference import triton_session
from app.inference.triton_errors import (
    GenerationError,
    ModelDeadError,
    ModelFailedError,
    NotTakenError,
    RefusedError,
    StreamLostError,
)
from tests.unit.inference.session_calls import (
    Engine,
    Part,
    ended,
    failed,
    in_virtual_time,
    now,
    settle,
)

DEAD = "Stub process 'm_0_0' is not healthy."


def rpc_error(detail: str | None) -> grpc.aio.AioRpcError:
    code = grpc.StatusCode.UNAVAILABLE
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), detail)


# --- idle and retired -------------------------------------------------------------------------------


@in_virtual_time
async def test_a_session_without_generations_closes_after_thirty_seconds() -> None:
    engine = Engine()
    (run,) = await engine.running(1)
    await asyncio.sleep(100)  # it has one all the time
    engine.call.respond(ended(1))
    await run.error()
    await asyncio.sleep(29.9)
    assert engine.takes_more()
    assert engine.call.named("close") == []
    await asyncio.sleep(0.2)
    assert not engine.takes_more()
    assert await engine.has_closed()
    assert engine.call.named("close") == [True]
    await asyncio.sleep(60)
    assert engine.call.cancelled_at is None


@in_virtual_time
async def test_a_new_generation_keeps_an_idle_session() -> None:
    engine = Engine()
    (run,) = await engine.running(1)
    for slot in (2, 3):
        engine.call.respond(ended(slot - 1))
        await run.error()
        await asyncio.sleep(29)
        run = engine.run()
        await asyncio.sleep(29)
    assert engine.session.is_open
    engine.call.respond(ended(3))
    assert await run.error() is None
    assert (len(engine.call.named("submit")), engine.call.named("close")) == (3, [])


@in_virtual_time
async def test_a_retired_session_without_generations_closes_at_once() -> None:
    engine = Engine()
    (run,) = await engine.running(1)
    engine.call.respond(ended(1))
    await run.error()
    for _ in range(2):
        engine.session.retire()
    assert not engine.session.is_open
    assert await engine.has_closed()
    engine.session.retire()
    await settle()
    assert engine.call.named("close") == [True]


@in_virtual_time
async def test_a_retired_session_ends_after_its_last_generation() -> None:
    engine = Engine()
    first, second, third = await engine.running(3)
    engine.session.retire()
    assert not engine.session.is_open
    engine.call.respond(ended(1), Part(2, "a"))
    assert await first.error() is None
    assert not await engine.has_closed()
    third.task.cancel()
    engine.call.respond(ended(2, "b"))
    assert await second.error() is None
    assert second.text == "ab"
    assert not await engine.has_closed()
    engine.call.respond(failed(3, "CANCELLED: x"))
    assert await engine.has_closed()


@in_virtual_time
async def test_a_model_that_does_not_end_a_closed_session_loses_its_call() -> None:
    engine = Engine()
    (run,) = await engine.running(1)
    engine.call.respond(ended(1))
    await run.error()
    closed_at = now()
    engine.session.retire()
    await asyncio.wait([engine.session.reading])
    assert engine.call.cancelled_at == pytest.approx(closed_at + triton_session._CLOSE_SECONDS)


# --- errors of messages -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("INVALID_ARG: no", RefusedError),
        ("unexpected inference input 'session_v1' for model 'm'", RefusedError),
        ("Request for unknown model: 'm' is not found", NotTakenError),
        (DEAD, ModelDeadError),
    ],
)
@in_virtual_time
async def test_an_error_of_the_opening_message_ends_all(
    message: str, kind: type[GenerationError]
) -> None:
    engine = Engine()
    first = engine.run()
    await settle()
    second = engine.run()
    await settle()
    engine.call.refuse(0, message)
    for run in (first, second):
        found = await run.error()
        assert found is not None
        assert found[0] is kind
        assert message.removeprefix("INVALID_ARG: ") in found[1]
    assert not engine.session.is_open
    assert engine.call.cancelled_at == now()
    await settle()
    assert engine.call.named("close") == []


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("INVALID_ARG: the session is not open", (NotTakenError, "the session is not open")),
        ("in a model that is not ready", (NotTakenError, "in a model that is not ready")),
        ("UNAVAILABLE: x", (StreamLostError, "x")),
        ("INTERNAL: x", (ModelFailedError, "x")),
    ],
)
@in_virtual_time
async def test_an_error_of_a_later_message_ends_what_it_submitted(
    message: str, expected: tuple[type[Exception], str]
) -> None:
    engine = Engine()
    (first,) = await engine.running(1)
    refused = [engine.run(), engine.run()]
    await settle()
    later = engine.run()
    await settle()
    engine.call.refuse(1, message)
    for run in refused:
        assert await run.error() == expected
    assert not engine.session.is_open
    engine.call.respond(Part(1, "a"), ended(4, "b"))
    assert await later.error() is None
    assert engine.call.cancelled_at is None
    engine.call.respond(ended(1, "c"))
    assert await first.error() is None
    assert (first.text, later.text) == ("ac", "b")
    assert engine.call.cancelled_at == now()


@in_virtual_time
async def test_a_session_whose_last_message_was_refused_closes() -> None:
    """An open session keeps its model loaded, and a command to close it would be refused, too."""
    engine = Engine()
    (first,) = await engine.running(1)
    engine.call.respond(ended(1))
    await first.error()
    second = engine.run()
    await settle()
    engine.call.refuse(1, "INVALID_ARG: no")
    assert await second.error() == (NotTakenError, "no")
    assert engine.call.cancelled_at == now()


@in_virtual_time
async def test_a_close_that_is_refused_ends_the_call() -> None:
    engine = Engine()
    (run,) = await engine.running(1)
    engine.call.respond(ended(1))
    await run.error()
    engine.session.retire()
    await settle()
    assert engine.call.cancelled_at is None
    engine.call.refuse(1, "in a model that is not ready")
    await settle()
    assert engine.call.cancelled_at is not None


@in_virtual_time
async def test_cancelled_generations_of_a_model_without_commands_end_with_the_call() -> None:
    """The model would generate them to their ends."""
    engine = Engine()
    first, second = await engine.running(2)
    first.live.set(True)
    await settle()
    engine.call.refuse(1, "in a model that is not ready")
    for run in (first, second):
        assert engine.call.cancelled_at is None
        run.task.cancel()
        await asyncio.wait([run.task])
    assert engine.call.cancelled_at == now()


@in_virtual_time
async def test_a_refused_command_that_submits_nothing_ends_nothing() -> None:
    engine = Engine()
    (run,) = await engine.running(1)
    run.live.set(True)
    await settle()
    engine.call.refuse(1, "INVALID_ARG: no")
    await settle()
    assert not run.task.done()
    assert not engine.session.is_open
    engine.call.respond(ended(1, "a"))
    assert await run.error() is None
    assert engine.call.cancelled_at == now()


@in_virtual_time
async def test_messages_after_the_first_response_have_a_call_of_their_own() -> None:
    """Triton aborts when it refuses a message on a call that it writes a response to."""
    engine = Engine()
    (first,) = await engine.running(1)
    second = engine.run()
    await settle()
    assert engine.call.carriers == [engine.call, engine.call]
    engine.call.respond(Part(1, "a"))
    await settle()
    third = engine.run()
    await settle()
    side = engine.call.side
    assert side is not None
    assert engine.call.carriers == [engine.call, engine.call, side]
    engine.call.refuse(2, "in a model that is not ready")
    assert await third.error() == (NotTakenError, "in a model that is not ready")
    engine.call.respond(ended(1), ended(2))
    assert await first.error() is None
    assert await second.error() is None
    assert engine.call.cancelled_at == now()
    await asyncio.wait([engine.session.reading])
    assert (side.is_done_writing, side.was_cancelled) == (True, False)


@pytest.mark.parametrize("error", [rpc_error("broken"), None])
@in_virtual_time
async def test_a_session_whose_messages_are_lost_is_lost(error: Exception | None) -> None:
    engine = Engine()
    (run,) = await engine.running(1)
    engine.call.respond(Part(1, "a"))
    await settle()
    run.live.set(True)
    await settle()
    assert engine.call.side is not None
    engine.call.side.end(error)
    detail = "the model ended the session" if error is None else "broken"
    assert await run.error() == (StreamLostError, detail)
    assert not engine.session.is_open
    assert engine.call.cancelled_at == now()


@in_virtual_time
async def test_the_call_of_messages_may_end_after_that_of_responses() -> None:
    """Triton never unloads a model if a call is cancelled while it responds to that."""
    engine = Engine()
    engine.call.ends_side = False
    (run,) = await engine.running(1)
    engine.call.respond(ended(1, "a"))
    await run.error()
    engine.session.retire()
    await settle()
    side = engine.call.side
    assert side is not None
    engine.call.end()
    await asyncio.sleep(triton_session._CLOSE_SECONDS - 1)
    assert (side.is_done_writing, side.was_cancelled) == (True, False)
    assert not engine.session.reading.done()
    ended_at = now()
    side.end()
    await engine.session.reading
    assert now() == pytest.approx(ended_at)
    assert not side.was_cancelled


@in_virtual_time
async def test_a_call_of_messages_that_does_not_end_is_cancelled() -> None:
    """It is sent neither commands that waited for it nor an empty message."""
    engine = Engine()
    engine.call.ends_side = False
    (run,) = await engine.running(1)
    engine.call.respond(Part(1, "a"))
    await settle()
    engine.run()
    await settle()
    side = engine.call.side
    assert side is not None
    sent = len(engine.call.messages)
    engine.call.may_write.clear()
    run.live.set(True)
    await settle()
    run.live.set(False)
    engine.call.end()
    assert await run.error() == (StreamLostError, "the model ended the session")
    ended_at = now()
    engine.call.may_write.set()
    await engine.session.reading
    await settle()
    assert (len(engine.call.messages), engine.call.named("lazy")) == (sent + 1, [])
    assert side.is_done_writing
    assert side.cancelled_at == pytest.approx(ended_at + triton_session._CLOSE_SECONDS, abs=0.1)


@in_virtual_time
async def test_a_dead_model_ends_all() -> None:
    engine = Engine()
    (first,) = await engine.running(1)
    engine.call.respond(Part(1, "a"))
    second = engine.run()
    await settle()
    engine.call.refuse(1, DEAD)
    assert await second.error() == (ModelDeadError, DEAD)
    assert await first.error() == (StreamLostError, DEAD)
    assert first.text == "a"
    assert not engine.session.is_open
    assert engine.call.cancelled_at == now()


# --- broken calls -----------------------------------------------------------------------------------


@in_virtual_time
async def test_a_session_that_the_model_ends_loses_its_generations() -> None:
    engine = Engine()
    first, second = await engine.running(2)
    engine.call.respond(Part(1, "a"), ended(2))
    engine.call.end()
    assert await first.error() == (StreamLostError, "the model ended the session")
    assert await second.error() is None
    assert first.text == "a"
    assert not engine.session.is_open
    await engine.session.reading
    engine.session.retire()
    await settle()
    assert engine.session._writing.done()
    assert engine.call.named("close") == []


@pytest.mark.parametrize("has_output", [False, True])
@pytest.mark.parametrize(
    ("detail", "kind", "text"),
    [
        ("failed to connect to all addresses", NotTakenError, "failed to connect to all addresses"),
        ("Socket closed", StreamLostError, "Socket closed"),
        (None, StreamLostError, "UNAVAILABLE"),
    ],
)
@in_virtual_time
async def test_a_broken_call_loses_all_generations(
    has_output: bool, detail: str | None, kind: type[Exception], text: str
) -> None:
    engine = Engine()
    runs = await engine.running(2)
    if has_output:
        engine.call.respond(Part(1, "a"), Part(2, "b"))
    engine.call.end(rpc_error(detail))
    for run in runs:
        assert await run.error() == (kind, text)
    assert [run.text for run in runs] == (["a", "b"] if has_output else ["", ""])
    assert not engine.session.is_open


@pytest.mark.parametrize("error", [rpc_error("Socket closed"), asyncio.InvalidStateError("done")])
@in_virtual_time
async def test_an_error_of_writing_is_reported_by_the_reading(error: Exception) -> None:
    engine = Engine()
    engine.call.write_error = error
    run = engine.run()
    await settle()
    assert not run.task.done()
    assert engine.session._writing.exception() is None
    engine.call.end(rpc_error("Socket closed"))
    assert await run.error() == (StreamLostError, "Socket closed")


@in_virtual_time
async def test_a_closed_channel_loses_all_generations() -> None:
    engine = Engine()
    runs = await engine.running(2)
    engine.call.cancel()
    for run in runs:
        assert await run.error() == (StreamLostError, "the connection was closed")
    assert engine.session.reading.cancelled()


@in_virtual_time
async def test_a_generation_that_was_cancelled_is_not_waited_for_after_a_break() -> None:
    engine = Engine()
    (run,) = await engine.running(1)
    run.task.cancel()
    await settle()
    began = now()
    engine.call.end(rpc_error("Socket closed"))
    assert await run.error() == (asyncio.CancelledError, "")
    assert now() == began
