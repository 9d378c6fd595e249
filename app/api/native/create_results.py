"""/models/send and POST /results/: send prompts; respond at once, at the end, or with a stream."""

import contextlib
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar
from uuid import UUID

from fastapi import APIRouter, Request, Response
from pydantic_core import from_json

from app.api.container import Services
from app.api.dependencies import PrincipalOf, ServicesOf, principal_of, services_of, team_of, to_id
from app.api.disconnects import on_disconnect_of, wait_for_end
from app.api.idempotency_header import KEY_HEADER, REPLAYED_HEADER, idempotency_key
from app.api.json_codec import json_response, may_have_nul, parse, validate
from app.api.native.schemas import (
    MAX_BULK,
    ProblemRead,
    ReplayedRowRead,
    ResultRead,
    replayed_row_to_wire,
    result_wire,
)
from app.api.native.streams import event_frames
from app.api.raw_routes import body_of, describe, reference
from app.api.sse import MEDIA_TYPE, EventStreamResponse
from app.core.errors import (
    BodyTooLargeError,
    DatabaseUnavailableError,
    FieldError,
    InvalidRequestError,
    ServiceError,
    TooManyWaitersError,
    invalid_field,
)
from app.core.fair_share import in_turns
from app.core.ids import new_id
from app.core.settings import Settings
from app.results.contexts import plain_messages
from app.results.image_urls import refuse_urls
from app.results.replays import Replayed, ReplayedRow
from app.results.requests import ResultCreate, SendOptions
from app.results.reuse import Reused
from app.results.rows import ResultRow
from app.results.serialization import accepted_to_wire
from app.results.streams.result_reader import Position
from app.results.streams.subscribers import ResultSignal
from app.results.submission import Accepted, ItemOutcome, SubmissionOutcome

router = APIRouter(tags=["results"])
raw = APIRouter(tags=["results"])

Options = TypeVar("Options", bound=SendOptions)

_NO_OPTIONS = SendOptions()
_PREFER_WAIT = re.compile(rb"(?:^|[,;\s])wait\s*=\s*\"?(\d{1,6})\"?", re.IGNORECASE)
# Named without the weight 0, which excludes it.
_ACCEPTS_EVENTS = re.compile(
    rb"(?:^|,)\s*text/event-stream\s*(?=[,;]|$)(?!(?:;[^,]*)?;\s*q=0(?:\.0*)?\s*(?:[,;]|$))",
    re.IGNORECASE,
)

# The terminal result, or its events.
_ANSWERED: dict[str, Any] = {"model": ResultRead, "content": {MEDIA_TYPE: {}}}

# Sends a request under this result id; a replayed key returns another result.
Submission = Callable[[UUID], Awaitable[SubmissionOutcome]]

WISHES = {
    "Prefer": {
        "schema": {"type": "string", "pattern": r"wait=\d+", "example": "wait=30"},
        "description": "Wait up to this many seconds; 200 if the result is terminal by then.",
    },
    "Accept": {
        "schema": {"type": "string", "example": MEDIA_TYPE},
        "description": f"`{MEDIA_TYPE}`: respond with the events of /results/{{id}}/stream; the id "
        "is in `Location`.",
    },
    "X-On-Disconnect": {
        "schema": {"type": "string", "enum": ["continue", "cancel"], "default": "continue"},
        "description": "Cancel or continue the result if the client disconnects while it waits or reads.",
    },
}
_SEND_EXAMPLE = {"parameters": {"max_tokens": 40, "temperature": 0}, "deadline_seconds": 600}
_CREATE_EXAMPLE = {"model": "demo", "content": "def ", "parameters": {"max_tokens": 40}}


@dataclass(slots=True, frozen=True)
class _ResponsePreference:
    """The client's preferred form of response; the default is at once."""

    wait_seconds: float | None = None
    is_stream: bool = False
    is_cancelled_on_disconnect: bool = False

    @classmethod
    def of(cls, request: Request, settings: Settings) -> "_ResponsePreference":
        headers = dict(request.scope["headers"])
        wanted = _PREFER_WAIT.search(headers.get(b"prefer", b""))
        return cls(
            wait_seconds=min(float(wanted[1]), settings.max_wait_seconds) if wanted else None,
            is_stream=_ACCEPTS_EVENTS.search(headers.get(b"accept", b"")) is not None,
            is_cancelled_on_disconnect=on_disconnect_of(request, "continue") == "cancel",
        )


@raw.post(
    "/models/send/{model_name}/{context_id}",
    status_code=202,
    responses={202: {"model": ResultRead}, 200: _ANSWERED},
    openapi_extra=describe(
        path={"model_name": "A model's name.", "context_id": "A saved context's id."},
        header=WISHES | KEY_HEADER,
        body=SendOptions,
        example=_SEND_EXAMPLE,
    ),
)
async def send_context(request: Request) -> Response:
    """Send a saved prompt to a model. The response contains the id of the committed result."""
    body = await body_of(request)
    options = _with_key(request, parse(SendOptions, body) if body else _NO_OPTIONS)
    path = request.path_params
    services, principal = services_of(request), principal_of(request)
    context_id = to_id(path["context_id"], "context")
    return await send(
        request,
        services,
        lambda result_id: services.submissions.submit_context(
            principal, path["model_name"], context_id, options, result_id
        ),
    )


@raw.post(
    "/results/",
    status_code=202,
    responses={
        202: {"model": ResultRead | list[ResultRead | ReplayedRowRead | ProblemRead]},
        200: _ANSWERED,
    },
    openapi_extra=describe(
        header=WISHES | KEY_HEADER,
        body={
            "oneOf": [
                reference(ResultCreate),
                {"type": "array", "maxItems": MAX_BULK, "items": reference(ResultCreate)},
            ]
        },
        example=_CREATE_EXAMPLE,
    ),
)
async def create_results(request: Request) -> Response:
    """Save a prompt and send it in one call; a list of up to 1,000 is one commit.

    The response to a list is a list: each item is a Result, or a problem in its place; of a row that its
    job has already, its id and state.
    """
    body = await body_of(request)
    services, principal = services_of(request), principal_of(request)
    if body.lstrip()[:1] == b"[":
        if idempotency_key(request) is not None:
            raise invalid_field(
                "Idempotency-Key", "cannot apply to a list: give each item its own idempotency_key"
            )
        answers = await services.submissions.submit_all(principal, await _parse_list(body))
        answered = [_to_wire(services, answer) async for answer in in_turns(answers)]
        return json_response(answered, 202)
    create = _with_key(request, parse(ResultCreate, body))
    return await send(
        request,
        services,
        lambda result_id: services.submissions.submit(principal, create, result_id),
    )


@router.post(
    "/results/{result_id}/retry",
    status_code=202,
    response_model=ResultRead,
    responses={200: _ANSWERED},
    openapi_extra=describe(header=WISHES | KEY_HEADER),
)
async def retry_result(
    request: Request, result_id: str, services: ServicesOf, principal: PrincipalOf
) -> Response:
    """Send the request of an ended result again: a new result, linked by `retry_of`.

    409 while the first one is pending.
    """
    key = idempotency_key(request)
    retry_of = to_id(result_id, "result")
    return await send(
        request,
        services,
        lambda new_result_id: services.submissions.retry(principal, retry_of, key, new_result_id),
    )


async def send(request: Request, services: Services, submission: Submission) -> Response:
    """Submit, and respond as the client prefers: 202 with the result's location, 200 once terminal."""
    wish = _ResponsePreference.of(request, services.settings)
    result_id, team = new_id(), team_of(request)
    if wish.is_stream:
        services.hub.reserve_place(team)
        with services.hub.reading(team, result_id):  # in the reserved place: its end is expected
            answer = await submission(result_id)
        return _stream_response(services, team, wish, answer)
    seconds = wish.wait_seconds
    if seconds is None or services.hub.is_full_for(team):
        return _response(services, await submission(result_id))
    with services.hub.expecting(team, result_id) as woken:
        answer = await submission(result_id)
        row = await _wait(request, services, wish, answer, woken)
    headers = {"Preference-Applied": f"wait={seconds:.0f}"} if row else {}
    return _response(services, answer, row, headers)


async def _wait(
    request: Request,
    services: Services,
    wish: _ResponsePreference,
    answer: SubmissionOutcome,
    woken: ResultSignal,
) -> ResultRow | None:
    """The result after the client's time; None if waiting was not possible."""
    result_id, seconds = answer.result_id, wish.wait_seconds or 0.0
    # A replayed result has another id than the one that is expected.
    expected = woken if isinstance(answer, Accepted) else None
    # The result is committed: an error while waiting must not hide its id.
    with contextlib.suppress(TooManyWaitersError, DatabaseUnavailableError):
        row, is_disconnected = await wait_for_end(request, result_id, seconds, expected)
        if is_disconnected and wish.is_cancelled_on_disconnect:
            await services.queue.cancel(row.team_id, id=result_id)
        return row
    return None


def _stream_response(
    services: Services, team: str, wish: _ResponsePreference, answer: SubmissionOutcome
) -> Response:
    result_id = answer.result_id

    async def cancel() -> None:
        with contextlib.suppress(DatabaseUnavailableError):  # the client is gone
            await services.queue.cancel(team, id=result_id)

    return EventStreamResponse(
        event_frames(services, team, result_id, Position()),
        _headers(answer),
        on_disconnect=cancel if wish.is_cancelled_on_disconnect else None,
    )


def _response(
    services: Services,
    answer: SubmissionOutcome,
    row: ResultRow | None = None,
    headers: dict[str, str] | None = None,
) -> Response:
    wire = result_wire(services, row) if row else _to_wire(services, answer)
    headers = _headers(answer) | (headers or {})
    if wire["state"] != "pending":
        return json_response(wire, 200, headers)
    return json_response(wire, 202, headers | {"Retry-After": "1"})


def _headers(answer: SubmissionOutcome) -> dict[str, str]:
    headers = {"Location": f"/results/{answer.result_id}"}
    if isinstance(answer, Replayed):
        headers[REPLAYED_HEADER] = "true"
    return headers


def _with_key(request: Request, options: Options) -> Options:
    key = idempotency_key(request, options.idempotency_key)
    if key == options.idempotency_key:
        return options
    if options.job_key is not None:
        raise invalid_field("Idempotency-Key", "cannot apply to a row of a job: it has its job_key")
    return options.model_copy(update={"idempotency_key": key})


async def _parse_list(body: bytes) -> list[ResultCreate | ServiceError]:
    """Validate each item separately: a wrong item does not reject the others."""
    try:
        items = from_json(body)
    except ValueError as error:
        raise InvalidRequestError(
            f"The body is not valid JSON: {error}.", [FieldError("body", str(error))]
        ) from error
    if not items:
        raise InvalidRequestError("The list is empty.", [FieldError("body", "is an empty list")])
    if len(items) > MAX_BULK:
        raise BodyTooLargeError(f"A list holds at most {MAX_BULK} items; this one {len(items)}.")
    has_nul = may_have_nul(body)
    return [_read_item(item, has_nul=has_nul) async for item in in_turns(items)]


def _read_item(item: object, *, has_nul: bool) -> ResultCreate | ServiceError:
    try:
        create = validate(ResultCreate, item, has_nul=has_nul)
        if create.messages is not None:
            refuse_urls(plain_messages(create.messages), "a list")
    except InvalidRequestError as error:
        return error
    return create


def _to_wire(services: Services, answer: ItemOutcome) -> dict[str, Any]:
    if isinstance(answer, ServiceError):
        return answer.to_problem()
    if isinstance(answer, ReplayedRow):
        return replayed_row_to_wire(answer)
    if isinstance(answer, Replayed | Reused):
        return result_wire(services, answer.row)
    return accepted_to_wire(answer.result, model_ready=answer.model_ready)
