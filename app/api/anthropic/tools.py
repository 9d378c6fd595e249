"""Tools of a request, and the choice among them."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, JsonValue, ValidationError

from app.api.hosted_tools import HostedType
from app.api.schema_parts import STRICT, ModelText, value_error
from app.inference.structured_outputs import MAX_SCHEMA_BYTES, check_schema

MAX_TOOLS = 512


def _check_parameters(value: Any) -> Any:
    if not isinstance(value, dict):
        raise value_error("must be a JSON schema of an object")
    nulls = [name for name in ("properties", "required") if name in value and value[name] is None]
    return check_schema({name: value[name] for name in value if name not in nulls})


class ToolParam(BaseModel):
    """A tool that the client runs."""

    model_config = STRICT

    type: Literal["custom"] | None = None
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
    description: Annotated[ModelText, Field(max_length=MAX_SCHEMA_BYTES)] | None = None
    input_schema: Annotated[dict[str, JsonValue], BeforeValidator(_check_parameters)]

    @property
    def parameters(self) -> dict[str, JsonValue]:
        return self.input_schema

    def to_template(self) -> dict[str, Any]:
        """The tool as templates know it: OpenAI's form."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": function | {"parameters": self.input_schema}}


class _HostedParam(ToolParam):
    """A tool without a schema: Anthropic runs it, or trained its models for it."""

    name: HostedType  # its type


def _to_hosted(tool: Any) -> Any:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind in (None, "custom"):
        return tool
    try:
        return _HostedParam(name=kind, input_schema={})
    except ValidationError:
        raise value_error(f"a tool of type {str(kind)[:40]!r} is not supported") from None


Tools = Annotated[
    list[Annotated[ToolParam, BeforeValidator(_to_hosted)]], Field(max_length=MAX_TOOLS)
]


def own_tools(tools: Tools | None) -> list[ToolParam]:
    """The tools that the client runs."""
    return [tool for tool in tools or () if not isinstance(tool, _HostedParam)]


def hosted_tools(tools: Tools | None) -> dict[str, str]:
    """The types of the other tools, by their places."""
    named = enumerate(tools or ())
    return {f"tools.{at}.type": one.name for at, one in named if isinstance(one, _HostedParam)}


class ToolChoice(BaseModel):
    model_config = STRICT

    type: Literal["auto", "any", "tool", "none"]
    name: Annotated[str, Field(max_length=128)] | None = Field(
        None, description="The tool, for the type `tool`."
    )
    disable_parallel_tool_use: bool | None = Field(None, description="true: at most one call.")

    def to_choice(self) -> str | list[str]:
        """The choice as `choose_tool_use` takes it."""
        if self.type == "tool":
            return [self.name or ""]
        return "required" if self.type == "any" else self.type
