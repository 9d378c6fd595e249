"""Paths at which another route is served, by a setting."""

from collections.abc import Mapping

from starlette.types import ASGIApp, Receive, Scope, Send


class ServedAs:
    """ASGI middleware, outside of all others: authentication, errors and routes see the new path."""

    def __init__(self, app: ASGIApp, paths: Mapping[str, str]) -> None:
        """`paths`: for each path of a request the path of the route that serves it."""
        self._app = app
        self._paths = dict(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (path := self._paths.get(scope["path"])) is not None:
            # In place: the framework's handler of unexpected errors is outside and has this scope.
            scope["path"], scope["raw_path"] = path, path.encode()
        await self._app(scope, receive, send)
