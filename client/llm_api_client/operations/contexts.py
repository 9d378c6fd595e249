"""Contexts: stored prompts."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from llm_api_client.operations.paging import pages
from llm_api_client.operations.results import Prompt, request_of
from llm_api_client.schemas import Context
from llm_api_client.steps import Call, Feed, Request, exchange, fetch


def _path(context_id: str) -> str:
    return f"/contexts/{quote(context_id, safe='')}"


def create(prompt: Prompt, *, metadata: Mapping[str, Any] | None = None) -> Call[Context]:
    """Store a prompt, to send it any number of times by its id (`send(context_id=...)`).

    Args:
        prompt: a text, or the messages of a chat.
        metadata: kept and returned; at most 16 KiB as JSON.
    """
    body = request_of(prompt, {"metadata": metadata})
    return (
        yield from fetch(Request("POST", "/contexts/", json=body, is_repeatable=False), Context)
    )


def get(context_id: str) -> Call[Context]:
    """Read a stored prompt."""
    return (yield from fetch(Request("GET", _path(context_id)), Context))


def list_contexts(*, limit: int | None = None) -> Feed[Context]:
    """Iterate over the stored prompts, newest first; `limit` None: all."""
    yield from pages("/contexts/", Context, {}, limit)


def delete(context_id: str, *, force: bool = False) -> Call[None]:
    """Delete a prompt with its results; with pending ones only with `force`."""
    yield from exchange(Request("DELETE", _path(context_id), {"force": force or None}))
