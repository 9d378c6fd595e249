"""Sign-in: the visitor's token, sealed in a cookie that no script of a page can read.

Fernet seals it (https://github.com/fernet/spec), so that no replica keeps anything, and a copied
cookie is of no use after its time. The API checks the token at each request.
"""

import base64
import hashlib
import secrets

from cryptography.fernet import Fernet, InvalidToken
from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from app.ui.settings import UiSettings

_COOKIE = "llm_session"
_MAX_TOKEN_BYTES = 3000  # a browser keeps cookies of 4,096 bytes


class TokenTooLongError(ValueError): ...


class Sessions:
    def __init__(self, settings: UiSettings) -> None:
        secret = settings.secret.get_secret_value() if settings.secret else secrets.token_hex(32)
        key = hashlib.sha256(b"llm ui session" + secret.encode()).digest()
        self._fernet = Fernet(base64.urlsafe_b64encode(key))
        self._seconds = int(settings.session_hours * 3600)

    def token_of(self, connection: HTTPConnection) -> str | None:
        sealed = connection.cookies.get(_COOKIE)
        if not sealed:
            return None
        try:
            return self._fernet.decrypt(sealed.encode(), ttl=self._seconds).decode()
        except (InvalidToken, UnicodeError):
            return None

    def begin(self, response: Response, token: str, *, is_secure: bool) -> None:
        """Have the browser keep the token. Raises TokenTooLongError."""
        if len(token.encode()) > _MAX_TOKEN_BYTES:
            raise TokenTooLongError
        response.set_cookie(
            _COOKIE,
            self._fernet.encrypt(token.encode()).decode(),
            max_age=self._seconds,
            httponly=True,
            secure=is_secure,
            samesite="lax",
        )

    @staticmethod
    def end(response: Response) -> None:
        response.delete_cookie(_COOKIE, httponly=True, samesite="lax")


class SessionMiddleware:
    """ASGI middleware: `request.state.token` is the visitor's, or None."""

    def __init__(self, app: ASGIApp, sessions: Sessions) -> None:
        self._app = app
        self._sessions = sessions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            token = self._sessions.token_of(HTTPConnection(scope))
            scope.setdefault("state", {})["token"] = token
        await self._app(scope, receive, send)


def safe_path(path: str) -> str:
    """A path of this site to redirect to; `/` for other values (RFC 3986: `//` is another host)."""
    if not path.startswith("/") or path.startswith(("//", "/\\")):
        return "/"
    return path if path.isprintable() else "/"
