"""Messages of a session: commands as the model reads them, and what a response has for each slot."""

import json
from typing import Any

import orjson
import pytest

from app.inference.session_messages import (
    SlotOutput,
    build_message,
    build_submission,
    encode_command,
    read_step,
)
from app.inference.triton_errors import ModelFailedError
from app.inference.triton_messages import Delta, EarlierText, build_request
from tests.unit.inference.session_calls import (
    Engine,
    Part,
    ended,
    in_virtual_time,
    now,
    numbers,
    read_message,
    step_tensors,
    strings,
    to_response,
)


def read(*parts: Part, with_ids: tuple[int, ...] = (), **changes: bytes) -> list[SlotOutput]:
    response = to_response(step_tensors(*parts) | changes)
    return read_step(response, with_ids.__contains__)


def deltas(*parts: Part, **options: Any) -> list[Delta]:
    return [output.delta for output in read(*parts, **options)]


def test_a_message_is_what_the_model_reads() -> None:
    commands: list[dict[str, Any]] = [{"open": {"window": 3}}, {"cancel": [1, 2]}, {"x": "é\0🙂"}]
    message = read_message(
        build_message("m", "session", "session-1", [*map(encode_command, commands)])
    )
    assert (message.model, message.session, message.id) == ("m", "session", "session-1")
    assert (message.commands, message.text_input) == (commands, "")


def test_messages_do_not_share_their_tensors() -> None:
    first = build_message("a", "one", "1", [encode_command({"ack": 1})])
    build_message("b", "two", "2", [encode_command({"ack": 2}), encode_command({"ack": 3})])
    assert (read_message(first).session, read_message(first).commands) == ("one", [{"ack": 1}])


@pytest.mark.parametrize("value", ["\ud800", 1 << 64, b"x"])
def test_a_command_that_json_cannot_hold_is_refused(value: Any) -> None:
    with pytest.raises(TypeError):
        encode_command({"x": value})


@pytest.mark.parametrize(
    ("options", "members"),
    [
        ({}, {}),
        ({"is_live": True}, {"live": True}),
        ({"returns_ids": True}, {"token_ids": True}),
        (
            {"earlier": EarlierText("é", numbers(1, -2, 1 << 30))},
            {"resume": {"token_ids": [1, -2, 1 << 30], "text": "é"}},
        ),
        ({"earlier": EarlierText("", b"")}, {"resume": {"token_ids": [], "text": ""}}),
    ],
)
def test_a_submission_has_only_what_differs_from_the_default(
    options: dict[str, Any], members: dict[str, Any]
) -> None:
    known: dict[str, Any] = {"is_live": False, "returns_ids": False, "earlier": None}
    command = build_submission(3, "p", {"a": {"b": 1}}, **known | options)
    expected = {"slot": 3, "prompt": "p", "parameters": {"a": {"b": 1}}} | members
    # As JSON, in which true is not 1.
    assert json.dumps(command, sort_keys=True) == json.dumps({"submit": expected}, sort_keys=True)


def test_lengths_count_code_points() -> None:
    texts = ["", "aé", "漢🙂\n", "e\u0301"]
    found = read(*(Part(slot, text, slot) for slot, text in enumerate(texts, start=5)))
    assert [output.slot for output in found] == [5, 6, 7, 8]
    assert [output.delta.text for output in found] == texts
    assert [output.delta.completion_tokens for output in found] == [5, 6, 7, 8]


def test_token_ids_go_to_the_slots_that_request_them() -> None:
    parts = (
        Part(1, "a", 2),
        Part(2, "b", 2, (7, -8)),
        Part(3, "", 0),
        Part(4, "c", 1, (9,)),
    )
    found = deltas(*parts, with_ids=(2, 3, 4))
    assert [delta.token_ids for delta in found] == [None, numbers(7, -8), b"", numbers(9)]
    assert [delta.token_ids for delta in deltas(Part(1, "a", 2))] == [None]
    for wrong in ((), (1, 2, 4), (2,)):
        with pytest.raises(ValueError, match="lengths and contents"):
            read(*parts, with_ids=wrong)


def test_events_belong_to_their_slots() -> None:
    found = read(
        Part(1, "a", event={"prompt_tokens": 70_000}),
        Part(2, "b"),
        Part(3, "c", event={"error": "INTERNAL: x"}),
        ended(4, "d", "length"),
    )
    assert [output.error for output in found] == [None, None, "INTERNAL: x", None]
    assert [output.delta.prompt_tokens for output in found] == [70_000, 0, 0, 0]
    assert [output.delta.finish_reason for output in found] == [None, None, None, "length"]


@pytest.mark.parametrize("tail", ["", "\0"])
def test_nul_is_replaced_and_its_neighbours_keep_their_places(tail: str) -> None:
    found = deltas(Part(1, "a\0b"), Part(2, f"é{tail}"))
    assert [delta.text for delta in found] == ["a\ufffdb", "é" + tail.replace("\0", "\ufffd")]


def test_log_probabilities_are_json_that_postgres_can_hold() -> None:
    given = ["", r'[{"t": "\u0000"}]', '[{"p": -Infinity}]', "null"]
    found = deltas(*(Part(slot, logprobs=text) for slot, text in enumerate(given, start=1)))
    texts = [delta.logprobs for delta in found]
    assert (texts[0], texts[3]) == (None, None)
    assert [orjson.loads(text or "") for text in texts[1:3]] == [[{"t": "\ufffd"}], [{"p": None}]]
    assert [delta.logprobs for delta in deltas(Part(1), Part(2))] == [None, None]


@pytest.mark.parametrize(("version", "expected"), [("7", 7), ("", None)])
def test_the_version_of_the_model_is_that_of_each_slot(version: str, expected: int | None) -> None:
    response = to_response(step_tensors(Part(1), Part(2)), version)
    found = read_step(response, lambda _: False)
    assert [output.delta.model_version for output in found] == [expected, expected]


def test_an_event_of_a_slot_that_is_not_listed_is_no_response() -> None:
    event = json.dumps({"slot": 2, "finish_reason": "stop"})
    with pytest.raises(ValueError, match="contents"):
        read(Part(1, "a"), session_events=strings(event))


def test_a_response_may_have_no_slots() -> None:
    assert read() == []


# --- unreadable responses ---------------------------------------------------------------------------


def damaged(**tensors: bytes | None) -> dict[str, bytes]:
    """A response for the slots 1 and 2 with other tensors; None removes one."""
    whole: dict[str, bytes | None] = dict(step_tensors(Part(1, "a"), Part(2, "b")))
    changed = whole | tensors
    return {name: content for name, content in changed.items() if content is not None}


@pytest.mark.parametrize(
    "tensors",
    [
        damaged(session_slots=numbers(1)),
        damaged(session_slots=numbers(1, 7)),
        damaged(session_slots=b"abc"),
        damaged(session_slots=None),
        damaged(session_text_lengths=numbers(1, 2)),
        damaged(session_text_lengths=numbers(1, 0)),
        damaged(session_text_lengths=numbers(1)),
        damaged(num_output_tokens=numbers(1, 1, 1)),
        damaged(text_output=strings("a", "b")),
        damaged(text_output=b""),
        damaged(text_output=b"\1"),
        damaged(token_ids=numbers(5)),
        damaged(logprobs=strings("[]")),
        damaged(logprobs=strings("[NaN", "")),
        damaged(session_events=strings("{")),
        damaged(session_events=strings("[1]")),
        damaged(session_events=strings("{}")),
        damaged(session_events=strings('{"slot": 3, "finish_reason": "stop"}')),
    ],
    ids=str,
)
@in_virtual_time
async def test_a_response_that_does_not_fit_together_fails_all(tensors: dict[str, bytes]) -> None:
    engine = Engine()
    runs = await engine.running(2)
    engine.call.send(to_response(tensors))
    await check_failed(engine, runs)


async def check_failed(engine: Engine, runs: list[Any]) -> None:
    for run in runs:
        found = await run.error()
        assert found is not None
        assert found[0] is ModelFailedError
        assert found[1].startswith("The model's response cannot be read: ")
    assert not engine.session.is_open
    assert engine.call.cancelled_at == now()


@in_virtual_time
async def test_a_version_that_is_no_number_fails_all() -> None:
    engine = Engine()
    runs = await engine.running(2)
    engine.call.send(to_response(damaged(), "new"))
    await check_failed(engine, runs)


@in_virtual_time
async def test_a_slot_that_has_ended_gets_no_more() -> None:
    engine = Engine()
    done, other = await engine.running(2)
    engine.call.respond(ended(1, "a"), Part(1, "b"), Part(2, "c"))
    assert await done.error() is None
    assert done.text == "a"
    await check_failed(engine, [other])


def test_log_probabilities_of_prompts_are_those_of_their_slots() -> None:
    first, second, third = deltas(
        Part(1, "a", prompt_logprobs="[null]"), Part(2, "b"), Part(3, "c", prompt_logprobs="[NaN]")
    )
    assert [first.prompt_logprobs, second.prompt_logprobs] == ["[null]", None]
    assert third.prompt_logprobs == "[null]"
    assert [one.prompt_logprobs for one in deltas(Part(1, "a"), Part(2, "b"))] == [None, None]


def test_token_ids_of_a_prompt_are_no_sampling_parameter() -> None:
    parameters = {"max_tokens": 1, "prompt_token_ids": [3, 1]}
    command = build_submission(1, "p", parameters, is_live=False, returns_ids=False, earlier=None)
    assert command["submit"]["prompt_token_ids"] == [3, 1]
    assert command["submit"]["parameters"] == {"max_tokens": 1}
    request = build_request("m", "p", parameters)
    names = [tensor.name for tensor in request.inputs]
    assert request.raw_input_contents[names.index("prompt_token_ids")] == numbers(3, 1)
    assert b"prompt_token_ids" not in request.raw_input_contents[names.index("sampling_parameters")]
    assert parameters["prompt_token_ids"] == [3, 1]
