"""/results/{id}/stream: a result's text as resumable events; tickets for browsers."""

import contextlib
from collections.abc import AsyncGenerator
from typing import Any
from uuid import UUID

import orjson
from fastapi import APIRouter, Request, Response

from app.api.container import Services
from app.api.dependencies import ServicesOf, TeamOf, services_of, team_of, to_id
from app.api.json_codec import json_response
from app.api.native.schemas import TicketRead, result_wire
from app.api.raw_routes import describe
from app.api.sse import KEEP_ALIVE, MEDIA_TYPE, EventStreamResponse, encode_event
from app.core.byte_budget import charge_to, release
from app.core.errors import invalid_field
from app.core.fair_share import move_to
from app.core.ids import seconds_since
from app.results.streams.result_reader import (
    AttemptStarted,
    Ended,
    KeepAlive,
    Position,
    ResultReader,
    TextDelta,
)

router = APIRouter(tags=["streams"])
raw = APIRouter(tags=["streams"])

_POSITION = {"type": "string", "pattern": r"^\d+:\d+$", "example": "1:120"}


@raw.get(
    "/results/{result_id}/stream",
    responses={
        200: {"content": {MEDIA_TYPE: {}}, "description": "Events."},
        204: {"description": "The client has received the end."},
    },
    openapi_extra=describe(
        path={"result_id": "The result's id."},
        query={
            "after": {"schema": _POSITION, "description": "The id of the last received event."},
            "ticket": {
                "schema": {"type": "string"},
                "description": "A stream ticket, for clients that cannot send headers.",
            },
        },
        header={
            "Last-Event-ID": {
                "schema": _POSITION,
                "description": "As `after`, which it overrides; sent by browsers that reconnect.",
            }
        },
    ),
)
async def stream_result(request: Request) -> Response:
    """Stream a result's text as server-sent events, from the beginning or from `after`.

    Events: `attempt` {attempt, age}, whose text replaces that of earlier attempts, except for the first
    `continued_from` code points if the event has this member (`age`: seconds since the result was
    accepted); `delta` {text, offset} and, if known, the attempt's `completion_tokens` so far; and at the
    end `completed` or `failed` with the Result. Offsets are code points.
    """
    services = services_of(request)
    result_id = to_id(request.path_params["result_id"], "result")
    position = _position_of(request)
    team = team_of(request)
    ticket = request.query_params.get("ticket")
    if ticket is not None:
        team = await services.tickets.redeem(ticket, result_id)
        charge_to(team)
        move_to(team)
    row, amount = await services.results.get_charged(team, result_id)
    if position.attempt > row.attempt:
        raise invalid_field(
            "after", f"there is no attempt {position.attempt} yet; the current one is {row.attempt}"
        )
    if row.state != "pending" and position == Position.of_end(row):
        return Response(status_code=204)
    services.hub.reserve_place(team)
    release(amount)  # its events are read again
    return EventStreamResponse(event_frames(services, team, result_id, position))


@router.post("/results/{result_id}/stream-ticket", status_code=201, response_model=TicketRead)
async def issue_ticket(result_id: str, services: ServicesOf, team: TeamOf) -> Response:
    """Issue a ticket that opens this result's stream once, within a minute: `?ticket=`."""
    identifier = to_id(result_id, "result")
    await services.results.get(team, identifier)
    ticket = await services.tickets.issue(team, identifier)
    return json_response({"ticket": ticket.text, "expires_at": ticket.expires_at}, 201)


async def event_frames(
    services: Services, team_id: str, result_id: UUID, position: Position
) -> AsyncGenerator[bytes, None]:
    reader = ResultReader(
        services.hub,
        services.results,
        team_id,
        result_id,
        position,
        services.settings.keep_alive_seconds,
        continues=True,
    )
    is_first = True
    async with contextlib.aclosing(reader.events()) as events:
        async for event in events:
            if isinstance(event, KeepAlive):
                yield KEEP_ALIVE
            else:
                yield _encode(services, result_id, event, retry=is_first)
                is_first = False


def _encode(
    services: Services, result_id: UUID, event: AttemptStarted | TextDelta | Ended, *, retry: bool
) -> bytes:
    data: dict[str, Any]
    if isinstance(event, TextDelta):
        begins = event.position.offset - len(event.text)
        name, data = "delta", {"text": event.text, "offset": begins}
        if event.completion_tokens is not None:
            data["completion_tokens"] = event.completion_tokens
    elif isinstance(event, AttemptStarted):
        age = round(seconds_since(result_id), 3)
        name, data = "attempt", {"attempt": event.position.attempt, "age": age}
        if event.continued_from is not None:
            data["continued_from"] = event.continued_from
    else:
        name, data = event.row.state, result_wire(services, event.row)
    return encode_event(name, str(event.position), orjson.dumps(data), retry=retry)


def _position_of(request: Request) -> Position:
    given = request.headers.get("last-event-id") or request.query_params.get("after")
    field = "Last-Event-ID" if request.headers.get("last-event-id") else "after"
    return Position.parse(given, field) if given else Position()
