"""Tools of a chat completion, and the choice among them."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, JsonValue, PlainValidator

from app.api.schema_parts import STRICT, ModelText, value_error
from app.inference.structured_outputs import MAX_SCHEMA_BYTES, check_schema


def _check_parameters(value: Any) -> Any:
    if not isinstance(value, dict):
        raise value_error("must be a JSON schema of an object")
    return check_schema(value)


class Function(BaseModel):
    """A function that the model may call."""

    model_config = STRICT

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: Annotated[ModelText, Field(max_length=MAX_SCHEMA_BYTES)] | None = None
    parameters: Annotated[dict[str, JsonValue], BeforeValidator(_check_parameters)] | None = None


class Tool(BaseModel):
    """A function with a JSON schema of its arguments."""

    model_config = STRICT

    type: Literal["function"]
    function: Function


def _read_choice(value: Any) -> Any:
    """`none`, `auto`, `required`, or the function's name in a list of one."""
    if value is None or (isinstance(value, str) and value in ("none", "auto", "required")):
        return value
    # TGI's clients leave the type out.
    if isinstance(value, dict) and value.get("type", "function") == "function":
        function = value.get("function")
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            return [function["name"]]
    raise value_error("must be `none`, `auto`, `required` or a function by its name")


ToolChoice = Annotated[
    Any,
    PlainValidator(
        _read_choice,
        json_schema_input_type=Literal["none", "auto", "required"] | dict[str, JsonValue] | None,
    ),
]
