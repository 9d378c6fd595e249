"""An account of the byte budget for each request, and large responses in pieces."""

import asyncio
import logging
from collections.abc import Iterator

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.auth.principal import Principal
from app.core.byte_budget import ACCOUNT, Account, ByteBudget

logger = logging.getLogger(__name__)

PIECE_BYTES = 65_536  # that the server gets at once: it keeps what a slow client has not read
_STALL_SECONDS = 60.0  # without progress, of a client whose request holds bytes of the budget


class StalledClientError(Exception):
    """A client reads no further, while its request holds bytes of the budget."""


class ByteAccounts:
    """ASGI middleware, inside of the authentication: a request holds bytes until its response is sent."""

    def __init__(self, app: ASGIApp, stall_seconds: float = _STALL_SECONDS) -> None:
        self._app = app
        self._stall_seconds = stall_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        budget: ByteBudget = scope["app"].state.services.byte_budget
        principal: Principal = scope["principal"]
        account = Account(budget, principal.team_id)
        # Never reset: each request has a task of its own.
        ACCOUNT.set(account)

        async def send_in_pieces(message: Message) -> None:
            if not account.held and len(message.get("body", b"")) <= PIECE_BYTES:
                await send(message)
                return
            for piece in _pieces(message):
                await self._send_in_time(piece, send)

        try:
            await self._app(scope, receive, send_in_pieces)
        except StalledClientError:  # the server closes a connection whose body has no end
            logger.info("a client stopped reading", extra={"action": "client_stalled"})
        finally:
            account.close()

    async def _send_in_time(self, message: Message, send: Send) -> None:
        try:
            async with asyncio.timeout(self._stall_seconds):
                await send(message)
        except TimeoutError:
            raise StalledClientError from None


def _pieces(message: Message) -> Iterator[Message]:
    body, has_more = message.get("body", b""), message.get("more_body", False)
    last = max(len(body) - 1, 0) // PIECE_BYTES * PIECE_BYTES
    for start in range(0, last, PIECE_BYTES):
        yield {**message, "body": body[start : start + PIECE_BYTES], "more_body": True}
    yield {**message, "body": body[last:], "more_body": has_more} if last else message
