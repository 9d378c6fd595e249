"""Context of log lines: the ASGI scope of the request that a task works for."""

from collections.abc import Iterator, MutableMapping
from contextvars import ContextVar
from typing import Any

# Never reset: each request has a task of its own, and the server's log line at its end belongs to it.
CURRENT: ContextVar[MutableMapping[str, Any] | None] = ContextVar("llm_request", default=None)


def ids() -> Iterator[tuple[str, str]]:
    scope = CURRENT.get()
    if scope is None:
        return
    if request_id := scope.get("request_id"):
        yield "request_id", request_id
    if trace := scope.get("trace"):
        yield "trace_id", trace.split("-")[1]
    if team_id := getattr(scope.get("principal"), "team_id", None):
        yield "team_id", team_id


def trace() -> str | None:
    """Return the `traceparent` of the present request."""
    scope = CURRENT.get()
    return scope.get("trace") if scope is not None else None
