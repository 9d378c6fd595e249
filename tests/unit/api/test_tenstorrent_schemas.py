"""Tenstorrent's parameters: what is refused, with the messages of its server."""

from typing import Any

import orjson
import pytest

from app.api.tenstorrent.schemas import parse_inference
from app.core.errors import InvalidRequestError


def sampling_of(body: dict[str, Any]) -> dict[str, Any]:
    return parse_inference(orjson.dumps({"text": "x"} | body)).to_sampling(7).to_stored(7)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"temperature": 0}, "Parameter: temperature=0.0 is outside bounds, 0.01 <= temperature <= 100.0."),
        ({"temperature": "nan"}, "Parameter: temperature=nan is outside bounds, 0.01 <= temperature <= 100.0."),
        ({"temperature": 100.5}, "Parameter: temperature=100.5 is outside bounds, 0.01 <= temperature <= 100.0."),
        ({"top_p": -1}, "Parameter: top_p=-1.0 is outside bounds, 0.01 <= top_p <= 1.0."),
        ({"top_p": "1.1"}, "Parameter: top_p=1.1 is outside bounds, 0.01 <= top_p <= 1.0."),
        ({"top_k": 0}, "Parameter: top_k=0 is outside bounds, 1 <= top_k <= 1000."),
        ({"top_k": "1001"}, "Parameter: top_k=1001 is outside bounds, 1 <= top_k <= 1000."),
        ({"max_tokens": -1}, "Parameter: max_tokens=-1 is outside bounds, 1 <= max_tokens <= 2048."),
        ({"max_tokens": 2049}, "Parameter: max_tokens=2049 is outside bounds, 1 <= max_tokens <= 2048."),
        ({"temperature": "warm"}, "Parameter: temperature is type=<class 'str'>, expected <class 'float'>"),
        ({"temperature": True}, "Parameter: temperature is type=<class 'bool'>, expected <class 'float'>"),
        ({"top_k": "0.5"}, "Parameter: top_k is type=<class 'str'>, expected <class 'int'>"),
        ({"top_k": [1]}, "Parameter: top_k is type=<class 'list'>, expected <class 'int'>"),
        ({"max_tokens": 1.5}, "Parameter: max_tokens is type=<class 'float'>, expected <class 'int'>"),
        ({"text": 1}, "Parameter: text is type=<class 'int'>, expected <class 'str'>"),
        ({"stop_sequence": 1}, "Parameter: stop_sequence is type=<class 'int'>, expected <class 'str'>"),
        ({"return_prompt": "maybe"}, "Parameter: return_prompt is type=<class 'str'>, expected <class 'bool'>"),
        ({"text": ""}, "required 'text' parameter is either empty or not provided"),
        ({"text": None}, "required 'text' parameter is either empty or not provided"),
        ({"text": "a\0b"}, "Parameter: text must not contain the NUL character."),
        ({"rag_context": "x"}, "Parameter: rag_context is not supported; put it into the text."),
        ({"stop_sequence": "x" * 257}, "Parameter: stop_sequence: String should have at most 256 characters."),
    ],
)  # fmt: skip
def test_each_value_that_is_refused_has_tenstorrents_message(
    body: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        sampling_of(body)
    assert refused.value.detail == message


def test_tenstorrents_bounds_themselves_are_accepted() -> None:
    accepted = {"temperature": "0.01", "top_p": 1, "top_k": "1000", "stop_sequence": "x" * 256}
    assert sampling_of(accepted) == {
        "max_tokens": 7, "temperature": 0.01, "top_p": 1.0, "top_k": 1000, "stop": ["x" * 256],
    }  # fmt: skip
