"""Request ids, request metrics and traces, for every response.

`X-Request-Id` is the client's if it is well formed, otherwise random; each response has it, and each
log line about the request. Responses to Anthropic's requests have it as `request-id` too.
"""

import logging
import re
import secrets
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api.errors import anthropic_errors
from app.api.middleware import request_span
from app.core import metrics, tracing
from app.core.log_context import CURRENT

logger = logging.getLogger(__name__)

HEADER = "X-Request-Id"
_HEADER = b"x-request-id"
_ANTHROPIC_HEADER = b"request-id"
_VALID_ID = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._:/+=@-]{0,127}")


class RequestIdMiddleware:
    """ASGI middleware, outside of all others but `ServedAs`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = given_id(scope) or secrets.token_hex(16)
        scope["request_id"] = request_id
        CURRENT.set(scope)
        headers = [(_HEADER, request_id.encode())]
        if anthropic_errors.is_request(scope):
            headers.append((_ANTHROPIC_HEADER, request_id.encode()))
        began = time.perf_counter()
        active = tracing.active
        span = request_span.begin(active, scope) if active is not None else None
        status = 500

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], *headers]
                _count(scope, status, began)
            await send(message)

        metrics.OPEN_REQUESTS.inc()
        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            # The framework's outermost handler sends the response, outside of this middleware.
            _count(scope, 500, began)
            raise
        finally:
            metrics.OPEN_REQUESTS.dec()
            if active is not None and span is not None:
                request_span.end(active, span, scope, status)


def given_id(scope: Scope) -> str | None:
    given = [value for name, value in scope["headers"] if name == _HEADER]
    if len(given) == 1 and _VALID_ID.fullmatch(given[0]):
        return bytes(given[0]).decode()
    return None


def _count(scope: Scope, status: int, began: float) -> None:
    metrics.REQUESTS.of(str(status)).inc()
    if logger.isEnabledFor(logging.DEBUG):
        # The query is left out: it may hold a ticket, or search terms.
        logger.debug(
            "%s %s: %d",
            *(scope["method"], scope["path"], status),
            extra={"action": "answered", "seconds": round(time.perf_counter() - began, 6)},
        )
