"""OpenAI's wire shapes: pure functions, for all texts and names."""

import json
from typing import Any

import orjson
import pytest
from hypothesis import given, strategies as st
from pydantic import BaseModel, RootModel

from app.api.errors.openai_errors import error_body, error_response
from app.api.json_codec import parse
from app.api.openai.chat_responses import ChatFrames, chat_completion
from app.api.openai.chat_schemas import ChatRequest
from app.api.openai.completions_schemas import (
    CompletionFrames,
    CompletionRequest,
    PromptText,
    completion,
)
from app.api.openai.schemas import likeliest, sampled_of, usage_of
from app.api.output_rules import OutputRules
from app.api.tgi.response_schemas import best_first
from app.core.errors import (
    FieldError,
    InvalidRequestError,
    LimitError,
    ModelNotReadyError,
    ServiceError,
    UnknownModelError,
)
from app.core.ids import new_id
from app.inference.prompts import PromptFormat
from app.inference.structured_outputs import StructuredOutputs
from app.inference.tool_calls import ToolFormat
from app.results.requests import SendOptions
from app.results.rows import ResultRow
from tests.result_rows import result_row

PROMPT = PromptText("p", "p")
MESSAGES = [{"role": "user", "content": "hi"}]
# Text that UTF-8 can encode.
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"))


def chat(**members: Any) -> ChatRequest:
    return parse(ChatRequest, orjson.dumps({"model": "m", "messages": MESSAGES} | members))


def text(**members: Any) -> CompletionRequest:
    return parse(CompletionRequest, orjson.dumps({"model": "m", "prompt": "p"} | members))


def row(output: str = "x", **columns: Any) -> ResultRow:
    return result_row(output=output, **columns)


def frames_of(encoded: bytes) -> list[Any]:
    assert encoded.endswith(b"\n\n")
    return [orjson.loads(part.removeprefix(b"data: ")) for part in encoded[:-2].split(b"\n\n")]


@given(TEXTS.filter(bool), st.lists(TEXTS, max_size=5), st.booleans())
def test_frames_are_json_for_all_texts(model: str, texts: list[str], with_usage: bool) -> None:
    """The encoded constants and the text make one JSON value, as pydantic would have made it."""
    options = {"include_usage": with_usage}
    ids = [new_id(), new_id()]
    for frames in (
        ChatFrames(chat(model=model[:256], stream_options=options), OutputRules(), ids),
        CompletionFrames(text(model=model[:256], stream_options=options), ["p"], ids),
    ):
        produced = frames.begin()
        for one in texts:
            produced += frames.delta(1, one, ())
        produced += frames.end(1, row())
        parsed = frames_of(produced)
        assert {one["model"] for one in parsed} == {model[:256]}
        assert all(("usage" in one) is with_usage for one in parsed)
        choices = [choice for one in parsed for choice in one["choices"] if choice["index"] == 1]
        said = [
            one["delta"].get("content", "") if "delta" in one else one["text"] for one in choices
        ]
        assert "".join(said) == "".join(texts)
        assert choices[-1]["finish_reason"] == "stop"
        (usage,) = frames_of(frames.usage([row(), row()]))
        assert usage["choices"] == []


def test_usage_is_not_invented() -> None:
    known = usage_of([row(), row(), row(prompt_tokens=5), row()], 2)
    assert known == {"prompt_tokens": 8, "completion_tokens": 8, "total_tokens": 16}
    assert usage_of([row(completion_tokens=None)], 1) is None
    assert "usage" not in chat_completion(chat(), OutputRules(), [row(prompt_tokens=None)])


def sent(answer: dict[str, Any]) -> dict[str, Any]:
    """The answer as its client reads it."""
    read: dict[str, Any] = orjson.loads(orjson.dumps(answer))
    return read


def test_the_sampled_token_is_known_among_the_likely_ones() -> None:
    best = {"logprob": -0.1, "rank": 1, "decoded_token": "a"}
    second = {"logprob": -1.0, "rank": 2, "decoded_token": "b"}
    sampled = {"logprob": -5.0, "rank": 9, "decoded_token": "\ufffd", "sampled": True}
    token = {"5": second, "6": best, "7": sampled}
    assert sampled_of(token) is sampled
    assert likeliest(token, 2) == [best, second]
    logprobs = orjson.dumps([token]).decode()
    answer = chat_completion(
        chat(logprobs=True, top_logprobs=2), OutputRules(), [row(logprobs=logprobs)]
    )
    (produced,) = sent(answer)["choices"][0]["logprobs"]["content"]
    assert (produced["token"], produced["logprob"], produced["bytes"]) == ("\ufffd", -5.0, None)
    assert [one["bytes"] for one in produced["top_logprobs"]] == [[97], [98]]
    answer = completion(text(logprobs=2), [PROMPT], [row(logprobs=logprobs)])
    old = sent(answer)["choices"][0]["logprobs"]
    assert old["top_logprobs"] == [{"a": -0.1, "b": -1.0, "\ufffd": -5.0}]


def test_what_vllm_takes_and_the_backend_cannot_is_refused_by_name() -> None:
    assert text(add_special_tokens=True).add_special_tokens
    chat(add_special_tokens=False)
    for make, name, value in (
        (text, "add_special_tokens", False),
        (chat, "add_special_tokens", True),
        (chat, "dry_multiplier", 0.8),
        (text, "xtc_probability", 0.5),
        (chat, "typical_p", 0.9),
        (text, "guided_whitespace_pattern", " ?"),
        (text, "logprob_token_ids", [0]),
        (chat, "thinking_token_budget", 9),
        (text, "prompt_embeds", "x"),
        (chat, "vllm_xargs", {"x": 1}),
        (text, "repetition_detection", {"max_pattern_size": 2}),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            make(**{name: value})
        assert [error.field for error in caught.value.errors] == [name]


def test_members_without_effect_are_accepted() -> None:
    neutral = {
        "dry_multiplier": 0.0, "dry_base": 1.75, "xtc_probability": 0, "xtc_threshold": 0.1,
        "typical_p": 1.0, "tfs_z": 1, "mirostat_mode": 0, "top_a": 0, "smoothing_factor": None,
    }  # fmt: skip
    assert chat(**neutral).to_send_options(None) == SendOptions()


def test_an_impossible_token_has_a_number() -> None:
    """The engine's minus infinity is stored as null."""
    entry = {"logprob": None, "rank": 1, "decoded_token": "a", "sampled": True}
    produced = row(logprobs=orjson.dumps([{"5": entry}]).decode())
    (choice,) = sent(chat_completion(chat(logprobs=True), OutputRules(), [produced]))["choices"]
    assert choice["logprobs"]["content"][0]["logprob"] == -9999.0
    (old,) = sent(completion(text(logprobs=1), [PROMPT], [produced]))["choices"]
    assert old["logprobs"]["token_logprobs"] == [-9999.0]
    assert old["logprobs"]["top_logprobs"] == [{"a": -9999.0}]
    likely = row("likely", logprobs=orjson.dumps([{"5": entry | {"logprob": -9.0}}]).decode())
    (best,) = completion(text(best_of=2), [PROMPT], [produced, likely])["choices"]
    assert best["text"] == "likely"
    assert best_first([produced, likely]) == [likely, produced]


def test_the_best_of_several_come_first() -> None:
    def ranked(logprob: float) -> ResultRow:
        token = {"1": {"logprob": logprob, "rank": 1, "decoded_token": "x"}}
        return row(str(logprob), logprobs=orjson.dumps([token]).decode())

    request = text(prompt=["p", "q"], best_of=3, n=2)
    assert request.to_send_options().parameters.logprobs == 0
    rows = [ranked(value) for value in (-3.0, -1.0, -2.0, -6.0, -5.0, -4.0)]
    answer = completion(request, [PROMPT, PROMPT], rows)
    assert [one["text"] for one in answer["choices"]] == ["-1.0", "-2.0", "-4.0", "-5.0"]
    assert answer["usage"] == {"prompt_tokens": 6, "completion_tokens": 12, "total_tokens": 18}


def test_only_what_is_asked_for_is_sent() -> None:
    assert chat().to_send_options(None) == SendOptions()
    everything = chat(
        temperature=0,
        top_p=0.5,
        stop="x",
        seed=1,
        presence_penalty=1,
        frequency_penalty=-1,
        logit_bias={"5": 3},
        max_tokens=3,
        max_completion_tokens=4,
        top_k=3,
        min_p=0.1,
        repetition_penalty=1.1,
        min_tokens=1,
        ignore_eos=True,
        stop_token_ids=[1],
        include_stop_str_in_output=True,
        bad_words=["y"],
        allowed_token_ids=[3, 4],
        priority=7,
        metadata={"a": "b"},
        logprobs=True,
        top_logprobs=2,
        response_format={"type": "json_object"},
        user="u",
        service_tier="auto",
        store=False,
        prediction={"type": "content"},
    ).to_send_options(None)
    assert everything.priority == -7
    assert everything.metadata == {"a": "b"}
    assert everything.parameters.model_dump(exclude_none=True) == {
        "temperature": 0.0,
        "top_p": 0.5,
        "stop": ["x"],
        "seed": 1,
        "presence_penalty": 1.0,
        "frequency_penalty": -1.0,
        "logit_bias": {"5": 3.0},
        "max_tokens": 4,
        "top_k": 3,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "min_tokens": 1,
        "ignore_eos": True,
        "stop_token_ids": [1],
        "include_stop_str_in_output": True,
        "bad_words": ["y"],
        "allowed_token_ids": [3, 4],
        "logprobs": 2,
        "structured_outputs": {"json_object": True},
    }
    assert text().to_send_options().parameters.model_dump(exclude_none=True) == {"max_tokens": 16}


@pytest.mark.parametrize(
    ("members", "constraint"),
    [
        ({"guided_json": {"type": "object"}}, {"json": {"type": "object"}}),
        ({"guided_json": '{"type": "object"}'}, {"json": {"type": "object"}}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["a"]}, {"choice": ["a"]}),
        ({"guided_grammar": "root ::= x"}, {"grammar": "root ::= x"}),
        ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ["a", "b"]}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": [1]}}}},
            {"json": {"enum": [1]}},
        ),
        ({"response_format": {"type": "text"}}, None),
    ],
)
def test_every_name_of_a_constraint(members: dict[str, Any], constraint: Any) -> None:
    assert chat(**members).to_send_options(None).parameters.structured_outputs == constraint
    assert text(**members).to_send_options().parameters.structured_outputs == constraint


def tool(name: str, parameters: Any = None) -> dict[str, Any]:
    function = {"name": name} | ({} if parameters is None else {"parameters": parameters})
    return {"type": "function", "function": function}


FORMAT = PromptFormat(None, None, {}, None, uses_tools=True, tool_format=ToolFormat.MISTRAL)


def test_definitions_of_forced_tools_move_to_the_top() -> None:
    nested = {"$defs": {"A": {"type": "string"}}, "properties": {"a": {"$ref": "#/$defs/A"}}}
    request = chat(tools=[tool("f", nested), tool("g")], tool_choice="required")
    use = request.to_tool_use(FORMAT)
    assert use is not None
    schema = use.sampling["structured_outputs"]["json"]
    assert schema["$defs"] == {"A": {"type": "string"}}
    first, second = schema["items"]["anyOf"]
    assert first["properties"]["parameters"] == {"properties": {"a": {"$ref": "#/$defs/A"}}}
    assert second["properties"]["parameters"] == {"type": "object"}
    other = nested | {"$defs": {"A": {"type": "integer"}}}
    clash = chat(tools=[tool("f", nested), tool("g", other)], tool_choice="required")
    with pytest.raises(InvalidRequestError, match="different schemas"):
        clash.to_tool_use(FORMAT)


def test_markers_that_are_special_tokens_are_asked_for() -> None:
    request = chat(tools=[tool("f")])
    use = request.to_tool_use(FORMAT)
    assert request.to_send_options(use).parameters.skip_special_tokens is False
    assert request.to_template_arguments()["tools"] == [tool("f")]
    assert "tools" not in chat(tools=[tool("f")], tool_choice="none").to_template_arguments()


@pytest.mark.parametrize(
    ("given", "constraint"),
    [
        ({"type": "json_object"}, {"json_object": True}),
        ({"type": "json_object", "value": {"type": "object"}}, {"json": {"type": "object"}}),
        ({"type": "json", "value": {"type": "object"}}, {"json": {"type": "object"}}),
        ({"type": "json", "value": '{"type": "object"}'}, {"json": {"type": "object"}}),
        ({"type": "regex", "value": "a+"}, {"regex": "a+"}),
    ],
)
def test_formats_as_the_clients_of_tgi_send_them(given: Any, constraint: Any) -> None:
    parameters = chat(response_format=given).to_send_options(None).parameters
    assert parameters.structured_outputs == constraint


def test_nul_in_earlier_arguments_is_replaced() -> None:
    """Only where it is one: a backslash before `u0000` may be text itself."""
    arguments = r'{"a\u0000": ["\u0000", "\\u0000", "\\\u0000"]}'
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    request = chat(messages=[{"role": "assistant", "tool_calls": [call]}])
    (message,) = request.to_messages(FORMAT)
    produced = message["tool_calls"][0]["function"]["arguments"]
    assert produced == {"a\ufffd": ["\ufffd", "\\u0000", "\\\ufffd"]}


def test_a_named_tool_needs_no_type() -> None:
    """TGI's clients send the function alone."""
    request = chat(tools=[tool("f")], tool_choice={"function": {"name": "f"}})
    use = request.to_tool_use(FORMAT)
    assert use is not None
    assert use.name == "f"


def test_the_newer_role_is_given_to_templates_that_know_it() -> None:
    request = chat(messages=[{"role": "developer", "content": "x"}])
    knowing = PromptFormat(None, None, {}, None, knows_developer=True)
    assert request.to_messages(knowing)[0]["role"] == "developer"
    assert request.to_messages(FORMAT)[0]["role"] == "system"


@pytest.mark.parametrize(
    ("error", "status", "members"),
    [
        (
            UnknownModelError("d"),
            404,
            {"type": "invalid_request_error", "param": None, "code": "model_not_found"},
        ),
        (
            LimitError("d", extra={"limit": "requests_per_minute"}),
            429,
            {"type": "requests", "param": None, "code": "rate_limit_exceeded"},
        ),
        (
            ModelNotReadyError("d"),
            503,
            {"type": "server_error", "param": None, "code": "model_not_ready"},
        ),
        (
            InvalidRequestError("d", [FieldError("body.messages.10.content", "d")]),
            400,
            {
                "type": "invalid_request_error",
                "param": "messages[10].content",
                "code": "invalid_request",
            },
        ),
    ],
)
def test_errors_in_openais_words(error: ServiceError, status: int, members: Any) -> None:
    response = error_response(error)
    assert response.status_code == status
    assert orjson.loads(response.body) == {"error": {"message": "d"} | members}


def test_a_message_names_its_fields() -> None:
    error = InvalidRequestError(
        "See errors.", [FieldError("a", "is wrong"), FieldError("b", "too")]
    )
    assert error_body(error)["error"]["message"] == "a: is wrong; b: too"


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | TEXTS
    | st.sampled_from(["function", "auto", "required", "user", "json_schema", "f", "{}"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["type", "function", "name", "parameters", "schema", "json_schema", "role"]
            )
            | TEXTS,
            inner,
            max_size=3,
        )
    ),
    max_leaves=12,
)


@given(st.data())
def test_any_member_is_taken_or_refused(data: st.DataObject) -> None:
    """Any JSON as a member: a request that can be sent, or a refusal; never another error."""
    cases: list[tuple[type[BaseModel], dict[str, Any]]] = [
        (ChatRequest, {"model": "m", "messages": MESSAGES, "tools": [tool("f")]}),
        (CompletionRequest, {"model": "m", "prompt": "p"}),
    ]
    for request, base in cases:
        names = st.sampled_from(sorted(request.model_fields))
        members = data.draw(st.dictionaries(names, JSON, max_size=3))
        try:
            taken: Any = parse(request, json.dumps(base | members).encode())
            if isinstance(taken, ChatRequest):
                use = taken.to_tool_use(FORMAT)
                orjson.dumps(taken.to_messages(FORMAT))
                orjson.dumps(taken.to_template_arguments())
                options = taken.to_send_options(use)
            else:
                options = taken.to_send_options()
        except InvalidRequestError as error:
            orjson.dumps(error_body(error))
            continue
        orjson.dumps(options.parameters.to_stored(1))


LIKE_SCHEMAS = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["json", "type", "properties", "items", "anyOf", "$defs"]),
            inner,
            max_size=3,
        )
    ),
)


@given(LIKE_SCHEMAS)
def test_any_constraint_is_taken_or_refused(value: Any) -> None:
    """Any JSON: a constraint that can be written again, or a refusal; never another error."""
    for one in (value, {"json": value}):
        try:
            taken = parse(RootModel[StructuredOutputs], json.dumps(one).encode()).root
        except InvalidRequestError:
            continue
        assert orjson.dumps(taken)
