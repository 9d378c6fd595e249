"""Messages of a chat completion, and their form for chat templates."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    WithJsonSchema,
    model_validator,
)

from app.api.documents import unread_document
from app.api.openai.tool_forms import custom_arguments
from app.api.schema_parts import STRICT, ModelText, Refused, value_error
from app.api.tool_arguments import EarlierCall, earlier_calls
from app.inference.images import Images, to_member

MAX_MESSAGES = 10_000
MAX_TOOLS = 512  # as in Messages: agents have those of many servers


def _join_parts(content: Any) -> Any:
    """Join content parts as lines of one text, as vLLM does for text templates."""
    if not isinstance(content, list):
        return content
    texts = []
    for place, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("refusal" if kind == "refusal" else "text") if kind else None
        if kind not in ("text", "refusal"):
            raise value_error(
                f"part {place} is of type {str(kind)[:40]!r}; only text and image_url are supported"
            )
        if not isinstance(text, str):
            raise value_error(f"part {place} has no text")
        texts.append(text)
    return "\n".join(texts)


_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_IMAGE_PART = {
    "type": "object",
    "properties": {
        "type": {"const": "image_url"},
        "image_url": {
            "type": "object",
            "properties": {"url": {"type": "string"}, "detail": {"type": "string"}},
            "required": ["url"],
        },
    },
    "required": ["type", "image_url"],
}
Content = Annotated[
    ModelText,
    BeforeValidator(_join_parts),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"anyOf": [_PART, _IMAGE_PART]}},
            ]
        }
    ),
]


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "image_url"


def _split_images(content: list[Any]) -> dict[str, Any]:
    """The parts that are no images, and the images, with their places in the joined text."""
    others: list[Any] = []
    images = []
    length = 0  # of the texts as lines
    for part in content:
        if _is_image(part):
            given = part.get("image_url")
            url = given.get("url") if isinstance(given, dict) else given
            images.append({"url": url, "after": length})
            continue
        text = part.get("text") if isinstance(part, dict) else None
        if isinstance(text, str):
            length += len(text) + bool(others)
        others.append(part)
    return {"content": others, "images": images}


def _document_text(part: Any) -> Any:
    """A part of a tool's output; of a document, the text that stands for it."""
    if not isinstance(part, dict) or part.get("type") != "file":
        return part
    file = part.get("file")
    name = file.get("filename") if isinstance(file, dict) else None
    return {"type": "text", "text": unread_document(name)}


class CalledFunction(BaseModel):
    model_config = STRICT

    name: Annotated[str, Field(min_length=1)]
    arguments: ModelText = Field(
        "{}", description="JSON of an object. The model sees the text of what is none."
    )


class AssistantToolCall(BaseModel):
    model_config = STRICT

    id: Annotated[str, Field(max_length=256)]
    type: Literal["function", "custom"] = "function"
    function: CalledFunction

    @model_validator(mode="before")
    @classmethod
    def _of_custom(cls, call: Any) -> Any:
        """A call of a custom tool, as of the function that the model knows."""
        if not isinstance(call, dict) or call.get("type") != "custom":
            return call
        custom = call.get("custom")
        if not isinstance(custom, dict) or not isinstance(custom.get("input"), str):
            raise value_error("a custom call needs `custom` with a name and an input")
        arguments = custom_arguments(custom["input"])
        return call | {"function": {"name": custom.get("name"), "arguments": arguments}}


class ChatMessage(BaseModel):
    model_config = STRICT

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: Annotated[str, Field(max_length=256)] | None = None
    tool_calls: list[AssistantToolCall] | None = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None
    reasoning_content: ModelText | None = Field(
        None, description="An earlier answer's reasoning, for templates that take it."
    )
    reasoning: ModelText | None = Field(None, description="vLLM's newer name of reasoning_content.")
    images: Images | None = Field(
        None, description="As in the native API; parts of type `image_url` become these."
    )
    audio: Refused = Field(None, description="Not supported.")
    function_call: Refused = Field(None, description="Not supported: use tool_calls.")

    @model_validator(mode="before")
    @classmethod
    def _take_documents(cls, message: Any) -> Any:
        content = message.get("content") if isinstance(message, dict) else None
        if not isinstance(content, list) or message.get("role") != "tool":
            return message
        return message | {"content": [_document_text(part) for part in content]}

    @model_validator(mode="before")
    @classmethod
    def _take_images(cls, message: Any) -> Any:
        content = message.get("content") if isinstance(message, dict) else None
        if not isinstance(content, list) or not any(map(_is_image, content)):
            return message
        if message.get("images"):
            raise value_error("has images in its content already: give no `images`")
        return message | _split_images(content)

    @model_validator(mode="after")
    def _has_its_members(self) -> Self:
        if self.tool_calls and self.role != "assistant":
            raise value_error("only assistant messages have tool_calls")
        # An answer whose reasoning never ended has none, nor has the output of many tools.
        if self.content is None and self.role not in ("assistant", "tool"):
            raise value_error("has no content")
        return self

    @property
    def thoughts(self) -> str | None:
        return self.reasoning_content or self.reasoning

    def to_template(
        self, *, knows_developer: bool, reasoning_members: Sequence[str] = ()
    ) -> dict[str, Any]:
        """The message for templates: arguments of calls as objects, as in transformers."""
        role = self.role
        if role == "developer" and not knows_developer:
            role = "system"  # its older name
        calls = [
            EarlierCall(call.id, call.function.name, call.function.arguments)
            for call in self.tool_calls or ()
        ]
        message = {"role": role} | earlier_calls(self.content or "", calls)
        message |= to_member(self.images)
        if self.name is not None:
            message["name"] = self.name
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.role == "assistant" and self.thoughts:
            message |= dict.fromkeys(reasoning_members, self.thoughts)
        return message
