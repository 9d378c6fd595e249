"""Rows as requests: templates, ids, numbers, and the words for what does not fit."""

from typing import Any

import orjson
import pytest
from hypothesis import given, strategies as st

from app.results.requests import ResultCreate
from app.ui.bulk.delimited import Row
from app.ui.bulk.mapping import (
    CHAT,
    COMPLETION,
    PARAMETERS,
    SCORE,
    RowError,
    guess_form,
    parse_template,
    read_mapping,
    to_request,
)
from app.ui.errors import EntryError

ROW = Row(7, {"id": "r7", "topic": "sums", "lines": 3, "temperature": "0.5", "extra": None})
COLUMNS = list(ROW.values)


def request(form: dict[str, str], row: Row = ROW) -> tuple[str, dict[str, Any]]:
    """The key and the request of a row, which the API takes."""
    key, made = to_request(row, read_mapping({"model": "m"} | form, COLUMNS))
    ResultCreate.model_validate_json(orjson.dumps(made))
    return key, made


def test_a_column_as_the_prompt() -> None:
    messages = [{"role": "user", "content": "sums"}]
    assert request({"prompt": "topic"}) == ("line-7", {"model": "m", "messages": messages})


def test_everything_mapped() -> None:
    form = {
        "kind": CHAT,
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
    assert request(form) == (
        "r7",
        {
            "model": "demo",
            "messages": [
                {"role": "system", "content": "You know sums."},
                {"role": "user", "content": "Write 3 lines about sums as {json}."},
            ],
            "parameters": {"max_tokens": 20, "temperature": 0.5, "seed": 3},
        },
    )


RANKING = {"kind": SCORE, "prompt": "topic", "documents": "extra"}


@pytest.mark.parametrize(
    ("cell", "documents"),
    [
        (["a", "b"], ["a", "b"]),
        ("a", ["a"]),
        ('["a", "b"]', ["a", "b"]),
        ("[a]", ["[a]"]),
        ("[1]", ["[1]"]),
    ],
)
def test_a_query_with_its_documents(cell: Any, documents: list[str]) -> None:
    _, made = request(RANKING, Row(1, {"topic": "sums", "extra": cell}))
    assert made == {
        "model": "m",
        "messages": [
            {"role": "query", "content": "sums"},
            *({"role": "document", "content": one} for one in documents),
        ],
        "score": {},
    }


@pytest.mark.parametrize("cell", [None, [], "[]", [1], 5, {"a": "b"}])
def test_rows_without_documents(cell: Any) -> None:
    with pytest.raises(RowError, match="must be a text or a list of texts"):
        request(RANKING, Row(1, {"topic": "sums", "extra": cell}))


def test_each_row_names_a_model_if_there_is_none_for_all() -> None:
    form = {"model": "", "model_column": "extra", "prompt": "topic"}
    row = Row(1, {"topic": "x", "extra": " own "})
    assert request(form, row)[1]["model"] == "own"
    with pytest.raises(RowError, match="names no model"):
        request(form)


def test_completions_and_messages() -> None:
    _, made = request({"kind": COMPLETION, "prompt": "topic"})
    assert made == {"model": "m", "content": "sums"}
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    row = Row(1, {"topic": messages})
    assert request({"prompt": "topic"}, row)[1]["messages"] == messages
    with_system = request({"prompt": "topic", "system": "Be brief."}, row)[1]["messages"]
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
        ({"prompt": "topic", "kind": "x"}, "kind", "Must be"),
        ({"prompt": "topic", "kind": COMPLETION, "system": "x"}, "system", "Only a chat"),
        (RANKING | {"documents": ""}, "documents", "Choose the column"),
        (RANKING | {"documents": "x"}, "documents", "no column"),
        (RANKING | {"kind": CHAT}, "documents", "Only a score"),
        (RANKING | {"max_tokens": "5"}, "max_tokens", "no parameters"),
        (RANKING | {"seed_column": "lines"}, "seed_column", "no parameters"),
        ({"prompt": "topic", "max_tokens": "1.5"}, "max_tokens", "a whole number, not “1.5”"),
        ({"prompt": "topic", "max_tokens": "0"}, "max_tokens", "from 1 to 1,000,000, not 0"),
        ({"prompt": "topic", "temperature": "0,5"}, "temperature", "with a point: 0.5"),
        ({"prompt": "topic", "temperature": "nan"}, "temperature", "a number"),
        ({"prompt": "topic", "temperature": "1e999"}, "temperature", "a number"),
        ({"prompt": "topic", "seed": "1_0"}, "seed", "a whole number"),
        ({"prompt": "topic", "seed": str(2**63)}, "seed", "must be from"),
        ({"prompt": "topic", "model": "x" * 257}, "model", "At most 256"),
        ({"prompt": "topic", "model": ""}, "model", "Choose a model"),
    ],
)
def test_what_cannot_be_mapped(form: dict[str, str], control: str, words: str) -> None:
    with pytest.raises(EntryError) as caught:
        read_mapping({"model": "m"} | form, COLUMNS)
    assert caught.value.fields == ((control, str(caught.value)),)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"topic": " ", "id": 1}, "The prompt is empty."),
        ({"id": 1}, "The line has no “topic”."),
        ({"topic": "x", "id": ""}, "must have 1 to 255 characters"),
        ({"topic": "x", "id": "y" * 256}, "must have 1 to 255 characters"),
        ({"topic": "x", "id": "a\tb"}, "no control characters"),
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
        request(form, Row(1, values))
    assert words in str(caught.value)


def test_whole_numbers_may_be_written_with_a_point() -> None:
    assert PARAMETERS["max_tokens"].read("max_tokens", "20.0") == 20
    assert PARAMETERS["max_tokens"].read("max_tokens", 20.0) == 20
    assert PARAMETERS["seed"].read("seed", "9007199254740993") == 9007199254740993


def test_guesses() -> None:
    assert guess_form(["Question", "ID", "temperature", "model"]) == {
        "prompt": "Question",
        "id": "ID",
        "model_column": "model",
        "temperature_column": "temperature",
    }
    assert guess_form(["anything"]) == {"prompt": "anything"}
    assert guess_form(["a", "b"]) == {}
    ranking = {"kind": SCORE, "prompt": "query", "documents": "passages"}
    assert guess_form(["query", "passages", "seed"]) == ranking


def test_a_template_makes_no_endless_text() -> None:
    row = Row(1, {"a": "x" * 1_000_000})
    mapping = read_mapping({"template": "{a}" * 30_000, "model": "m"}, ["a"])  # of 30 GB
    with pytest.raises(RowError, match="The template makes more than 2,000,000 characters"):
        to_request(row, mapping)


def test_what_is_nested_too_deep_is_reported() -> None:
    row = Row(1, {"a": orjson.loads("[" * 500 + "]" * 500)})
    with pytest.raises(RowError, match="nested too deep"):
        to_request(row, read_mapping({"template": "It is {a}.", "model": "m"}, ["a"]))
