"""Parts of Anthropic's messages: errors, stop sequences, blocks."""

import random
import time
from typing import Any

import orjson
import pytest

from app.api.anthropic.batches_schemas import MessageBatchCreate
from app.api.anthropic.blocks import TextBlock
from app.api.anthropic.conversation import MessageParam, to_template
from app.api.anthropic.message_events import MessageEvents
from app.api.anthropic.messages import BlockReader, MessageShape, message_to_wire
from app.api.anthropic.schemas import MessageRequest
from app.api.anthropic.stop_sequences import StopFilter, matched_stop
from app.api.errors import anthropic_errors
from app.api.errors.error_responses import dialect_of
from app.api.json_codec import parse
from app.api.output_rules import OutputRules
from app.api.tool_use import ToolUse
from app.core.errors import (
    AttemptLostError,
    BodyTooLargeError,
    BudgetExhaustedError,
    FailureCode,
    FieldError,
    ForbiddenError,
    InvalidRequestError,
    InvalidTokenError,
    LimitError,
    ModelNotReadyError,
    NotFoundError,
    QueueFullError,
    ResultFailedError,
    ServiceError,
)
from app.inference.reasoning import ReasoningFormat, ReasoningUse
from app.inference.tool_calls import ToolCall, ToolFormat
from tests.result_rows import result_row


def failed(code: FailureCode) -> ResultFailedError:
    return ResultFailedError(code, "d", {})


@pytest.mark.parametrize(
    ("error", "status", "kind", "is_final"),
    [
        (InvalidRequestError("d"), 400, "invalid_request_error", False),
        (InvalidTokenError("d"), 401, "authentication_error", False),
        (ForbiddenError("d"), 403, "permission_error", False),
        (NotFoundError("d"), 404, "not_found_error", False),
        (BodyTooLargeError("d"), 413, "request_too_large", False),
        (QueueFullError("d"), 429, "rate_limit_error", False),
        (LimitError("d"), 429, "rate_limit_error", False),
        (BudgetExhaustedError("d"), 429, "rate_limit_error", True),
        (ModelNotReadyError("d"), 529, "overloaded_error", False),
        (AttemptLostError("d"), 529, "overloaded_error", False),
        (failed(FailureCode.MODEL_ERROR), 502, "api_error", False),
        (failed(FailureCode.CANCELLED), 409, "conflict_error", True),
        (failed(FailureCode.DEADLINE_EXCEEDED), 504, "timeout_error", False),
    ],
)
def test_errors(error: ServiceError, status: int, kind: str, is_final: bool) -> None:
    error.headers["Retry-After"] = "3"
    response = anthropic_errors.respond(error)
    assert response.status_code == status
    assert response.headers["retry-after"] == "3"
    assert (response.headers.get("x-should-retry") == "false") == is_final
    details = {"error_code": error.code}
    assert orjson.loads(response.body) == {
        "type": "error",
        "error": {"type": kind, "message": "d", "details": details},
        "request_id": None,
    }


def test_an_error_names_its_members() -> None:
    error = InvalidRequestError("x", [FieldError("body.a", "is wrong"), FieldError("c", "too")])
    assert anthropic_errors.error_body(error)["error"]["message"] == "a: is wrong; c: too"


@pytest.mark.parametrize(
    ("path", "is_messages"),
    [("/v1/messages", True), ("/v1/messages/x", True), ("/v1/messagesx", False), ("/v1/x", False)],
)
def test_the_paths_of_the_dialect(path: str, is_messages: bool) -> None:
    assert dialect_of(path) == ("/v1/messages" if is_messages else "v1")


@pytest.mark.parametrize("stops", [["END"], ["a", "ab"], ["aab", "b"], ["END", "ND!"], []])
def test_the_filter_lets_all_text_but_the_stop_pass(stops: list[str]) -> None:
    """At every cut of the text; what it holds back is no longer than the longest stop."""
    chance = random.Random(7)  # noqa: S311
    for _ in range(300):
        text = "".join(chance.choice("abEND! ") for _ in range(chance.randrange(12)))
        ends = [text.index(stop) + len(stop) for stop in stops if stop in text]
        text = text[: min(ends)] if ends else text
        stop = matched_stop(text, "stop", stops)
        assert (stop is not None) == bool(ends)
        held, given = StopFilter(stops), ""
        place = 0
        while place < len(text):
            step = chance.randrange(1, 4)
            given += held.feed(text[place : place + step])
            place += step
            assert text.startswith(given)
            assert len(given) >= min(place, len(text)) - max(map(len, stops), default=0)
        assert given + held.finish(stop) == text.removesuffix(stop or "")
    assert matched_stop("END", "length", ["END"]) is None


def test_the_filters_time_grows_with_the_text_alone() -> None:
    """Sequences that match almost at every place: a second for a million characters is ample."""
    stops = ["a" * length + "b" for length in range(240, 256)]
    held = StopFilter(stops)
    began = time.process_time()
    for _ in range(10_000):
        held.feed("aaaa")
    assert time.process_time() - began < 2


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"finish_reason": "stop"}, "end_turn"),
        ({"finish_reason": "length", "parameters": '{"max_tokens": 9}'}, "max_tokens"),
        (
            {"finish_reason": "length", "parameters": '{"max_tokens": 8}'},
            "model_context_window_exceeded",
        ),
    ],
)
def test_reasons_of_the_end(columns: dict[str, str], reason: str) -> None:
    message = message_to_wire(MessageShape("m", 9, (), OutputRules()), result_row(**columns))
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, None)


PARTS = (
    "<think>", "</think>", " hm ", '<tool_call>{"name": "g", "arguments": {}}</tool_call>', "<tool_call>", '{"name": "f", "arguments": {"a": 1}}', "</tool_call>", "END", "E", " ",
    "\n", "words", "<", "🙂",
)  # fmt: skip


def content_of(frames: bytes) -> list[dict[str, Any]]:
    """The content blocks that a client makes of a stream's events."""
    content: list[dict[str, Any]] = []
    for block in frames.decode().strip().split("\n\n"):
        event = orjson.loads(block.partition("data: ")[2])
        if event["type"] == "content_block_start":
            assert event["index"] == len(content)
            content.append(event["content_block"])
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(content) - 1
            for name, value in event["delta"].items():
                if name == "partial_json":
                    content[-1]["input"] = orjson.loads(value)
                elif name != "type":
                    content[-1][name] += value
    return content


@pytest.mark.parametrize("is_parallel", [True, False])
@pytest.mark.parametrize("shows_thinking", [True, False])
def test_a_stream_has_the_blocks_of_the_message_at_every_cut(
    is_parallel: bool, shows_thinking: bool
) -> None:
    chance = random.Random(11)  # noqa: S311
    for _ in range(400):
        rules = OutputRules(
            ToolUse(ToolFormat.HERMES, is_parallel=is_parallel),
            ReasoningUse(
                ReasoningFormat.THINK, is_open=chance.random() < 0.5, ends=("<tool_call>",)
            ),
        )
        shape = MessageShape("m", 9, ("END",), rules, shows_thinking)
        text = "".join(chance.choice(PARTS) for _ in range(chance.randrange(14)))
        text = text[: text.index("END") + 3] if "END" in text else text
        row = result_row(output=text, parameters='{"max_tokens": 9}')
        events = MessageEvents(shape, row.id)
        frames, place = events.begin(), 0
        while place < len(text):
            step = chance.randrange(1, 6)
            frames += events.text(text[place : place + step])
            place += step
        whole = message_to_wire(shape, row)
        end = events.end(row)
        assert content_of(frames + end) == whole["content"], text
        delta = orjson.loads(end.split(b"event: message_delta\ndata: ")[1].split(b"\n\n")[0])
        for name, value in (delta["delta"] | {"usage": delta["usage"]}).items():
            assert value == whole[name], text
        assert all(block.get("text", "x").strip() for block in whole["content"])
        assert sum(block["type"] == "tool_use" for block in whole["content"]) <= (
            99 if is_parallel else 1
        )


def test_white_space_alone_is_no_block() -> None:
    reader = BlockReader(MessageShape("m", 9, (), OutputRules(ToolUse(ToolFormat.HERMES))))
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    pieces = reader.feed(" \n") + reader.feed(call) + reader.feed(" and")
    assert pieces[0] == ToolCall("f", "{}")
    assert "".join(piece for piece in pieces if isinstance(piece, str)).strip() == "and"


def test_messages_of_a_role_are_joined_unless_calls_stand_between() -> None:
    def message(role: str, *blocks: object) -> MessageParam:
        return MessageParam.model_validate_json(orjson.dumps({"role": role, "content": blocks}))

    use = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    text = {"type": "text", "text": "t"}
    found = to_template(
        [TextBlock(type="text", text="rules")],
        [
            message("user", text),
            message("user", text),
            message("assistant", text),
            message("assistant", use),
            message("assistant", text),
            message("user"),
        ],
    )
    assert [(one["role"], one["content"], "tool_calls" in one) for one in found] == [
        ("system", "rules", False),
        ("user", "t\nt", False),
        ("assistant", "t", True),
        ("assistant", "t", False),
        ("user", "", False),
    ]


def request(**members: Any) -> MessageRequest:
    asked = {"model": "m", "max_tokens": 3, "messages": [{"role": "user", "content": "x"}]}
    return parse(MessageRequest, orjson.dumps(asked | members))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("min_p", 0.1), ("presence_penalty", 1), ("repetition_penalty", 1.1), ("bad_words", ["x"]),
        ("logit_bias", {"5": 1}), ("allowed_token_ids", [5]), ("dry_multiplier", 0.8),
        ("xtc_probability", 0.5), ("stop_token_ids", [5]), ("n", 2), ("best_of", True), ("structured_outputs", {"regex": "a"}),
        ("response_format", {"type": "json_object"}),
    ],
)  # fmt: skip
def test_sampling_that_the_dialect_does_not_have_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        request(**{name: value})
    assert [error.field for error in caught.value.errors] == [name]


def test_sampling_members_without_effect_are_accepted() -> None:
    neutral = request(min_p=0, repetition_penalty=1.0, logit_bias={}, dry_multiplier=0)
    assert neutral.to_send_options(None) == request().to_send_options(None)


def test_the_older_name_of_a_format_forces_json() -> None:
    schema, other = {"type": "object"}, {"type": "array"}
    older = {"type": "json_schema", "schema": schema}
    parameters = request(output_format=older).to_send_options(None).parameters
    assert parameters.structured_outputs == {"json": schema}
    newer = {"format": {"type": "json_schema", "schema": other}}
    parameters = request(output_format=older, output_config=newer).to_send_options(None).parameters
    assert parameters.structured_outputs == {"json": other}


def test_nul_in_a_batch_is_for_its_requests() -> None:
    """They are parsed again when they run: texts lose it there, and ids refuse it."""
    params = {"model": "m", "max_tokens": 3, "messages": [{"role": "user", "content": "a\x00b"}]}
    body = orjson.dumps({"requests": [{"custom_id": "c", "params": params}]})
    (one,) = parse(MessageBatchCreate, body, refuses_nul=False).requests
    line = orjson.loads(one.to_line())["body"]
    (message,) = parse(MessageRequest, orjson.dumps(line)).to_messages(None)
    assert message["content"] == "a\ufffdb"
