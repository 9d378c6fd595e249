"""Protection of an API without tokens: a page that others reach must not open it.

The API itself refuses to bind anything but loopback without authentication; a page in front of it
would undo that. Each request checks it, since the API may restart meanwhile with other settings.
"""

import ipaddress

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from app.ui.api import api_of
from app.ui.errors import ApiError
from app.ui.render import fragment
from app.ui.settings import UiSettings


class ExposureGuard:
    """ASGI middleware: refuses everything while the API is open and the page is not on loopback."""

    def __init__(self, app: ASGIApp, settings: UiSettings) -> None:
        self._app = app
        self._is_safe = settings.allow_unauthenticated or _is_loopback(settings.host)
        message = (
            f"The API asks for no token, and this page is bound to {settings.host}: set LLM_AUTH=on "
            "for the API, bind the page to 127.0.0.1 (LLM_UI_HOST), or set "
            "LLM_ALLOW_UNAUTHENTICATED=true if no other user can reach the port."
        )
        self._shown = {"title": "Not served", "message": message, "fields": ()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http" and not self._is_safe:
            request = Request(scope)
            if await _is_open(request):
                app = fragment(request, "error.html", 403, me=None, **self._shown)
        await app(scope, receive, send)


async def _is_open(request: Request) -> bool:
    try:
        return not (await api_of(request).me()).is_authenticated
    except ApiError:
        return False  # it requires a token, or does not answer


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
