"""Answers as objects: a JSON schema for the model, and its texts as values."""

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from llm_api_client.errors import ConfigurationError

T = TypeVar("T")


def schema_of(kind: type[Any]) -> dict[str, Any]:
    """The JSON schema of a pydantic model, or of any type that msgspec supports.

    Raises:
        ConfigurationError: the type is neither.
    """
    if hasattr(kind, "model_json_schema"):
        schema: dict[str, Any] = kind.model_json_schema()
        return schema
    try:
        return msgspec.json.schema(kind)
    except TypeError as error:
        raise ConfigurationError(f"{kind.__name__} has no JSON schema: {error}") from error


def parser_of(kind: type[T]) -> Callable[[str], T]:
    """The function that makes an object of a text; it raises ValueError if the text is none."""
    validate: Callable[[str], T] | None = getattr(kind, "model_validate_json", None)
    if validate is not None:
        return validate
    decoder = msgspec.json.Decoder(kind)

    def parse(text: str) -> T:
        return decoder.decode(text)

    return parse
