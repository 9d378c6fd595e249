"""Turns of the event loop for the requests of each team."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api.middleware.access import OPEN_PATHS
from app.auth.principal import Principal
from app.core.fair_share import FairShares, pause


class FairTurns:
    """ASGI middleware, inside of the authentication: a request takes its team's turns.

    If authentication is off, all requests are of one team, and none waits.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        shares: FairShares | None = None
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:  # probes do not wait
            shares = scope["app"].state.fair_shares
        if shares is None:
            await self._app(scope, receive, send)
        else:
            principal: Principal = scope["principal"]
            await shares.run(principal.team_id, self._respond(scope, receive, send))

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_turn(message: Message) -> None:
            await send(message)
            await pause()  # a client that reads everything at once never makes `send` wait

        await self._app(scope, receive, send_in_turn)
