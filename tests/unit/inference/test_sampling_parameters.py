"""Sampling parameters: each bound is enforced and stands in its message."""

import json

import annotated_types
import pytest
from pydantic.fields import FieldInfo

from app.api.json_codec import parse
from app.core.errors import InvalidRequestError
from app.inference.sampling import SamplingParameters

FLOATS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty",
          "repetition_penalty")  # fmt: skip


def problem(body: str) -> tuple[str, str]:
    """Field and message of the one error of a body."""
    with pytest.raises(InvalidRequestError) as caught:
        parse(SamplingParameters, body.encode())
    (error,) = caught.value.errors
    return error.field, error.message


@pytest.mark.parametrize(
    ("name", "accepted", "refused", "bound"),
    [
        ("max_tokens", (1, 1_000_000), (0,), "1"),
        ("max_tokens", (), (1_000_001,), "1000000"),
        ("min_tokens", (0,), (-1,), "0"),
        ("temperature", (0, 0.0, 1, 100.0), (-0.01,), "0"),
        ("temperature", (), (100.01,), "100"),
        ("top_p", (0.001, 1, 1.0), (0, 0.0, -1), "0"),
        ("top_p", (), (1.001,), "1"),
        ("top_k", (-1, 0, 1_000_000), (-2,), "-1"),
        ("min_p", (0, 1), (-0.1,), "0"),
        ("min_p", (), (1.1,), "1"),
        ("presence_penalty", (-2, 2), (-2.1,), "-2"),
        ("frequency_penalty", (-2.0, 2.0), (2.1,), "2"),
        ("repetition_penalty", (0.1, 100), (0,), "0"),
        ("seed", (-(2**63), 2**63 - 1, 0), (2**63,), str(2**63)),
        ("n", (1,), (2, 0), "1"),
        ("logprobs", (0, 20), (21,), "20"),
    ],
)
def test_bounds(
    name: str, accepted: tuple[float, ...], refused: tuple[float, ...], bound: str
) -> None:
    for value in accepted:
        assert getattr(parse(SamplingParameters, f'{{"{name}": {value}}}'.encode()), name) == value
    for value in refused:
        field, message = problem(f'{{"{name}": {value}}}')
        assert field == name
        assert bound in message


@pytest.mark.parametrize(
    ("name", "value", "field"),
    [
        ("logit_bias", {str(number): 0 for number in range(301)}, "logit_bias"),
        ("bad_words", ["x"] * 257, "bad_words"),
        ("bad_words", ["x" * 257], "bad_words.0"),
        ("allowed_token_ids", [], "allowed_token_ids"),
        ("allowed_token_ids", [0] * 4097, "allowed_token_ids"),
        ("allowed_token_ids", [-1], "allowed_token_ids.0"),
        ("structured_outputs", {"choice": ["x"] * 1001}, "structured_outputs.choice"),
        ("structured_outputs", {"grammar": "x" * 65_537}, "structured_outputs.grammar"),
        ("structured_outputs", {"structural_tag": "x"}, "structured_outputs.structural_tag"),
    ],
)
def test_lists_and_texts_are_bounded(name: str, value: object, field: str) -> None:
    assert problem(json.dumps({name: value}))[0] == field


def test_lists_at_their_bounds() -> None:
    largest = {
        "logit_bias": {str(number): -100 for number in range(300)},
        "bad_words": ["x" * 256] * 256,
        "allowed_token_ids": list(range(4096)),
    }
    assert (
        parse(SamplingParameters, json.dumps(largest).encode()).to_stored(1)
        == {"max_tokens": 1} | largest
    )


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_numbers_that_are_none(name: str, word: str) -> None:
    assert problem(f'{{"{name}": {word}}}')[0] == name


def test_no_bound_is_forgotten() -> None:
    """Every number has a bound on both sides, every list and text a length."""
    for name, field in SamplingParameters.model_fields.items():
        kinds = bounds(field)
        if name in FLOATS or name in ("max_tokens", "min_tokens", "top_k", "seed", "logprobs"):
            assert kinds & {annotated_types.Ge, annotated_types.Gt}, name
            assert kinds & {annotated_types.Le, annotated_types.Lt}, name
        if name in ("stop", "stop_token_ids", "bad_words", "logit_bias", "allowed_token_ids"):
            assert annotated_types.MaxLen in kinds, name


def bounds(field: FieldInfo) -> set[type]:
    found: set[type] = {type(item) for item in field.metadata}
    todo = [field.annotation]
    while todo:
        annotation = todo.pop()
        for item in getattr(annotation, "__metadata__", ()):
            found |= {type(inner) for inner in getattr(item, "metadata", [item])}
        todo += [inner for inner in getattr(annotation, "__args__", ()) if inner is not annotation]
    return found


@pytest.mark.parametrize(
    "name",
    ["best_of", "max_new_tokens", "stream", "Temperature", "prompt", "dry_multiplier",
     "xtc_probability", "typical_p", "mirostat"],
)  # fmt: skip
def test_unknown_parameters_are_reported(name: str) -> None:
    assert problem(f'{{"{name}": 1}}') == (name, "unknown field")


@pytest.mark.parametrize("value", ['"1"', "true", "null_", "[]", "{}", "1.5"])
def test_types_are_not_coerced(value: str) -> None:
    body = '{"max_tokens": ' + value.replace("null_", '"null"') + "}"
    assert problem(body)[0] == "max_tokens"


def test_null_means_not_given() -> None:
    given = parse(SamplingParameters, b'{"temperature": null, "stop": null, "max_tokens": null}')
    assert given.to_stored(7) == {"max_tokens": 7}


def test_only_what_was_given_is_stored() -> None:
    given = parse(
        SamplingParameters, b'{"temperature": 0, "stop": ["a", "b"], "logit_bias": {"5": -1.5}}'
    )
    assert given.to_stored(512) == {
        "max_tokens": 512,
        "temperature": 0,
        "stop": ["a", "b"],
        "logit_bias": {"5": -1.5},
    }
    assert parse(SamplingParameters, b'{"max_tokens": 3}').to_stored(3) == {"max_tokens": 3}


def test_one_stop_text_is_a_list_of_one() -> None:
    assert parse(SamplingParameters, b'{"stop": "x"}').stop == ["x"]
    schema = SamplingParameters.model_json_schema()["properties"]["stop"]
    assert "string" in str(schema)
    assert "array" in str(schema)


def test_min_tokens_within_max_tokens() -> None:
    _, message = problem('{"min_tokens": 5, "max_tokens": 4}')
    assert "min_tokens (5)" in message
    assert "max_tokens (4)" in message


def test_every_parameter_is_described() -> None:
    for name, field in SamplingParameters.model_fields.items():
        assert field.description, name
