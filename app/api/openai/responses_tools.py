"""Tools of a response's request: functions, custom tools, namespaces, and those that OpenAI hosts."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field, JsonValue, Tag

from app.api.hosted_tools import HostedTool
from app.api.openai.chat_messages import MAX_TOOLS
from app.api.schema_parts import STRICT, ModelText


class ResponseFunction(BaseModel):
    """A function that the model may call."""

    model_config = STRICT

    type: Literal["function"]
    name: str
    description: ModelText | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None


class CustomTool(BaseModel):
    """A tool that takes a text: for the model, a function with one string."""

    model_config = STRICT

    type: Literal["custom"]
    name: str
    description: ModelText | None = None
    format: dict[str, JsonValue] | None = Field(
        None, description="A grammar is described to the model, not enforced."
    )


class Namespace(BaseModel):
    """Tools of one name space: for the model, functions whose names begin with its name."""

    model_config = STRICT

    type: Literal["namespace"]
    name: str
    description: ModelText | None = None
    tools: Annotated[
        list[Annotated[ResponseFunction | CustomTool, Field(discriminator="type")]],
        Field(max_length=MAX_TOOLS),
    ]


_KINDS = ("function", "custom", "namespace")


def _kind_of(tool: Any) -> str | None:
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    if not isinstance(tool, dict | BaseModel):
        return None
    return kind if kind in _KINDS else "hosted"


ResponseTool = Annotated[
    Annotated[ResponseFunction, Tag("function")]
    | Annotated[CustomTool, Tag("custom")]
    | Annotated[Namespace, Tag("namespace")]
    | Annotated[HostedTool, Tag("hosted")],
    Discriminator(_kind_of),
]
