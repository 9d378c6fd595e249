"""Raw routes, which bypass FastAPI, and their part of the OpenAPI document."""

from collections.abc import Iterable
from typing import Any

from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.requests import Request
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from app.api.errors.error_responses import refusal_of
from app.core.errors import ServiceError


class RawRoutes:
    """ASGI middleware that serves the routes of the hot path before FastAPI.

    Their handlers receive the request alone. FastAPI has the same routes for the OpenAPI document; its
    own dispatch costs more CPU time than the handlers do.
    """

    def __init__(
        self, app: ASGIApp, routes: Iterable[BaseRoute], others: Iterable[str] = ()
    ) -> None:
        """`others`: paths of FastAPI that match a raw route's pattern."""
        self._app = app
        self._others = frozenset(others)
        self._routes = [
            (method, route, route.path_regex, route.endpoint)
            for route in routes
            if isinstance(route, APIRoute)
            for method in route.methods or ()
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._others:
            for method, route, path_regex, endpoint in self._routes:
                if method == scope["method"] and (match := path_regex.match(scope["path"])):
                    scope["path_params"] = match.groupdict()
                    scope["route"] = route  # as FastAPI does
                    try:
                        response = await endpoint(Request(scope, receive))
                    except ServiceError as error:
                        response = refusal_of(scope, error)
                    await response(scope, receive, send)
                    return
        await self._app(scope, receive, send)


async def body_of(request: Request) -> bytes:
    """The body of a raw route's request, which the request guard replays in one piece."""
    message = await request.receive()
    body: bytes = message.get("body", b"")
    return body


def describe(
    *,
    path: dict[str, str] | None = None,
    query: dict[str, dict[str, Any]] | None = None,
    header: dict[str, dict[str, Any]] | None = None,
    body: type[BaseModel] | dict[str, Any] | None = None,
    example: object = None,
) -> dict[str, Any]:
    """OpenAPI members of a raw route: its parameters, and its body as a model or a schema."""
    required = {"required": True, "schema": {"type": "string"}}
    parameters = [
        {"in": "path", "name": name, **required, "description": text}
        for name, text in (path or {}).items()
    ]
    for place, described in (("query", query), ("header", header)):
        parameters += [
            {"in": place, "name": name, **rest} for name, rest in (described or {}).items()
        ]
    extra: dict[str, Any] = {"parameters": parameters}
    if body is not None:
        schema = body if isinstance(body, dict) else reference(body)
        content = {"application/json": {"schema": schema, "example": example}}
        extra["requestBody"] = {"content": content}
    return extra


# Models that routes refer to by name: `app.py` adds their schemas to the document.
REFERENCED: list[type[BaseModel]] = []


def reference(model: type[BaseModel]) -> dict[str, str]:
    REFERENCED.append(model)
    return {"$ref": f"#/components/schemas/{model.__name__}"}
