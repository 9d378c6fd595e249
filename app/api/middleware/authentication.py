"""ASGI middleware that authenticates each request before its body is read."""

import asyncio
import hashlib
import math
import re

from starlette.types import ASGIApp, Receive, Scope, Send

from app.api.errors.error_responses import refusal_of
from app.api.middleware.access import needed_scope
from app.auth.authenticator import Authenticator
from app.auth.failed_attempts import FailedAttempts
from app.auth.principal import ANYONE, NOBODY, Principal
from app.core.errors import (
    ForbiddenError,
    InvalidTokenError,
    NotFoundError,
    ServiceError,
    TooManyFailedAttemptsError,
)

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_CREDENTIALS = (b"authorization", b"x-api-key")


class AuthenticationMiddleware:
    """ASGI middleware, outside of the request guard: bodies without a valid token stay unread.

    The routes find the principal in `scope["principal"]`.
    """

    def __init__(self, app: ASGIApp, *, is_on: bool, auth_failures_per_minute: int) -> None:
        self._app = app
        self._is_on = is_on
        self._failed = FailedAttempts(auth_failures_per_minute)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                # A route's `$` also matches before a trailing line feed.
                if _CONTROL.search(scope["path"]):
                    raise NotFoundError("There is no such path: it holds a control character.")
                scope["principal"] = await self._principal(scope) if self._is_on else ANYONE
            except ServiceError as error:
                await refusal_of(scope, error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    async def _principal(self, scope: Scope) -> Principal:
        needed = needed_scope(scope["method"], scope["path"], scope["query_string"])
        if needed is None:
            return NOBODY
        authenticator: Authenticator = scope["app"].state.services.authenticator
        try:
            principal = await authenticator.authenticate(scope["headers"])
        except InvalidTokenError:
            self._count_failure(scope)
            raise
        if needed not in principal.scopes:
            raise ForbiddenError(f"This needs a token with the scope `{needed}`.")
        return principal

    def _count_failure(self, scope: Scope) -> None:
        """Raise TooManyFailedAttemptsError above the limit. Valid tokens still pass."""
        sent = b"".join(value for name, value in scope["headers"] if name in _CREDENTIALS)
        wait = self._failed.count(
            scope["client"][0] if scope.get("client") else "",
            hashlib.sha256(sent).digest(),
            asyncio.get_running_loop().time(),
        )
        if wait is not None:
            raise TooManyFailedAttemptsError(
                "Your address has tried too many wrong tokens. Try again after the time in Retry-After.",
                headers={"Retry-After": str(math.ceil(wait))},
            )
