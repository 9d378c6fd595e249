"""View of a result: figures, text, error in words."""

import asyncio
import json
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from app.ui.markdown import can_render, render_markdown
from app.ui.remedies import explain
from app.ui.render import number, seconds, to_time

# Pages show the beginning of a longer text, and a link to all of it.
MAX_SHOWN_CHARACTERS = 100_000
# Titles of completed results whose answer is no text.
_OUTCOMES = {
    "attribution": "The documents that it found",
    "embedding": "A vector",
    "score": "Scores of documents",
}
# Members that the API omits if they are empty.
OPTIONAL: Mapping[str, Any] = {
    "erased_at": None,
    "source_id": None,
    "attribution": None,
    "reused_from": None,
}


async def to_view(result: Mapping[str, Any], view: str | None = None) -> dict[str, Any]:
    """The result with the members that templates need.

    `shown_state`, `figures` as (name, value), `text`, `html` (its formatted text, else None),
    `can_render`, `length` in characters (of which `text` may be the beginning), and in `error` the problem
    (`words`) and the `remedy`. `view` chooses between formatted and plain; by default chats are formatted.
    """
    text = _text(result)
    is_text = isinstance(result["result"], str)
    shown: dict[str, Any] = {
        **OPTIONAL,
        **result,
        "text": text[:MAX_SHOWN_CHARACTERS],
        "length": len(text),
        "html": None,
        "can_render": is_text and can_render(text),
        "figures": figures(result),
        "shown_state": state_of(result),
    }
    if result["error"]:
        words, remedy = explain(result["error"]["code"], result["error"]["message"])
        shown["error"] = {**result["error"], "words": words, "remedy": remedy}
    if view == "rendered" and shown["can_render"] and text:
        shown["html"] = await asyncio.to_thread(render_markdown, text)
    return shown


def view_of(context: Mapping[str, Any]) -> str:
    """The initial view of an answer: formatted for a chat, plain for a text."""
    return "rendered" if context["messages"] else "plain"


def state_of(result: Mapping[str, Any]) -> str:
    if result["state"] == "pending":
        return "running" if result["started_at"] else "queued"
    is_cancelled = result["error"] is not None and result["error"]["code"] == "cancelled"
    return "cancelled" if is_cancelled else str(result["state"])


def figures(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    times = timings(result)
    usage = result["usage"] or {}
    tokens, rate = usage.get("completion_tokens"), None
    # The first token ends the prefill: the others came in the time behind it.
    if tokens and tokens > 1 and times["decode"]:
        rate = (tokens - 1) / times["decode"]
    found: list[tuple[str, Any, Callable[[Any], str]]] = [
        ("to the first token", times["first_token"], seconds),
        ("in all", times["total"], seconds),
        ("prompt tokens", usage.get("prompt_tokens"), number),
        ("tokens", tokens, number),
        ("tokens/s", rate, number),
        ("finish reason", result["finish_reason"] or None, str),
        ("attempts", result["attempt"] if result["attempt"] > 1 else None, str),
    ]
    return [(name, shown(value)) for name, value, shown in found if value is not None]


def timings(result: Mapping[str, Any]) -> dict[str, float | None]:
    """Seconds: `queued`, `prefill`, `decode`, `first_token` (from creation), `total`."""
    names = ("created_at", "started_at", "first_token_at", "finished_at")
    created, started, first, finished = (
        to_time(result[name]) if result[name] else None for name in names
    )

    def between(begin: datetime | None, end: datetime | None) -> float | None:
        return max(0.0, (end - begin).total_seconds()) if begin and end else None

    return {
        "queued": between(created, started),
        "prefill": between(started, first),
        "decode": between(first, finished),
        "first_token": between(created, first),
        "total": between(created, finished),
    }


def _text(result: Mapping[str, Any]) -> str:
    value = result["result"]
    if value is None:
        return ""
    return value if isinstance(value, str) else to_json(value)


def to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=2)


def one_line(text: str | None) -> str:
    return " ".join((text or "")[:1000].split())[:200]


def outcome(result: Mapping[str, Any]) -> str:
    if isinstance(result["result"], str) and result["result"].strip():
        return one_line(result["result"])
    if result["error"]:
        return one_line(explain(result["error"]["code"], result["error"]["message"])[0])
    if result.get("erased_at"):
        return "Its texts were erased"
    if result["state"] == "pending":
        return "Not answered yet"
    return _OUTCOMES.get(result["kind"], "An empty answer")
