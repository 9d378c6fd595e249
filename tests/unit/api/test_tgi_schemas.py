"""TGI's parameters: what is refused, with TGI's own messages."""

import json
from typing import Any

import pytest

from app.api.errors.tgi_errors import to_error
from app.api.json_codec import parse
from app.api.tgi.schemas import (
    GenerateRequest,
    Generation,
    check,
    is_sampling,
    to_sampling,
)
from app.core.errors import InvalidRequestError


def sampling_of(parameters: dict[str, Any]) -> dict[str, Any]:
    wanted = parse(GenerateRequest, json.dumps({"inputs": "x", "parameters": parameters}).encode())
    given = check(wanted, is_stream=False)
    generation = Generation("x", given, is_sampling(wanted.parameters), None, given.max_new_tokens)
    return to_sampling(generation, 5, with_tokens=False).to_stored(9)


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"temperature": 0}, "`temperature` must be strictly positive"),
        ({"repetition_penalty": 0.0}, "`repetition_penalty` must be strictly positive"),
        ({"frequency_penalty": 2.5}, "`frequency_penalty` must be >= -2.0 and <= 2.0"),
        ({"top_p": 1.0}, "`top_p` must be > 0.0 and < 1.0"),
        ({"top_p": 0}, "`top_p` must be > 0.0 and < 1.0"),
        ({"typical_p": 1.0}, "`typical_p` must be > 0.0 and < 1.0"),
        ({"top_k": 0}, "`top_k` must be strictly positive"),
        ({"max_new_tokens": 0}, "`max_new_tokens` must be strictly positive"),
        ({"max_new_tokens": -1}, "`max_new_tokens` must be strictly positive"),
        ({"stop": ["x"] * 17}, "`stop` supports up to 16 stop sequences. Given: 17"),
        ({"best_of": 0}, "`best_of` must be > 0 and <= 16. Given: 0"),
        ({"best_of": 17}, "`best_of` must be > 0 and <= 16. Given: 17"),
        ({"best_of": 2}, "you must use sampling when `best_of` is > 1"),
        (
            {"best_of": 2, "do_sample": True, "seed": 1},
            "`seed` must not be set when `best_of` > 1",
        ),
        ({"top_n_tokens": 6}, "`top_n_tokens` must be >= 0 and <= 5. Given: 6"),
        ({"top_n_tokens": -1}, "`top_n_tokens` must be >= 0 and <= 5. Given: -1"),
        ({"watermark": True}, "`watermark` is not supported: the backend cannot do it"),
        ({"typical_p": 0.5}, "`typical_p` is not supported: the backend cannot do it"),
        (
            {"decoder_input_details": True},
            "`decoder_input_details` is not supported: the backend cannot do it",
        ),
        (
            {"grammar": {"type": "regex", "value": 1}},
            "grammar is not valid: a regex must be a string",
        ),
        (
            {"grammar": {"type": "json", "value": {"type": "object"}}},
            "grammar is not valid: Grammar must have a 'properties' field",
        ),
        (
            {"grammar": {"type": "json", "value": []}},
            "grammar is not valid: a JSON schema must be an object",
        ),
        ({"stop": [""]}, "`stop.0` String should have at least 1 character"),
        ({"seed": 2**64}, f"`parameters.seed` Input should be less than {2**64}"),
        ({"seed": -1}, "`parameters.seed` Input should be greater than or equal to 0"),
        ({"temperature": "1"}, "`parameters.temperature` Input should be a valid number"),
        (
            {"max_new_tokens": 10_000_000},
            "`max_new_tokens` Input should be less than or equal to 1000000",
        ),
    ],
)
def test_each_value_out_of_its_bounds_has_tgis_message(
    parameters: dict[str, Any], text: str
) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        sampling_of(parameters)
    status, error = to_error(refused.value)
    assert status == 422
    assert error == {"error": f"Input validation error: {text}", "error_type": "validation"}


def test_tgis_bounds_themselves_are_accepted() -> None:
    accepted = {"temperature": 0.5, "frequency_penalty": -2, "top_k": 1, "seed": 2**64 - 1}
    assert sampling_of(accepted | {"best_of": 1, "top_n_tokens": 5}) == {
        "max_tokens": 9, "temperature": 0.5, "frequency_penalty": -2, "top_k": 1, "seed": 5,
    }  # fmt: skip
