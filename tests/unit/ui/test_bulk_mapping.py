"""Rows as requests: templates, ids, numbers, and the words for what does not fit."""

from typing import Any

import orjson
import pytest
from hypothesis import given, strategies as st
from pydantic import TypeAdapter

from app.api.openai.chat_schemas import ChatRequest
from app.batches.lines import LineReader
from app.ui.bulk.mapping import (
    CHAT,
    COMPLETION,
    PARAMETERS,
    RowError,
    check_line,
    guess_form,
    parse_template,
    read_mapping,
    to_line,
)
from app.ui.bulk.table import Row
from app.ui.errors import EntryError

ROW = Row(7, {"id": "r7", "topic": "sums", "lines": 3, "temperature": "0.5", "extra": None})
COLUMNS = list(ROW.values)


def request(form: dict[str, str], row: Row = ROW) -> dict[str, Any]:
    _, line = to_line(row, read_mapping(form, COLUMNS))
    value: dict[str, Any] = orjson.loads(line)
    return value


def test_a_column_as_the_prompt() -> None:
    assert request({"prompt": "topic"}) == {
        "custom_id": "line-7",
        "method": "POST",
        "url": CHAT,
        "body": {"messages": [{"role": "user", "content": "sums"}]},
    }


def test_everything_mapped() -> None:
    form = {
        "endpoint": CHAT,
        "template": "Write {lines} lines about {topic} as {{json}}{extra}.",
        "system": "You know {topic}.",
        "id": "id",
        "model": "demo",
        "model_column": "extra",  # empty in this row
        "max_tokens": " 20 ",
        "temperature": "1.5",
        "temperature_column": "temperature",
        "seed_column": "lines",
    }
    assert request(form)["custom_id"] == "r7"
    body = request(form)["body"]
    assert body == {
        "model": "demo",
        "messages": [
            {"role": "system", "content": "You know sums."},
            {"role": "user", "content": "Write 3 lines about sums as {json}."},
        ],
        "max_tokens": 20,
        "temperature": 0.5,
        "seed": 3,
    }
    TypeAdapter(ChatRequest).validate_python(body)


def test_completions_and_messages() -> None:
    body = request({"endpoint": COMPLETION, "prompt": "topic"})["body"]
    assert body == {"prompt": "sums"}
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    row = Row(1, {"topic": messages})
    assert request({"prompt": "topic"}, row)["body"]["messages"] == messages
    with_system = request({"prompt": "topic", "system": "Be brief."}, row)["body"]["messages"]
    assert with_system == [{"role": "system", "content": "Be brief."}, *messages]


@given(st.text(), st.text(st.characters(exclude_characters="{}"), min_size=1))
def test_templates_keep_every_text(text: str, column: str) -> None:
    escaped = text.replace("{", "{{").replace("}", "}}")
    template = parse_template(f"{escaped}{{{column}}}{escaped}", [column], "template")
    assert template.fill(Row(1, {column: "{x}"})) == f"{text}{{x}}{text}"


@pytest.mark.parametrize(
    ("form", "control", "words"),
    [
        ({}, "prompt", "Choose the column"),
        ({"prompt": "nowhere"}, "prompt", "no column “nowhere”"),
        ({"template": "{a}"}, "template", "“{a}” names no column of the file. It has {id}, "),
        ({"template": '{"a": 1}'}, "template", "Write {{ and }}"),
        ({"template": "open {"}, "template", "“{” names no column"),
        ({"template": "x" * 100_001}, "template", "At most 100,000 characters."),
        ({"prompt": "topic", "id": "x"}, "id", "no column"),
        ({"prompt": "topic", "endpoint": "/v1/x"}, "endpoint", "Must be"),
        ({"prompt": "topic", "endpoint": COMPLETION, "system": "x"}, "system", "Only a chat"),
        ({"prompt": "topic", "max_tokens": "1.5"}, "max_tokens", "a whole number, not “1.5”"),
        ({"prompt": "topic", "max_tokens": "0"}, "max_tokens", "from 1 to 1,000,000, not 0"),
        ({"prompt": "topic", "temperature": "0,5"}, "temperature", "with a point: 0.5"),
        ({"prompt": "topic", "temperature": "nan"}, "temperature", "a number"),
        ({"prompt": "topic", "temperature": "1e999"}, "temperature", "a number"),
        ({"prompt": "topic", "seed": "1_0"}, "seed", "a whole number"),
        ({"prompt": "topic", "seed": str(2**63)}, "seed", "must be from"),
        ({"prompt": "topic", "model": "x" * 257}, "model", "At most 256"),
    ],
)
def test_what_cannot_be_mapped(form: dict[str, str], control: str, words: str) -> None:
    with pytest.raises(EntryError) as caught:
        read_mapping(form, COLUMNS)
    assert caught.value.fields == ((control, str(caught.value)),)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"topic": " ", "id": 1}, "The prompt is empty."),
        ({"id": 1}, "The line has no “topic”."),
        ({"topic": "x", "id": ""}, "must have 1 to 512 characters"),
        ({"topic": "x", "id": "y" * 513}, "must have 1 to 512 characters"),
        (
            {"topic": "x", "id": 1, "temperature": "hot"},
            "Column “temperature”: temperature must be",
        ),
        ({"topic": "x", "id": 1, "temperature": True}, "not “true”"),
    ],
)
def test_rows_that_make_no_request(values: dict[str, Any], words: str) -> None:
    form = {"prompt": "topic", "id": "id", "temperature_column": "temperature"}
    with pytest.raises(RowError) as caught:
        to_line(Row(1, values), read_mapping(form, COLUMNS))
    assert words in str(caught.value)


def test_whole_numbers_may_be_written_with_a_point() -> None:
    assert PARAMETERS["max_tokens"].read("max_tokens", "20.0") == 20
    assert PARAMETERS["max_tokens"].read("max_tokens", 20.0) == 20
    assert PARAMETERS["seed"].read("seed", "9007199254740993") == 9007199254740993


def test_what_is_made_is_a_batch_of_the_api() -> None:
    reader = LineReader(CHAT, 10)
    _, line = to_line(ROW, read_mapping({"prompt": "topic", "id": "id"}, COLUMNS))
    assert reader.read(1, line) is not None
    assert reader.errors == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, ""),
        ({"custom_id": ""}, "custom_id"),
        ({"custom_id": 5}, "custom_id"),
        ({"custom_id": "a\0"}, "custom_id"),
        ({"method": "GET"}, "method must be POST."),
        ({"url": "/v1/completions"}, "url must be /v1/chat/completions, as on the first line"),
        ({"body": []}, "body must be a JSON object"),
        ({"body": {"stream": True}}, "body.stream has no meaning"),
    ],
)
def test_lines_that_are_requests_pass_as_the_api_takes_them(
    change: dict[str, Any], words: str
) -> None:
    value = {"custom_id": "a", "method": "POST", "url": CHAT, "body": {"x": 1.0}} | change
    text = orjson.dumps(value).decode()
    row = Row(1, value, text=text + "\r\n")
    is_taken = LineReader(CHAT, 10).read(1, text.encode()) is not None
    assert is_taken is not bool(words)
    if words:
        with pytest.raises(RowError, match=words):
            check_line(row, CHAT)
    else:
        assert check_line(row, CHAT) == ("a", text.encode() + b"\n")


def test_guesses() -> None:
    assert guess_form(["Question", "ID", "temperature", "model"]) == {
        "prompt": "Question",
        "id": "ID",
        "model_column": "model",
        "temperature_column": "temperature",
    }
    assert guess_form(["anything"]) == {"prompt": "anything"}
    assert guess_form(["a", "b"]) == {}


def test_a_template_makes_no_endless_text() -> None:
    row = Row(1, {"a": "x" * 1_000_000})
    mapping = read_mapping({"template": "{a}" * 30_000}, ["a"])  # of 30 GB
    with pytest.raises(RowError, match="The template makes more than 2,000,000 characters"):
        to_line(row, mapping)


def test_what_is_nested_too_deep_is_reported() -> None:
    row = Row(1, {"a": orjson.loads("[" * 500 + "]" * 500)})
    with pytest.raises(RowError, match="nested too deep"):
        to_line(row, read_mapping({"template": "It is {a}."}, ["a"]))
