"""Generations of a session: commands in, outputs by slot, cancellation, acknowledgements, idle times."""

import asyncio
from typing import Any

import pytest

from app.inference import triton_session
from app.inference.triton_errors import (
    ModelFailedError,
    NotTakenError,
    RefusedError,
    StreamLostError,
)
from app.inference.triton_messages import Delta, EarlierText
from app.inference.triton_session import LiveSwitch
from tests.unit.inference.session_calls import (
    FLUSH_SECONDS,
    Engine,
    Part,
    ended,
    failed,
    in_virtual_time,
    now,
    numbers,
    settle,
)

OPEN = {"open": {"flush_seconds": FLUSH_SECONDS, "window": 4}}


@in_virtual_time
async def test_commands_of_a_loop_round_share_a_message() -> None:
    engine = Engine()
    for prompt in ("a", "é🙂\0"):
        engine.run(prompt)
    await settle()
    (message,) = engine.call.messages
    assert message.commands == [
        OPEN,
        {"submit": {"slot": 1, "prompt": "a", "parameters": {"seed": 1}}},
        {"submit": {"slot": 2, "prompt": "é🙂\0", "parameters": {"seed": 1}}},
    ]
    assert (message.model, message.text_input) == ("m", "")
    assert 0 < len(message.session) <= 64
    engine.run("b")
    await settle()
    assert engine.call.messages[1].commands == [
        {"submit": {"slot": 3, "prompt": "b", "parameters": {"seed": 1}}}
    ]
    assert engine.call.messages[1].session == message.session
    assert engine.call.messages[1].id != message.id


@in_virtual_time
async def test_commands_during_a_write_share_the_next_message() -> None:
    engine = Engine()
    engine.call.may_write.clear()
    for prompt in ("a", "b", "c"):
        engine.run(prompt)
        await settle()
    engine.call.may_write.set()
    await settle()
    assert [len(message.commands) for message in engine.call.messages] == [2, 2]


@in_virtual_time
async def test_a_session_sends_nothing_before_its_first_generation() -> None:
    engine = Engine()
    await settle()
    assert engine.call.messages == []


@in_virtual_time
async def test_members_of_a_submission_are_sent_where_they_matter() -> None:
    engine = Engine()
    earlier = EarlierText("é", numbers(7, -8))
    engine.run(is_live=True)
    engine.run(returns_ids=True, earlier=earlier)
    await settle()
    known = {"prompt": "p", "parameters": {"seed": 1}}
    assert engine.call.named("submit") == [
        {"slot": 1, "live": True} | known,
        {"slot": 2, "token_ids": True, "resume": {"token_ids": [7, -8], "text": "é"}} | known,
    ]


@in_virtual_time
async def test_outputs_reach_their_slots() -> None:
    engine = Engine()
    first, second = await engine.running(2, returns_ids=True)
    third = engine.run()
    await settle()
    engine.call.respond(
        Part(2, "é🙂", 2, (5, 6), event={"prompt_tokens": 9}),
        Part(3, "c", logprobs='[{"1": {}}]'),
        ended(1, "a", "length", ids=(7,)),
    )
    assert await first.error() is None
    assert first.deltas == [Delta("a", "length", 0, 1, None, 1, numbers(7))]
    assert second.deltas == [Delta("é🙂", None, 9, 2, None, 1, numbers(5, 6))]
    assert third.deltas == [Delta("c", None, 0, 1, '[{"1": {}}]', 1, None)]
    assert not second.task.done()
    assert not third.task.done()
    engine.call.respond(ended(3, "d"), ended(2, "", tokens=0))
    assert await third.error() is await second.error() is None
    assert (third.text, second.text) == ("cd", "é🙂")
    assert second.deltas[1].token_ids == b""


@in_virtual_time
async def test_an_error_ends_its_slot_after_the_text_of_its_response() -> None:
    engine = Engine()
    refused, lost, failing, other = await engine.running(4)
    engine.call.respond(
        failed(1, "INVALID_ARG: no"),
        failed(2, "UNAVAILABLE: the engine died", "ab"),
        failed(3, "INTERNAL: x", "cd"),
        Part(4, "e"),
    )
    assert await refused.error() == (RefusedError, "no")
    assert await lost.error() == (StreamLostError, "the engine died")
    assert await failing.error() == (ModelFailedError, "x")
    assert (lost.text, failing.text) == ("ab", "cd")
    assert refused.deltas == []  # an error alone is no answer
    assert (other.text, other.task.done(), engine.session.is_open) == ("e", False, True)


@in_virtual_time
async def test_tokens_that_precede_an_error_count_although_they_are_no_text() -> None:
    engine = Engine()
    (run,) = await engine.running(1)
    engine.call.respond(Part(1, "", 3, event={"error": "UNAVAILABLE: x"}))
    assert await run.error() == (StreamLostError, "x")
    assert [delta.completion_tokens for delta in run.deltas] == [3]


@in_virtual_time
async def test_a_bug_in_a_consumer_ends_its_generation_alone() -> None:
    engine = Engine()
    calls: list[Delta] = []

    def break_down(delta: Delta) -> None:
        calls.append(delta)
        raise KeyError("a bug")

    broken = engine.run(on_delta=break_down)
    (other,) = [engine.run()]
    await settle()
    engine.call.respond(Part(1, "a"), Part(2, "b"))
    assert await broken.error() == (KeyError, "'a bug'")
    await settle()
    assert engine.call.named("cancel") == [[1]]
    engine.call.respond(Part(1, "c"), Part(2, "d"))
    engine.call.respond(failed(1, "CANCELLED: x", "e"), ended(2, "f"))
    assert await other.error() is None
    assert (other.text, len(calls)) == ("bdf", 1)
    assert engine.session.is_open


@in_virtual_time
async def test_a_submission_that_json_cannot_hold_fails_alone() -> None:
    engine = Engine()
    engine.run()
    await settle()
    wrong, right = engine.run("\ud800"), engine.run("b")
    found = await wrong.error()
    assert found is not None
    assert issubclass(found[0], TypeError)
    await settle()
    assert [one["prompt"] for one in engine.call.named("submit")] == ["p", "b"]
    engine.call.respond(ended(engine.call.named("submit")[1]["slot"]))
    assert await right.error() is None


# --- cancellation -----------------------------------------------------------------------------------


@in_virtual_time
async def test_a_cancelled_generation_has_the_output_that_was_joined() -> None:
    engine = Engine()
    cancelled, other = await engine.running(2)
    engine.call.respond(Part(1, "a"), Part(2, "b"))
    await settle()
    cancelled.task.cancel()
    await settle()
    assert engine.call.messages[1].commands == [{"cancel": [1]}]
    assert not cancelled.task.done()
    engine.call.respond(Part(1, "c"))
    engine.call.respond(failed(1, "CANCELLED: x", "d"))
    assert await cancelled.error() == (asyncio.CancelledError, "")
    assert (cancelled.text, other.text, other.task.done()) == ("acd", "b", False)


@in_virtual_time
async def test_a_cancelled_generation_waits_for_half_a_second_at_most() -> None:
    engine = Engine()
    (run,) = await engine.running(1)
    began = now()
    run.task.cancel()
    assert await run.error() == (asyncio.CancelledError, "")
    assert now() - began == pytest.approx(triton_session._LAST_OUTPUT_SECONDS)
    engine.call.respond(failed(1, "CANCELLED: x", "late"))
    await settle()
    assert run.deltas == []
    assert engine.session.is_open


@in_virtual_time
async def test_a_generation_that_is_cancelled_twice_gets_no_more_output() -> None:
    engine = Engine()
    (run,) = await engine.running(1)
    for _ in range(2):
        run.task.cancel()
        await settle()
    assert run.task.cancelled()
    engine.call.respond(failed(1, "CANCELLED: x", "late"))
    await settle()
    assert run.deltas == []


@in_virtual_time
async def test_a_generation_that_is_cancelled_before_it_is_sent_is_sent_and_cancelled() -> None:
    engine = Engine()
    run = engine.run()
    await asyncio.sleep(0)
    run.task.cancel()
    await settle()
    submission, cancellation = engine.call.commands[1:]
    assert "submit" in submission
    assert cancellation == {"cancel": [1]}


@in_virtual_time
async def test_output_in_the_moment_of_the_cancellation_ends_the_wait() -> None:
    """A generation that has ended meanwhile is still a cancelled one to its caller."""
    engine = Engine()
    (run,) = await engine.running(1)
    run.task.cancel()
    await settle()
    began = now()
    engine.call.respond(ended(1, "a"))
    assert await run.error() == (asyncio.CancelledError, "")
    assert (run.text, now()) == ("a", began)


# --- live and lazy ----------------------------------------------------------------------------------


@in_virtual_time
async def test_a_switch_sends_its_changes_while_its_generation_runs() -> None:
    engine = Engine()
    first, second = await engine.running(2)
    for is_on in (False, True, True, False):
        second.live.set(is_on)
        await settle()
    assert engine.call.commands[3:] == [{"live": [2]}, {"lazy": [2]}]
    engine.call.respond(ended(2))
    assert await second.error() is None
    second.live.set(True)
    first.task.cancel()
    await first.error()
    first.live.set(True)
    await settle()
    assert engine.call.commands[5:] == [{"cancel": [1]}]


def test_a_switch_reports_changes_alone() -> None:
    switch = LiveSwitch()
    switch.set(True)
    changes: list[bool] = []
    switch.on_change = changes.append
    for is_on in (True, False, False, True):
        switch.set(is_on)
    assert changes == [False, True]


# --- long messages ----------------------------------------------------------------------------------


@in_virtual_time
async def test_a_message_has_as_many_commands_as_fit() -> None:
    engine = Engine()
    await engine.running(1)
    long = triton_session._MESSAGE_BYTES
    runs = [engine.run("x" * size) for size in (10, long, 10, long // 2, long // 2, 10)]
    await settle()
    slots = [
        [command["submit"]["slot"] for command in message.commands]
        for message in engine.call.messages[1:]
    ]
    assert slots == [[2], [3], [4, 5], [6, 7]]
    engine.call.refuse(2, "INVALID_ARG: too long")
    assert await runs[1].error() == (NotTakenError, "too long")
    for slot in (2, 4, 5, 6, 7):
        engine.call.respond(ended(slot))
    assert [await run.error() for run in (runs[0], *runs[2:])] == [None] * 5


# --- acknowledgements -------------------------------------------------------------------------------


@in_virtual_time
async def test_each_half_of_the_window_is_acknowledged() -> None:
    engine = Engine()
    (run,) = await engine.running(1)
    acknowledged: dict[int, Any] = {}
    for count in range(1, 9):
        engine.call.respond(Part(1, "a"))
        await settle()
        if engine.call.named("ack") != list(acknowledged.values()):
            acknowledged[count] = engine.call.named("ack")[-1]
    assert acknowledged == {2: 2, 4: 4, 6: 6, 8: 8}
    assert run.text == "a" * 8


@in_virtual_time
async def test_a_generation_ends_before_its_response_is_acknowledged() -> None:
    """Writing keeps the loop: the result's end must not wait for it."""
    engine = Engine()
    (run,) = await engine.running(1)
    written: list[object] = []
    run.task.add_done_callback(lambda _: written.append(list(engine.call.named("ack"))))
    engine.call.respond(Part(1, "a"))
    engine.call.respond(ended(1, "b"))
    await settle()
    assert (written, engine.call.named("ack")) == ([[]], [2])


@in_virtual_time
async def test_errors_of_messages_are_no_responses_of_the_session() -> None:
    engine = Engine()
    await engine.running(1)
    engine.run()
    await settle()
    engine.call.respond(Part(1, "a"))
    engine.call.refuse(1, "INVALID_ARG: no")
    await settle()
    assert engine.call.named("ack") == []
    engine.call.respond(Part(1, "a"))
    await settle()
    assert engine.call.named("ack") == [2]
