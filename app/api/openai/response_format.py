"""`response_format` of chat and text completions: OpenAI's forms, and those of TGI's clients."""

from typing import Annotated, Any

from pydantic import JsonValue, PlainValidator

from app.api.schema_parts import value_error
from app.inference.structured_outputs import MAX_SCHEMA_BYTES, check_schema, read_schema_text


def _read_format(value: Any) -> Any:
    """The constraint of a response_format; None for plain text."""
    kind = value.get("type") if isinstance(value, dict) else None
    if value is None or kind == "text":
        return None
    given = value.get("value") if isinstance(value, dict) else None  # TGI's member
    if kind == "json_object" and given is None:
        return {"json_object": True}
    if kind in ("json", "json_object"):
        given = read_schema_text(given)
        if not isinstance(given, dict):
            raise value_error("value must be a JSON schema")
        return {"json": check_schema(given)}
    if kind == "regex":
        if not isinstance(given, str) or not 0 < len(given) <= MAX_SCHEMA_BYTES:
            raise value_error(
                f"value must be a regular expression of 1 to {MAX_SCHEMA_BYTES} characters"
            )
        return {"regex": given}
    if kind != "json_schema":
        raise value_error("must be of type `text`, `json_object` or `json_schema`")
    described = value.get("json_schema")
    schema = described.get("schema") if isinstance(described, dict) else None
    if not isinstance(schema, dict):
        raise value_error("json_schema.schema must be a JSON schema")
    return {"json": check_schema(schema)}


ResponseFormat = Annotated[
    Any, PlainValidator(_read_format, json_schema_input_type=dict[str, JsonValue] | None)
]
