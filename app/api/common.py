"""Shared parts of the handlers: services, principal, ids from paths, pages, raw routes."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Annotated, Any
from uuid import UUID

from fastapi import Depends, Query
from fastapi.routing import APIRoute
from pydantic import BaseModel, TypeAdapter
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from app.api.container import Services
from app.api.errors.error_responses import refusal
from app.api.json_codec import json_response
from app.api.sse import until_disconnect
from app.auth.principal import Principal
from app.core.errors import FieldError, InvalidRequestError, NotFoundError, ServiceError
from app.queue.enqueue import OnDisconnect
from app.results.requests import Key
from app.results.rows import ResultRow
from app.results.serialization import result_to_wire

Endpoint = Callable[[Request], Awaitable[Response]]

MAX_PAGE = 1000
Limit = Annotated[int, Query(ge=1, le=MAX_PAGE, description="Most rows of a page.")]
After = Annotated[
    UUID | None, Query(description="Id of the last row of the previous page (keyset paging).")
]
Name = Annotated[str | None, Query(max_length=256, pattern=r"^[^\x00]*$")]
Force = Annotated[bool, Query(description="Delete pending results too, after stopping them.")]


_KEY = TypeAdapter(Key)
REPLAYED_HEADER = "Idempotent-Replayed"
KEY_HEADER = {
    "Idempotency-Key": {
        "schema": {"type": "string", "minLength": 1, "maxLength": 255},
        "description": "A repeated request with the same key returns the first result and the header "
        "`Idempotent-Replayed: true`; a different request returns 409.",
    }
}


def services_of(request: Request) -> Services:
    services: Services = request.app.state.services
    return services


def principal_of(request: Request) -> Principal:
    """The principal that the authentication middleware found."""
    principal: Principal = request.scope["principal"]
    return principal


def team_of(request: Request) -> str:
    """The team whose rows the request may read."""
    return principal_of(request).team_id


ServicesOf = Annotated[Services, Depends(services_of)]
PrincipalOf = Annotated[Principal, Depends(principal_of)]
TeamOf = Annotated[str, Depends(team_of)]


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
            (method, route.path_regex, route.endpoint)
            for route in routes
            if isinstance(route, APIRoute)
            for method in route.methods or ()
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._others:
            for method, path_regex, endpoint in self._routes:
                if method == scope["method"] and (match := path_regex.match(scope["path"])):
                    scope["path_params"] = match.groupdict()
                    response = await _respond(endpoint, Request(scope, receive))
                    await response(scope, receive, send)
                    return
        await self._app(scope, receive, send)


async def _respond(endpoint: Endpoint, request: Request) -> Response:
    try:
        return await endpoint(request)
    except ServiceError as error:
        return refusal(request.scope["path"], error)


@contextlib.contextmanager
def watching(request: Request, *woken: asyncio.Event) -> Iterator[Callable[[], bool]]:
    """Set the events when the client disconnects; yields a function that returns whether it has."""
    leaving = asyncio.create_task(until_disconnect(request.receive))

    def wake(_: object) -> None:
        for event in woken:
            event.set()

    leaving.add_done_callback(wake)
    try:
        yield leaving.done
    finally:
        leaving.cancel()


def on_disconnect_of(request: Request, default: OnDisconnect) -> OnDisconnect:
    """The value of X-On-Disconnect. Raises InvalidRequestError."""
    headers = dict(request.scope["headers"])
    given = headers.get(b"x-on-disconnect", default.encode()).strip().lower()
    if given == b"continue":
        return "continue"
    if given == b"cancel":
        return "cancel"
    message = "must be `continue` or `cancel`"
    raise InvalidRequestError(
        f"X-On-Disconnect: {message}.", [FieldError("X-On-Disconnect", message)]
    )


async def body_of(request: Request) -> bytes:
    """The body of a raw route's request, which the request guard replays in one piece."""
    message = await request.receive()
    body: bytes = message.get("body", b"")
    return body


def idempotency_key(request: Request, in_body: str | None = None) -> str | None:
    """The key of a request, from its header or its body.

    Raises InvalidRequestError for an invalid header, and for one that differs from the body's key.
    """
    given = {value for name, value in request.scope["headers"] if name == b"idempotency-key"}
    if not given:
        return in_body
    try:
        (key,) = (_KEY.validate_python(value.decode()) for value in given)
    except ValueError as error:
        message = "must be one key of 1 to 255 characters, none of them a control character"
        raise _bad_key(message) from error
    if in_body not in (None, key):
        raise _bad_key("differs from the body's idempotency_key; send one of them")
    return key


def _bad_key(message: str) -> InvalidRequestError:
    name = "Idempotency-Key"
    return InvalidRequestError(f"{name}: {message}.", [FieldError(name, message)])


def describe(
    *,
    path: dict[str, str] | None = None,
    query: dict[str, dict[str, Any]] | None = None,
    header: dict[str, dict[str, Any]] | None = None,
    body: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """OpenAPI members of a raw route: its parameters and body."""
    parameters = [
        {
            "in": "path",
            "name": name,
            "required": True,
            "schema": {"type": "string"},
            "description": text,
        }
        for name, text in (path or {}).items()
    ]
    for place, described in (("query", query), ("header", header)):
        parameters += [
            {"in": place, "name": name, **rest} for name, rest in (described or {}).items()
        ]
    extra: dict[str, Any] = {"parameters": parameters}
    if body is not None:
        extra["requestBody"] = {"content": {"application/json": body}}
    return extra


def reference(model: type[BaseModel]) -> dict[str, str]:
    """A reference to a model's schema; `app.py` adds the schemas that only raw routes use."""
    return {"$ref": f"#/components/schemas/{model.__name__}"}


def to_id(text: str, noun: str) -> UUID:
    """An id from a path. Raises NotFoundError for an invalid one."""
    try:
        return UUID(text)
    except ValueError:
        raise NotFoundError(f"There is no {noun} {text[:64]!r}.") from None


def result_wire(services: Services, row: ResultRow) -> dict[str, Any]:
    return result_to_wire(row, model_ready=services.registry.is_ready(row.model_name))


def page_response(request: Request, items: Sequence[dict[str, Any]], limit: int) -> Response:
    """A page as JSON; a full page links to the next (RFC 8288)."""
    headers = {}
    if len(items) == limit:
        following = request.url.include_query_params(after=items[-1]["id"])
        target = f"{following.path}?{following.query}"
        headers["Link"] = f'<{target}>; rel="next"'
    return json_response(items, headers=headers)
