"""Tools of a chat completion, and the choice among them."""

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    PlainValidator,
    model_validator,
)

from app.api.openai.tool_forms import custom_function
from app.api.schema_parts import STRICT, ModelText, value_error
from app.inference.structured_outputs import MAX_SCHEMA_BYTES, check_schema


def _check_parameters(value: Any) -> Any:
    if not isinstance(value, dict):
        raise value_error("must be a JSON schema of an object")
    return check_schema(value)


class Function(BaseModel):
    """A function that the model may call."""

    model_config = STRICT

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,256}$")]
    description: Annotated[ModelText, Field(max_length=MAX_SCHEMA_BYTES)] | None = None
    parameters: Annotated[dict[str, JsonValue], BeforeValidator(_check_parameters)] | None = None


_CUSTOM_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "description": {"type": "string"},
        "format": {"type": "object", "description": "Described to the model, not enforced."},
    },
    "required": ["name"],
    "description": "A tool that takes a text, for the type `custom`.",
}


def _describe_custom(schema: dict[str, Any]) -> None:
    schema["required"] = ["type"]
    schema["properties"]["custom"] = _CUSTOM_SCHEMA


class Tool(BaseModel):
    """A function with a JSON schema of its arguments; of a custom tool, the function with one text."""

    model_config = STRICT | ConfigDict(json_schema_extra=_describe_custom)

    type: Literal["function", "custom"]
    function: Function

    @model_validator(mode="before")
    @classmethod
    def _of_custom(cls, tool: Any) -> Any:
        if not isinstance(tool, dict) or tool.get("type") != "custom":
            return tool
        custom = tool.get("custom")
        if not isinstance(custom, dict) or not isinstance(custom.get("name"), str):
            raise value_error("a custom tool needs `custom` with a name")
        return {"type": "custom", "function": custom_function(custom)}

    def to_template(self) -> dict[str, Any]:
        return {"type": "function", "function": self.function.model_dump(exclude_none=True)}


def _read_choice(value: Any) -> Any:
    """`none`, `auto`, `required`, or the function's name in a list of one."""
    if value is None or (isinstance(value, str) and value in ("none", "auto", "required")):
        return value
    # TGI's clients leave the type out.
    kind = value.get("type", "function") if isinstance(value, dict) else None
    named = value.get(kind) if kind in ("function", "custom") else None
    if isinstance(named, dict) and isinstance(named.get("name"), str):
        return [named["name"]]
    raise value_error("must be `none`, `auto`, `required` or a function by its name")


ToolChoice = Annotated[
    Any,
    PlainValidator(
        _read_choice,
        json_schema_input_type=Literal["none", "auto", "required"] | dict[str, JsonValue] | None,
    ),
]
