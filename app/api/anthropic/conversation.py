"""Messages of a request in the form that chat templates take."""

from collections.abc import Sequence
from typing import Any, Literal, Self

from pydantic import BaseModel, model_validator

from app.api.anthropic.blocks import (
    Content,
    HostedBlock,
    ImageBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    join_content,
    join_texts,
)
from app.api.schema_parts import STRICT, value_error
from app.api.tool_arguments import EarlierCall, earlier_calls
from app.core.errors import invalid_field
from app.inference.images import join_messages

# Blocks that messages of a role cannot have.
_FOREIGN: dict[str, tuple[type[BaseModel], ...]] = {
    "user": (ToolUseBlock, HostedBlock),
    "assistant": (ToolResultBlock, ImageBlock),
    "system": (ToolUseBlock, ToolResultBlock, ImageBlock, HostedBlock),
}


class MessageParam(BaseModel):
    """One turn of the conversation."""

    model_config = STRICT

    role: Literal["user", "assistant", "system"]
    content: Content

    @model_validator(mode="before")
    @classmethod
    def _may_have_no_content(cls, message: Any) -> Any:
        """An answer of white space alone, or of reasoning that is not shown, has no blocks."""
        if not isinstance(message, dict) or message.get("role") != "assistant":
            return message
        return message | {"content": []} if message.get("content") is None else message

    @model_validator(mode="after")
    def _has_blocks_of_its_role(self) -> Self:
        for place, block in enumerate(self.content):
            if isinstance(block, _FOREIGN[self.role]):
                raise value_error(
                    f"block {place} is of type {block.type}, which the role {self.role} cannot have"
                )
        return self


def to_template(
    system: Sequence[TextBlock] | None,
    messages: Sequence[MessageParam],
    reasoning_members: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """The messages for a template: consecutive ones of a role are one, a call's result is its own.

    `reasoning_members` are the template's names for the thoughts of an assistant's message.
    """
    found: list[dict[str, Any]] = []
    if system and (text := join_texts(system)):
        found.append({"role": "system", "content": text})
    for message in messages:
        if message.role == "assistant":
            _add(found, _answer(message, reasoning_members))
            continue
        blocks: list[TextBlock | ImageBlock] = []
        has_results = False
        for block in message.content:
            if isinstance(block, ToolResultBlock):
                if blocks:
                    _add(found, {"role": message.role} | join_content(blocks))
                blocks, has_results = [], True
                result = {"role": "tool", "tool_call_id": block.tool_use_id}
                found.append(result | join_content(block.content or ()))
            elif isinstance(block, TextBlock | ImageBlock):
                blocks.append(block)
        if blocks or not has_results:
            _add(found, {"role": message.role} | join_content(blocks))
    return found


def hosted_blocks(messages: Sequence[MessageParam]) -> dict[str, str]:
    """The types of blocks that are left out, by their places."""
    return {
        f"messages.{at}.content.{place}.type": block.type
        for at, message in enumerate(messages)
        for place, block in enumerate(message.content)
        if isinstance(block, HostedBlock)
    }


def is_prefill(messages: Sequence[MessageParam]) -> bool:
    """Return whether the model continues the last message. Raises InvalidRequestError."""
    last = messages[-1]
    if last.role != "assistant":
        return False
    if any(isinstance(block, ToolUseBlock) for block in last.content):
        raise invalid_field(
            "messages", "the last one has tool_use blocks; send their tool_result blocks after it"
        )
    return bool(join_texts(last.content))


def _answer(message: MessageParam, reasoning_members: Sequence[str]) -> dict[str, Any]:
    calls = [
        EarlierCall(block.id, block.name, block.input)
        for block in message.content
        if isinstance(block, ToolUseBlock)
    ]
    answer = {"role": "assistant"} | earlier_calls(join_texts(message.content), calls)
    thoughts = "\n".join(
        block.thinking for block in message.content if isinstance(block, ThinkingBlock)
    )
    if thoughts:
        answer |= dict.fromkeys(reasoning_members, thoughts)
    return answer


def _add(found: list[dict[str, Any]], message: dict[str, Any]) -> None:
    """Add a message, or join it with one of the same role that it follows."""
    last = found[-1] if found else None
    if last is None or last["role"] != message["role"] or "tool_calls" in last:
        found.append(message)
        return
    last |= message | join_messages(last, message)
