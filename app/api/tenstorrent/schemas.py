"""Requests of Tenstorrent's inference API, validated and converted.

Source: its description and its servers (tt-studio, models/*/src/inference_api_server.py). Numbers may
be strings. Unknown members are ignored, and null means an absent member.

The bounds changed over time: `temperature` was 0.1 to 10 in the description and is 0.01 to 100 in the
code, `top_k` changed from 1..1000 to 1..100. Each bound here is the wider one, so that every body that
any of the servers accepts is accepted.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from app.api.errors.tenstorrent_errors import NOT_JSON
from app.core.errors import InvalidRequestError
from app.inference.sampling import SamplingParameters

# type, lower and upper bound, default
_NUMBERS: dict[str, tuple[type[int] | type[float], float, float, float | None]] = {
    "temperature": (float, 0.01, 100.0, 1.0),
    "top_p": (float, 0.01, 1.0, 0.9),
    "top_k": (int, 1, 1000, 40),
    "max_tokens": (int, 1, 2048, None),
}
DEFAULT_MAX_TOKENS = 128
_FLAGS = {"true": True, "1": True, "false": False, "0": False}

_Number = int | float | str


class InferenceRequest(BaseModel):
    """A text to continue, and sampling parameters."""

    model_config = ConfigDict(extra="ignore")

    text: str = Field(description="The prompt.")
    temperature: _Number = Field(1.0, description="0.01 to 100.")
    top_p: _Number = Field(0.9, description="0.01 to 1.")
    top_k: _Number = Field(40, description="1 to 1000.")
    max_tokens: _Number = Field(
        DEFAULT_MAX_TOKENS, description="1 to 2048; less where the model's length leaves less."
    )
    stop_sequence: str | None = Field(
        None, description="A text that ends the generation. The model's own end always does."
    )
    return_prompt: bool | str = Field(False, description="Put the prompt before the text.")


@dataclass(slots=True, frozen=True)
class Inference:
    """A validated request. `max_tokens` is None if it is absent."""

    text: str
    numbers: Mapping[str, float]
    max_tokens: int | None
    stop_sequence: str | None
    returns_prompt: bool

    def to_sampling(self, max_tokens: int) -> SamplingParameters:
        stop = [self.stop_sequence] if self.stop_sequence else None
        try:
            return SamplingParameters.model_validate(
                {**self.numbers, "max_tokens": max_tokens, "stop": stop}
            )
        except ValidationError as error:
            wrong = error.errors()[0]
            names = {"stop": "stop_sequence"}
            name = names.get(str(wrong["loc"][0]), str(wrong["loc"][0]))
            raise InvalidRequestError(f"Parameter: {name}: {wrong['msg']}.") from error


def parse_inference(body: bytes) -> Inference:
    """Parse a body. Raises InvalidRequestError with the messages of Tenstorrent's server."""
    try:
        given = orjson.loads(body)
    except ValueError as error:
        raise InvalidRequestError(NOT_JSON) from error
    if not isinstance(given, dict):
        raise InvalidRequestError(NOT_JSON)
    text = _text(given, "text")
    numbers = {name: _number(given, name) for name in _NUMBERS}
    flag = _flag(given, "return_prompt")
    if not text:
        raise InvalidRequestError("required 'text' parameter is either empty or not provided")
    if given.get("rag_context"):
        raise InvalidRequestError("Parameter: rag_context is not supported; put it into the text.")
    for name, (_, low, high, _default) in _NUMBERS.items():
        value = numbers[name]
        if value is not None and not low <= value <= high:
            raise InvalidRequestError(
                f"Parameter: {name}={value} is outside bounds, {low} <= {name} <= {high}."
            )
    max_tokens = numbers.pop("max_tokens")
    return Inference(
        text=text,
        numbers={name: value for name, value in numbers.items() if value is not None},
        max_tokens=None if max_tokens is None else int(max_tokens),
        stop_sequence=_text(given, "stop_sequence"),
        returns_prompt=flag,
    )


def _text(given: Mapping[str, Any], name: str) -> str | None:
    value = given.get(name)
    if value is not None and not isinstance(value, str):
        raise _wrong_type(name, value, str)
    if value is not None and "\x00" in value:
        raise InvalidRequestError(f"Parameter: {name} must not contain the NUL character.")
    return value


def _number(given: Mapping[str, Any], name: str) -> float | None:
    kind, _, _, default = _NUMBERS[name]
    value = given.get(name)
    if value is None:
        return default
    try:
        if isinstance(value, bool):
            raise TypeError
        number = kind(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise _wrong_type(name, value, kind) from error
    if isinstance(value, float) and number != value:  # 1.5 is not a number of tokens
        raise _wrong_type(name, value, kind)
    return number


def _flag(given: Mapping[str, Any], name: str) -> bool:
    value = given.get(name)
    if value is None or isinstance(value, bool):
        return bool(value)
    found = _FLAGS.get(str(value).strip().lower())
    if found is None:
        raise _wrong_type(name, value, bool)
    return found


def _wrong_type(name: str, value: object, expected: type) -> InvalidRequestError:
    return InvalidRequestError(f"Parameter: {name} is type={type(value)}, expected {expected}")
