"""Content blocks of a request, and the texts and calls that templates get of them."""

from collections.abc import Iterable
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, JsonValue, model_validator

from app.api.documents import result_text
from app.api.schema_parts import STRICT, ModelText, value_error, without_nul
from app.inference.images import (
    Image,
    check_content,
    check_url,
    checked_image,
    is_remote,
    join_pieces,
)

_MAX_BLOCKS = 10_000
_TEXT_ONLY = ("text",)
_RESULT_BLOCKS = ("text", "image", "document", "search_result", "tool_reference")
_BLOCKS = ("text", "image", "thinking", "redacted_thinking", "tool_use", "tool_result")
# Blocks of tools that Anthropic runs, in a conversation that began there.
_HostedKind = Literal[
    "server_tool_use",
    "web_search_tool_result",
    "web_fetch_tool_result",
    "code_execution_tool_result",
    "bash_code_execution_tool_result",
    "text_editor_code_execution_tool_result",
    "tool_search_tool_result",
    "advisor_tool_result",
    "mcp_tool_use",
    "mcp_tool_result",
]
_HOSTED = get_args(_HostedKind)


def _to_blocks(content: Any) -> Any:
    """A text is short for one text block."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _check_type(block: Any, known: tuple[str, ...], unnamed: tuple[str, ...] = ()) -> Any:
    kind = block.get("type") if isinstance(block, dict) else None
    if isinstance(block, dict) and kind not in known + unnamed:
        raise value_error(
            f"a block of type {str(kind)[:40]!r} is not supported here; supported are {', '.join(known)}"
        )
    return block


class TextBlock(BaseModel):
    model_config = STRICT

    type: Literal["text"]
    text: ModelText


def _check_source(source: Any) -> Any:
    kind = source.get("type") if isinstance(source, dict) else None
    if isinstance(source, dict) and kind not in ("base64", "url"):
        raise value_error(
            f"a source of type {str(kind)[:40]!r} is not supported: send the image as base64"
        )
    return source


class ImageSource(BaseModel):
    model_config = STRICT

    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str = Field(
        description="The image as base64.", json_schema_extra={"contentEncoding": "base64"}
    )

    @model_validator(mode="after")
    def _has_its_type(self) -> Self:
        check_content(self.media_type, self.data)
        return self


def _check_remote(url: str) -> str:
    if not is_remote(url):
        raise value_error("must begin with http:// or https://")
    return check_url(url)


class UrlSource(BaseModel):
    """A URL, for a service that fetches images (LLM_IMAGE_URLS)."""

    model_config = STRICT

    type: Literal["url"]
    url: Annotated[str, AfterValidator(_check_remote)]


class ImageBlock(BaseModel):
    """An image, for models with vision."""

    model_config = STRICT

    type: Literal["image"]
    source: Annotated[
        Annotated[ImageSource | UrlSource, Field(discriminator="type")],
        BeforeValidator(_check_source),
    ]

    def to_image(self) -> Image:
        if isinstance(self.source, UrlSource):
            return checked_image(self.source.url)
        return checked_image(f"data:{self.source.media_type};base64,{self.source.data}")


class ThinkingBlock(BaseModel):
    """An earlier thought, for templates that take it."""

    model_config = STRICT

    type: Literal["thinking", "redacted_thinking"]
    thinking: ModelText = ""


class ToolUseBlock(BaseModel):
    """A call that the model made."""

    model_config = STRICT

    type: Literal["tool_use"]
    id: Annotated[str, Field(min_length=1, max_length=256)]
    name: Annotated[str, Field(min_length=1)]
    input: Annotated[dict[str, JsonValue] | str, AfterValidator(without_nul)] = Field(
        default_factory=dict,
        description="The model sees the text of what is no object, as of a call that was cut.",
    )


_TextBlocks = Annotated[
    list[Annotated[TextBlock, BeforeValidator(lambda block: _check_type(block, _TEXT_ONLY))]],
    Field(max_length=_MAX_BLOCKS),
]
Texts = Annotated[
    _TextBlocks, BeforeValidator(_to_blocks, json_schema_input_type=str | _TextBlocks)
]


def _to_readable(block: Any) -> Any:
    """A block of a result; of a document, the text that stands for it."""
    _check_type(block, _RESULT_BLOCKS)
    kind = block.get("type") if isinstance(block, dict) else None
    if kind in ("text", "image", None):
        return block
    return {"type": "text", "text": result_text(block)}


_ResultBlock = Annotated[
    Annotated[TextBlock | ImageBlock, Field(discriminator="type")],
    BeforeValidator(_to_readable),
]
_ResultBlocks = Annotated[list[_ResultBlock], Field(max_length=_MAX_BLOCKS)]


class ToolResultBlock(BaseModel):
    """The result of a call."""

    model_config = STRICT

    type: Literal["tool_result"]
    tool_use_id: Annotated[str, Field(min_length=1, max_length=256)]
    content: (
        Annotated[
            _ResultBlocks, BeforeValidator(_to_blocks, json_schema_input_type=str | _ResultBlocks)
        ]
        | None
    ) = None
    is_error: bool | None = Field(None, description="Ignored: the content states the error.")


class HostedBlock(BaseModel):
    """A call or a result of a tool that this service does not run: left out (LLM_HOSTED_TOOLS)."""

    model_config = STRICT

    type: _HostedKind


_Block = Annotated[
    Annotated[
        TextBlock | ImageBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock | HostedBlock,
        Field(discriminator="type"),
    ],
    BeforeValidator(lambda block: _check_type(block, _BLOCKS, _HOSTED)),
]
_Blocks = Annotated[list[_Block], Field(max_length=_MAX_BLOCKS)]
Content = Annotated[_Blocks, BeforeValidator(_to_blocks, json_schema_input_type=str | _Blocks)]


def join_texts(blocks: Any) -> str:
    """The text blocks as lines of one text, as in a chat completion."""
    return "\n".join(block.text for block in blocks if isinstance(block, TextBlock))


def join_content(blocks: Iterable[TextBlock | ImageBlock]) -> dict[str, Any]:
    """The content of a template's message, with the images at their places."""
    return join_pieces(
        block.text if isinstance(block, TextBlock) else block.to_image() for block in blocks
    )
