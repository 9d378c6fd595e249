"""Members that a response repeats of its request: numbers where the dialect requires numbers."""

from typing import Any

import orjson
import pytest

from app.api.openai.responses_output import output_of
from app.api.openai.responses_schemas import ResponseCreate
from app.api.openai.stored_responses import StoredRequest
from app.api.output_rules import OutputRules
from tests.result_rows import result_row

SAMPLING = ("temperature", "top_p", "presence_penalty", "frequency_penalty", "top_logprobs")


def request_of(defaults: dict[str, float] | None = None, **members: Any) -> str:
    create = ResponseCreate.model_validate({"model": "m", "input": "x"} | members)
    return create.to_stored(OutputRules(), defaults or {})


def read(request: str, parameters: str = "{}") -> StoredRequest:
    stored = StoredRequest.of(request, parameters)
    assert stored is not None
    return stored


def numbers(stored: StoredRequest) -> tuple[Any, ...]:
    return tuple(stored.echo[name] for name in SAMPLING)


def test_open_parameters_are_the_models_or_neutral() -> None:
    assert numbers(read(request_of())) == (1, 1, 0, 0, 0)
    defaults = {"temperature": 0.6, "top_p": 0.9, "presence_penalty": 1.5, "min_p": 0.1}
    stored = read(request_of(defaults))
    assert numbers(stored) == (0.6, 0.9, 1.5, 0, 0)
    assert "min_p" not in stored.echo
    given = {"temperature": 0.0, "frequency_penalty": -1.0, "top_logprobs": 3, "top_p": None}
    assert numbers(read(request_of(defaults, **given))) == (0, 0.9, 1.5, -1, 3)


@pytest.mark.parametrize(
    ("echoed", "parameters", "expected"),
    [
        ({}, {"max_tokens": 5}, (1, 1, 0, 0, 0)),
        ({"temperature": 0.5}, {"temperature": 0.5}, (0.5, 1, 0, 0, 0)),
        ({"top_logprobs": 2}, {"logprobs": 2, "frequency_penalty": 0.5}, (1, 1, 0, 0.5, 2)),
    ],
)
def test_request_of_an_older_version_gets_its_numbers(
    echoed: dict[str, Any], parameters: dict[str, Any], expected: tuple[float, ...]
) -> None:
    """Such a version stored null for what was open, and no penalties."""
    members = orjson.loads(request_of())
    del members["echo"]["presence_penalty"], members["echo"]["frequency_penalty"]
    members["echo"] |= dict.fromkeys(("temperature", "top_p", "top_logprobs")) | echoed
    stored = read(orjson.dumps(members).decode(), orjson.dumps(parameters).decode())
    assert numbers(stored) == expected
    assert "max_tokens" not in stored.echo
    assert "logprobs" not in stored.echo


def test_requested_summary_is_echoed() -> None:
    for summary, expected in (("auto", "auto"), ("detailed", "detailed"), (None, None), (7, None)):
        reasoning = {"effort": "low", "summary": summary}
        assert read(request_of(reasoning=reasoning)).echo["reasoning"] == {
            "effort": "low",
            "summary": expected,
        }
    assert read(request_of()).echo["reasoning"] == {"effort": None, "summary": None}


def test_schema_of_a_format_has_all_members() -> None:
    form = {"type": "json_schema", "name": "a", "schema": {"type": "object"}}
    echoed = read(request_of(text={"format": form})).echo["text"]["format"]
    assert echoed == form | {"description": None, "strict": False}
    strict = form | {"strict": True, "description": "b"}
    assert read(request_of(text={"format": strict})).echo["text"]["format"] == strict


def test_bytes_of_a_part_of_a_character_are_an_empty_list() -> None:
    entry = {"logprob": -0.1, "rank": 1, "decoded_token": "\ufffd"}
    row = result_row(output="\ufffd", logprobs=orjson.dumps([{"5": entry}]).decode())
    stored = read(request_of(top_logprobs=1))
    ((part,),) = (item["content"] for item in output_of(stored, row, "completed"))
    (token,) = part["logprobs"]
    assert (token["bytes"], token["top_logprobs"][0]["bytes"]) == ([], [])
