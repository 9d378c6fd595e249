"""The span of a request, by OpenTelemetry's conventions for HTTP servers.

https://opentelemetry.io/docs/specs/semconv/http/http-spans/#http-server. It has neither the client's address and
name nor the text of a query, which may hold a ticket or search terms.
"""

from typing import TYPE_CHECKING

from starlette.types import Scope

from app.core.tracing import Tracing

if TYPE_CHECKING:
    from opentelemetry.trace import Span

_UNTRACED = {"/health", "/health/live", "/health/ready", "/metrics", "/ping"}
_ERROR = 500  # and above: the server's
# The conventions' list: others are names that a client may invent.
_METHODS = frozenset(
    ("CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "TRACE", "QUERY")
)


def begin(tracing: Tracing, scope: Scope) -> "Span | None":
    """Start the span of a request that is no probe, and set its context in `scope["trace"]`."""
    if scope["path"] in _UNTRACED:
        return None
    method = scope["method"]
    is_known = method in _METHODS
    attributes = {
        "http.request.method": method if is_known else "_OTHER",
        "url.path": scope["path"],
        "url.scheme": scope["scheme"],
        "network.protocol.version": scope["http_version"],
        "llm.request_id": scope["request_id"],
    }
    if not is_known:
        attributes["http.request.method_original"] = method
    if scope["query_string"]:
        attributes["url.query"] = "REDACTED"
    # None for a socket that is a file.
    address, port = scope.get("server") or ("", None)
    if port is not None:
        attributes |= {"server.address": address, "server.port": port}
    span, scope["trace"] = tracing.begin(_name(scope), scope["headers"], attributes)
    return span


def end(tracing: Tracing, span: "Span", scope: Scope, status: int) -> None:
    attributes: dict[str, str | int] = {"http.response.status_code": status}
    route = getattr(scope.get("route"), "path", None)
    if route is not None:
        attributes["http.route"] = route
    if status >= _ERROR:
        attributes["error.type"] = str(status)
    tracing.end(span, attributes, _name(scope, route))


def _name(scope: Scope, route: str | None = None) -> str:
    """Name of a span: by the route, as paths hold ids."""
    method = scope["method"] if scope["method"] in _METHODS else "HTTP"
    return method if route is None else f"{method} {route}"
