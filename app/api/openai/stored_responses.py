"""Requests of responses as they are stored, and ids of responses."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import orjson

from app.api.openai.batches_schemas import from_wire_id
from app.api.openai.chat_tools import ToolUse
from app.core.errors import NotFoundError
from app.inference.tool_calls import ToolFormat
from app.results.rows import ResultRow

DIALECT = "responses"


@dataclass(slots=True, frozen=True)
class StoredRequest:
    """A response's request, as stored with its result."""

    echo: dict[str, Any]
    input: list[dict[str, Any]]
    background: bool
    is_stored: bool
    has_instructions: bool
    logprobs: int | None
    use: ToolUse | None

    @classmethod
    def of(cls, request: str | None) -> "StoredRequest | None":
        """Parse them; None for a result that is not a response."""
        if request is None:
            return None
        members = orjson.loads(request)
        if members.pop("dialect", None) != DIALECT:
            return None
        return cls(use=_to_use(members.pop("calls")), **members)


def _to_use(calls: Mapping[str, Any] | None) -> ToolUse | None:
    if calls is None:
        return None
    tool_format = ToolFormat(calls["format"]) if calls["format"] else None
    return ToolUse(tool_format, calls["name"], calls["is_forced"], calls["is_parallel"])


def to_response_id(result_id: UUID) -> str:
    return f"resp_{result_id}"


def from_response_id(text: str) -> UUID:
    return from_wire_id("resp_", text, "response")


def stored_of(row: ResultRow) -> StoredRequest:
    """The stored request. Raises NotFoundError for other results, and for responses that are not stored."""
    stored = StoredRequest.of(row.request)
    if stored is None or not stored.is_stored:
        raise NotFoundError(f"There is no response {to_response_id(row.id)!r}.")
    return stored
