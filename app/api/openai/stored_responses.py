"""Requests of responses as they are stored, and ids of responses."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID

import orjson

from app.api.dependencies import from_wire_id
from app.api.openai.tool_forms import forms_of
from app.api.output_rules import OutputRules
from app.api.tool_use import ToolForm, ToolUse
from app.core.errors import NotFoundError
from app.inference.reasoning import ReasoningUse
from app.inference.tool_calls import ToolFormat
from app.results.rows import ResultRow

DIALECT = "responses"
# Sampling that a response echoes where the request leaves it open: the dialect requires numbers.
NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


@dataclass(slots=True, frozen=True)
class StoredRequest:
    """A response's request, as stored with its result."""

    echo: dict[str, Any]
    input: list[dict[str, Any]]
    background: bool
    is_stored: bool
    has_instructions: bool
    logprobs: int | None
    rules: OutputRules

    @classmethod
    def of(cls, request: str | None, parameters: str = "{}") -> "StoredRequest | None":
        """Parse them; None for a result that is not a response. `parameters` are the result's."""
        if request is None:
            return None
        members = orjson.loads(request)
        if members.pop("dialect", None) != DIALECT:
            return None
        # Among the members that are echoed: a process of an older version, too, reads the row.
        echo = members["echo"] = _with_numbers(members["echo"], parameters)
        reasoning = echo.get("reasoning", {}).pop("rules", None)
        # As functions among the tools, which such a process reads; as the client sent them, here.
        sent = echo.get("reasoning", {}).pop("tools", None)
        functions = echo.get("tools", ())
        if sent is not None:
            echo["tools"] = sent
        rules = OutputRules(
            _to_use(members.pop("calls"), functions, forms_of(sent or ())),
            ReasoningUse.of(reasoning) if reasoning else None,
        )
        return cls(rules=rules, **members)

    def counted_by(self, count_tokens: Callable[[str], int] | None) -> "StoredRequest":
        """The same request, whose tokens of reasoning are counted."""
        return replace(self, rules=replace(self.rules, count_tokens=count_tokens))


def _with_numbers(echo: dict[str, Any], parameters: str) -> dict[str, Any]:
    """The echo of a process of an older version with its numbers, which it has as null or not at all."""
    if "presence_penalty" in echo:
        return echo
    known = NEUTRAL | {"top_logprobs": 0} | orjson.loads(parameters)
    names = (*NEUTRAL, "top_logprobs")
    return echo | {name: known[name] for name in names if echo.get(name) is None}


def _to_use(
    calls: Mapping[str, Any] | None,
    tools: Sequence[Mapping[str, Any]],
    forms: Mapping[str, ToolForm],
) -> ToolUse | None:
    if calls is None:
        return None
    tool_format = ToolFormat(calls["format"]) if calls["format"] else None
    schemas = {tool["name"]: tool["parameters"] or {} for tool in tools}
    kind = (calls["name"], calls["is_forced"], calls["is_parallel"])
    return ToolUse(tool_format, *kind, schemas, forms=forms)


def to_response_id(result_id: UUID) -> str:
    return f"resp_{result_id}"


def from_response_id(text: str) -> UUID:
    return from_wire_id("resp_", text, "response")


def stored_of(row: ResultRow) -> StoredRequest:
    """The stored request. Raises NotFoundError for other results, and for responses that are not stored."""
    stored = StoredRequest.of(row.request, row.parameters)
    if stored is None or not stored.is_stored:
        raise NotFoundError(f"There is no response {to_response_id(row.id)!r}.")
    return stored
