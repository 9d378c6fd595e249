"""Rules to read results: chosen by the model's format and the request; the events of responses."""

from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import orjson
import pytest
from hypothesis import given, strategies as st

from app.api.openai.chat_responses import ChatFrames, chat_completion
from app.api.openai.chat_schemas import ChatRequest
from app.api.openai.response_events import PRELUDE, ResponseEvents
from app.api.openai.responses_schemas import ResponseCreate
from app.api.openai.stored_responses import StoredRequest
from app.api.output_rules import Output, OutputRules, choose_rules
from app.api.tool_use import ToolUse
from app.core.ids import new_id
from app.inference.chat_templates import compile_template
from app.inference.prompts import PromptFormat
from app.inference.reasoning import ReasoningFormat, ReasoningUse
from app.inference.sampling import SamplingParameters
from app.inference.tool_calls import ToolCall, ToolFormat
from app.results.requests import SendOptions
from tests.result_rows import result_row

THINK = ReasoningUse(ReasoningFormat.THINK)
TOOLS = ToolUse(ToolFormat.HERMES)
ENDED = datetime(2026, 1, 1, tzinfo=UTC)
USER: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
CALL = '<tool_call>{"name": "now"}</tool_call>'
NOW = ToolCall("now", "{}")


def format_of(**members: Any) -> PromptFormat:
    template = compile_template("{{ messages[-1].content }}")
    return PromptFormat(None, template, {}, None, reasoning=ReasoningFormat.THINK, **members)


async def choose(
    form: PromptFormat | None, tools: ToolUse | None = None, **parameters: Any
) -> tuple[OutputRules, SendOptions]:
    options = SendOptions(parameters=SamplingParameters(**parameters))
    return await choose_rules(form, USER, {}, options, tools)


async def test_the_rules_are_those_of_the_format() -> None:
    rules, options = await choose(format_of())
    assert rules == OutputRules(None, THINK)
    assert options.parameters.skip_special_tokens is None
    rules, _ = await choose(format_of(), TOOLS)
    assert rules == OutputRules(TOOLS, ReasoningUse(THINK.format, ends=("<tool_call>",)))
    for form in (None, PromptFormat(None, None, {}, None)):
        rules, _ = await choose(form, TOOLS)
        assert rules == OutputRules(TOOLS)


async def test_tags_that_are_special_tokens_are_kept_in_the_text() -> None:
    form = format_of(has_special_tags=True)
    rules, options = await choose(form)
    assert rules.reasoning == THINK
    assert options.parameters.skip_special_tokens is False
    rules, options = await choose(form, skip_special_tokens=True)  # the client's own will
    assert (rules.reasoning, options.parameters.skip_special_tokens) == (None, True)


async def test_a_structured_output_has_no_reasoning_before_it() -> None:
    forced: dict[str, Any] = {"structured_outputs": {"json": {"type": "object"}}}
    assert (await choose(format_of(), **forced))[0].reasoning is None
    assert (await choose(format_of(constrains_reasoning=False), **forced))[0].reasoning == THINK


@pytest.mark.parametrize(
    ("rules", "text", "output"),
    [
        (OutputRules(), "<think>a", Output("", "<think>a", [])),
        (OutputRules(reasoning=THINK), "<think>a</think>b", Output("a", "b", [])),
        (OutputRules(TOOLS, THINK), f"<think>a</think>\n{CALL}", Output("a", "", [NOW])),
        (OutputRules(TOOLS), CALL * 2, Output("", "", [NOW, NOW])),
        (
            OutputRules(ToolUse(ToolFormat.HERMES, is_parallel=False)),
            CALL * 2,
            Output("", "", [NOW]),
        ),
        (
            OutputRules(reasoning=ReasoningUse(ReasoningFormat.MISTRAL)),
            "[THINK]a[/THINK]b[THINK]c[/THINK]d",
            Output("a", "bd", [], "c"),
        ),
        (
            OutputRules(ToolUse(ToolFormat.HARMONY), ReasoningUse(ReasoningFormat.HARMONY)),
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary<|message|>b"
            "<|end|><|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>",
            Output("a", "b", [NOW]),
        ),
        # A call of a request that has no tools.
        (
            OutputRules(reasoning=ReasoningUse(ReasoningFormat.HARMONY)),
            " to=functions.f<|message|>{}<|call|>",
            Output("", "", []),
        ),
    ],
)
def test_a_text_has_parts(rules: OutputRules, text: str, output: Output) -> None:
    assert rules.read(text) == output


def test_tokens_of_reasoning_are_counted_once_and_not_beyond_all() -> None:
    rules = OutputRules(reasoning=THINK, count_tokens=len)
    text = "<think>four</think>six"
    assert rules.reasoning_tokens(result_row(output=text, completion_tokens=20)) == 4
    assert rules.reasoning_tokens(result_row(output=text, completion_tokens=3)) == 3
    assert rules.reasoning_tokens(result_row(output="six", completion_tokens=3)) == 0
    assert OutputRules(reasoning=THINK).reasoning_tokens(result_row(output=text)) is None
    assert OutputRules(count_tokens=len).reasoning_tokens(result_row(output=text)) is None


# --- chat completions -------------------------------------------------------------------------------


def request(**members: Any) -> ChatRequest:
    return ChatRequest.model_validate({"model": "m", "messages": USER} | members)


def message_of(answer: dict[str, Any]) -> dict[str, Any]:
    message: dict[str, Any] = answer["choices"][0]["message"]
    return message


def test_a_message_has_its_reasoning_in_two_names() -> None:
    rules = OutputRules(TOOLS, THINK, len)
    row = result_row(output=f"<think>a</think>b{CALL}", completion_tokens=9)
    answer = chat_completion(request(), rules, [row])
    message = message_of(answer)
    assert (message["reasoning_content"], message["reasoning"]) == ("a", "a")
    assert message["content"] == "b"
    assert message["tool_calls"][0]["function"] == {"name": "now", "arguments": "{}"}
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 1}
    hidden = message_of(chat_completion(request(include_reasoning=False), rules, [row]))
    assert "reasoning" not in hidden
    assert hidden["content"] == "b"
    for output, content in (("<think>a", None), ("", "")):
        found = message_of(chat_completion(request(), rules, [result_row(output=output)]))
        assert found["content"] == content


def test_usage_counts_the_reasoning_of_all_choices() -> None:
    rows = [
        result_row(output=f"<think>{text}</think>", completion_tokens=9) for text in ("a", "bc", "")
    ]
    rules = OutputRules(reasoning=THINK, count_tokens=len)
    asked = request(stream_options={"include_usage": True})
    usage = chat_completion(asked, rules, rows)["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 3}
    frames = ChatFrames(asked, rules, [new_id() for _ in rows])
    for place, row in enumerate(rows):
        frames.end(place, row)
    assert orjson.loads(frames.usage(rows).removeprefix(b"data: "))["usage"] == usage
    plain = chat_completion(asked, OutputRules(), rows)["usage"]
    assert "completion_tokens_details" not in plain


def deltas_of(rules: OutputRules, text: str, size: int, **members: Any) -> list[dict[str, Any]]:
    frames = ChatFrames(request(**members), rules, [new_id()])
    produced = frames.begin()
    for at in range(0, len(text), size):
        produced += frames.delta(0, text[at : at + size], ())
    produced += frames.end(0, result_row(output=text))
    chunks = [orjson.loads(one.removeprefix(b"data: ")) for one in produced[:-2].split(b"\n\n")]
    return [chunk["choices"][0]["delta"] for chunk in chunks]


@given(st.integers(1, 60))
def test_a_stream_is_the_message_in_pieces(size: int) -> None:
    text = f"<think>a long thought</think>an answer{CALL}"
    rules = OutputRules(TOOLS, THINK)
    deltas = deltas_of(rules, text, size)
    for name in ("reasoning_content", "reasoning"):
        assert "".join(one.get(name, "") for one in deltas) == "a long thought"
    assert "".join(one.get("content", "") for one in deltas) == "an answer"
    assert sum("tool_calls" in one for one in deltas) == 1
    names = [name for one in deltas for name in one if name in ("reasoning", "content")]
    assert names[1:] == sorted(names[1:], reverse=True)  # the role's chunk has empty content
    hidden = deltas_of(rules, text, size, include_reasoning=False)
    assert not any("reasoning" in one for one in hidden)


# --- responses --------------------------------------------------------------------------------------

TEXTS = [
    "<think>a thought</think>an answer",
    "<think>a thought",
    f"<think>a thought</think>{CALL}",
    f"<think>a thought</think>text{CALL}",
    "no thought",
    "<think></think>text",
    "",
    "<think>a</thin",
    "<think>a</think><tool",
]
MISTRAL_TEXTS = ["[THINK]a[/THINK]bc[THINK]de[/THINK]fg", "bc[THINK]de[/THINK]fg", "[THINK]a[/THI"]


def events_of(
    rules: OutputRules, text: str, sizes: list[int], after: int = -1
) -> list[dict[str, Any]]:
    create = ResponseCreate.model_validate({"model": "m", "input": "x"})
    stored = StoredRequest.of(create.to_stored(rules))
    assert stored is not None
    assert stored.rules == rules
    identifier = UUID("01890000-0000-7000-8000-000000000000")
    row = result_row(id=identifier, output=text, finished_at=ENDED)
    events = ResponseEvents(stored, identifier, after)
    produced = events.begin() + (events.attempt(1) or b"")
    at = 0
    for size in sizes:
        produced += events.text(text[at : at + size])
        at += size
    produced += events.text(text[at:]) + events.end(row)
    blocks = produced.decode().split("\n\n")[:-1]
    return [orjson.loads(block.partition("data: ")[2]) for block in blocks]


CASES = [
    *((OutputRules(ToolUse(ToolFormat.HERMES), THINK), text) for text in TEXTS),
    *(
        (OutputRules(reasoning=ReasoningUse(ReasoningFormat.MISTRAL)), text)
        for text in MISTRAL_TEXTS
    ),
]


def text_of(events: list[dict[str, Any]], kind: str) -> str:
    return "".join(one["delta"] for one in events if one["type"] == f"response.{kind}.delta")


@pytest.mark.parametrize(("rules", "text"), CASES)
@given(st.lists(st.integers(1, 9), max_size=20))
def test_the_events_are_the_output_for_all_cuts(
    rules: OutputRules, text: str, sizes: list[int]
) -> None:
    events = events_of(rules, text, sizes)
    numbers = [one["sequence_number"] for one in events]
    assert numbers == sorted(set(numbers))
    assert numbers[0] == 0
    done = events[-1]
    output = done["response"]["output"]
    assert [one["item"] for one in events if one["type"] == "response.output_item.done"] == output
    added = [one for one in events if one["type"] == "response.output_item.added"]
    assert [one["output_index"] for one in added] == list(range(len(output)))
    assert [one["item"]["id"] for one in added] == [item["id"] for item in output]
    parts = rules.read(text)
    assert text_of(events, "reasoning_text") == parts.reasoning + parts.late_reasoning
    assert text_of(events, "output_text") == parts.content
    # Events that do not depend on the cuts: all but deltas.
    whole = events_of(rules, text, [])
    assert [one for one in events if "delta" not in one] == [
        one for one in whole if "delta" not in one
    ]


@pytest.mark.parametrize(("rules", "text"), CASES)
def test_a_reader_gets_exactly_the_events_behind_its_number(rules: OutputRules, text: str) -> None:
    whole = events_of(rules, text, [1] * len(text))
    for after in [one["sequence_number"] for one in whole]:
        tail = events_of(rules, text, [], after)
        assert all(one["sequence_number"] > after for one in tail)
        known = [one for one in whole if one["sequence_number"] <= after]
        for kind in ("reasoning_text", "output_text"):
            assert text_of(known, kind) + text_of(tail, kind) == text_of(whole, kind)
        assert [one for one in tail if "delta" not in one] == [
            one for one in whole if "delta" not in one and one["sequence_number"] > after
        ]


def test_a_delta_of_content_counts_the_reasoning_before_it() -> None:
    events = events_of(OutputRules(reasoning=THINK), "<think>abc</think>de", [1] * 30)
    deltas = [one for one in events if "delta" in one]
    numbers = [one["sequence_number"] for one in deltas]
    assert numbers == [PRELUDE + place for place in (1, 2, 3, 9, 10)]


def test_a_request_that_was_stored_by_an_older_version_is_read() -> None:
    create = ResponseCreate.model_validate({"model": "m", "input": "x"})
    stored = StoredRequest.of(create.to_stored(OutputRules()))
    assert stored is not None
    assert stored.rules == OutputRules()
    members = orjson.loads(create.to_stored(OutputRules(reasoning=THINK)))
    assert members["echo"]["reasoning"]["rules"] == THINK.to_stored() | {"ends": []}
    again = StoredRequest.of(orjson.dumps(members).decode())
    assert again is not None
    assert "rules" not in again.echo["reasoning"]
    del members["echo"]["reasoning"], members["echo"]["tools"]  # a version that echoed less
    oldest = StoredRequest.of(orjson.dumps(members).decode())
    assert oldest is not None
    assert oldest.rules == OutputRules()


def test_reasoning_items_of_the_input_go_to_the_next_answer() -> None:
    items: Any = [
        {"role": "user", "content": "1"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "a"}]},
        {"role": "assistant", "content": "2"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "b"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "3"},
        {"type": "reasoning", "encrypted_content": "x", "summary": []},
        {"role": "assistant", "content": "4"},
    ]  # fmt: skip
    create = ResponseCreate.model_validate({"model": "m", "input": items})
    form = PromptFormat(None, None, {}, None, reasoning_members=("reasoning_content",))
    found = [one.get("reasoning_content") for one in create.to_chat().to_messages(form)]
    assert found == [None, "a", "b", None, None]
    assert "reasoning_content" not in create.to_chat().to_messages(None)[1]
    assert [item["type"] for item in create.input].count("reasoning") == 2
