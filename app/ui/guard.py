"""Checks of every request of a browser, and the headers of every response.

A page is attacked through its visitor's browser. The names of the host stop DNS rebinding; the
browser's report of the origin stops cross-site writes (Fetch Metadata,
https://www.w3.org/TR/fetch-metadata/; the Origin header if that is missing); a policy that runs only
our scripts stops those in a model's output; no frames are allowed.
"""

from collections.abc import Iterable, Mapping

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# Health checks of containers call it by an address. Its answer is a word.
READY_PATH = "/ready"
_SAFE_METHODS = frozenset({"GET", "HEAD"})
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "font-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": _POLICY,
    "x-frame-options": "DENY",
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}


class BodyTooLargeError(Exception):
    """The body is larger than the form's bound; the text is for the page."""


class Guard:
    """ASGI middleware. `bounds` are paths whose forms have their own bound, in bytes."""

    def __init__(
        self,
        app: ASGIApp,
        allowed_hosts: Iterable[str],
        max_form_bytes: int,
        bounds: Mapping[str, int],
    ) -> None:
        self._app = app
        self._allowed = frozenset(host.lower() for host in allowed_hosts)
        self._max_form_bytes = max_form_bytes
        self._bounds = bounds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        refusal = self._refusal(scope["method"], scope["path"], headers)
        app = self._app if refusal is None else PlainTextResponse(refusal, 403)
        bound = self._bounds.get(scope["path"], self._max_form_bytes)
        await app(scope, _bounded(receive, bound), _with_headers(send))

    def _refusal(self, method: str, path: str, headers: Headers) -> str | None:
        host = _name(headers.get("host", ""))
        if path != READY_PATH and "*" not in self._allowed and host not in self._allowed:
            return f"Host {host!r} is not allowed; add it to LLM_UI_ALLOWED_HOSTS if it is yours."
        if method in _SAFE_METHODS:
            return None
        site = headers.get("sec-fetch-site")
        if site is not None:
            is_ours = site in ("same-origin", "none")
        else:  # an old browser, or none
            origin = headers.get("origin")
            is_ours = origin is None or origin.split("://", 1)[-1] == headers.get("host")
        return None if is_ours else "A form of another site is not taken."


def _bounded(receive: Receive, bound: int) -> Receive:
    received = 0

    async def counting() -> Message:
        nonlocal received
        message = await receive()
        received += len(message.get("body", b""))
        if received > bound:
            raise BodyTooLargeError(f"That is more than {bound:,} bytes.")
        return message

    return counting


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                headers.setdefault(name, value)
            headers.setdefault("cache-control", "no-store")
        await send(message)

    return sending


def _name(host: str) -> str:
    host = host.lower()
    return host.split("]", 1)[0] + "]" if host.startswith("[") else host.rsplit(":", 1)[0]
