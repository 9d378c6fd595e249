"""Attributions of a text, in infini-gram API's format, and of a result, kept with it.

https://github.com/allenai/infinigram-api. Each is a result that the attribution workers of its index
run: clients can poll, stream and cancel it, and a webhook reports its end.
"""

import asyncio
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Query, Request, Response

from app.api.container import Services
from app.api.dependencies import PrincipalOf, ServicesOf, TeamOf, principal_of, services_of, to_id
from app.api.disconnects import ON_DISCONNECT_HEADER, on_disconnect_of, wait_for_end
from app.api.group_responses import RESULT_ID_HEADER
from app.api.idempotency_header import KEY_HEADER, REPLAYED_HEADER, idempotency_key
from app.api.json_codec import JSON, json_response, parse
from app.api.native.attributions_schemas import AttributionRead
from app.api.native.create_results import WISHES, send
from app.api.native.schemas import ResultRead, result_wire
from app.api.raw_routes import body_of, describe
from app.api.sse import MEDIA_TYPE
from app.core.errors import (
    ConflictError,
    EngineError,
    FailureCode,
    NotFoundError,
    OverloadedError,
    ServiceError,
    StoppingError,
    invalid_field,
)
from app.core.ids import new_id
from app.core.queue_names import queue_of
from app.infini_gram.attribution import AttributionParameters, AttributionRequest
from app.queue.idempotency import NewKey, hash_request
from app.results.attributions import AttributionDraft, cache_key
from app.results.replays import Replayed
from app.results.rows import ResultRow, erased, failure_of
from app.results.submission import SubmissionOutcome

router = APIRouter(tags=["infini-gram"])
raw = APIRouter(tags=["infini-gram"])

_CLIENT_LEFT = 499  # for the log alone
_MARGIN_SECONDS = 10.0

# Not required by FastAPI: an unknown result is reported first.
IndexName = Annotated[
    str | None, Query(max_length=128, pattern=r"^[^\x00]*$", description="An index's name.")
]


@raw.post(
    "/{index}/attribution",
    responses={200: {"model": AttributionRead}},
    openapi_extra=describe(
        path={"index": "An index's name."},
        header=KEY_HEADER | ON_DISCONNECT_HEADER,
        body=AttributionRequest,
        example={"response": "return None"},
    ),
)
async def attribute_text(request: Request) -> Response:
    """Find the parts of a text that the corpus contains, and their documents; responds when done.

    A repeated request finds the same response for an hour, and for twelve hours after each repetition.
    503 after the time limit.
    """
    services = services_of(request)
    index = request.path_params["index"]
    wanted = parse(AttributionRequest, await body_of(request))
    version = services.indexes.engine(index).version
    parameters = _to_stored(wanted)
    content = {"index": index, "text": wanted.response, **parameters}
    given = idempotency_key(request)
    key = _key(services, given, content, services.settings.attribution_cache_seconds)
    is_cancelled = on_disconnect_of(request, "continue" if given else "cancel") == "cancel"
    outcome = await _attribute(
        request, index, wanted.response, parameters, key, None if given else version
    )
    row = outcome.row
    headers = {RESULT_ID_HEADER: str(row.id)}
    if row.state == "pending":
        if outcome.is_new and is_cancelled:
            await services.groups.cancel(row.team_id, [row.id])
        if outcome.is_disconnected:
            return Response(status_code=_CLIENT_LEFT)
        raise _too_long(services, row.id, headers)
    if not outcome.is_new:
        headers[REPLAYED_HEADER] = "true"
    if row.state == "failed":
        raise _failure(row, headers)
    if row.erased_at is not None:
        raise erased(row)
    if not outcome.is_new and given is None:
        seconds = services.settings.attribution_cache_hit_seconds
        await services.keys.keep(row.team_id, key.key, seconds)
    return Response(row.output, media_type=JSON, headers=headers)


@dataclass(slots=True, frozen=True)
class _Outcome:
    """An attribution at its end, or pending after the time limit or the client's disconnect."""

    row: ResultRow
    is_new: bool
    is_disconnected: bool


async def _attribute(
    request: Request,
    index: str,
    text: str,
    parameters: Mapping[str, Any],
    key: NewKey,
    version: int | None,
) -> _Outcome:
    """Submit an attribution, or find the one of the same key, and wait.

    With a `version` the key is the cache's: a cached attribution that failed, as when another client
    cancelled it, is replaced.
    """
    services, principal = services_of(request), principal_of(request)
    settings, clock = services.settings, asyncio.get_running_loop().time
    ends = clock() + settings.attribution_seconds
    deadline = settings.default_deadline_seconds
    if version is not None:  # no client looks for it later if this process dies
        deadline = settings.attribution_seconds + _MARGIN_SECONDS
    while True:
        draft = AttributionDraft(new_id(), index, text, parameters, deadline)
        with services.hub.expecting(principal.team_id, draft.id) as woken:
            answer = await services.submissions.submit_attribution(principal, draft, key, version)
            is_new = not isinstance(answer, Replayed)
            seconds = max(0.0, ends - clock())
            row, is_disconnected = await wait_for_end(
                request, answer.result_id, seconds, woken if is_new else None
            )
        if version is None or is_new or row.state != "failed":
            return _Outcome(row, is_new, is_disconnected)


@router.post(
    "/results/{result_id}/attribution",
    status_code=202,
    response_model=ResultRead,
    responses={200: {"model": ResultRead, "content": {MEDIA_TYPE: {}}}},
    openapi_extra=describe(
        header=WISHES | KEY_HEADER, body=AttributionParameters, example={"minimumSpanLength": 3}
    ),
)
async def attribute_result(
    request: Request,
    result_id: str,
    services: ServicesOf,
    principal: PrincipalOf,
    index: IndexName = None,
) -> Response:
    """Attribute the text of an ended result: a new result, which names it in `source_id`.

    A repeated request finds the existing attribution. 409 until the text is complete.
    """
    source = await services.results.request(principal.team_id, to_id(result_id, "result"))
    name = _named(services, index)
    body = await request.body()
    parameters = _to_stored(parse(AttributionParameters, body)) if body else {}
    if source.erased_at is not None:
        raise erased(source)
    if source.kind != "generation":
        raise ConflictError("The result is an attribution itself.")
    if source.state == "pending":
        raise ConflictError("The result is pending. Wait for its end, or send with `attribute`.")
    if not source.output:
        raise ConflictError("The result has no text to attribute.")
    version = services.indexes.engine(name).version
    content = {"index": name, "source": str(source.id), **parameters}
    given = idempotency_key(request)
    key = _key(services, given, content, services.settings.idempotency_seconds)

    def submission(new_result_id: UUID) -> Awaitable[SubmissionOutcome]:
        draft = AttributionDraft(
            new_result_id, name, source.output or "", parameters, source=source
        )
        return services.submissions.submit_attribution(
            principal, draft, key, None if given else version
        )

    return await send(request, services, submission)


@router.get("/results/{result_id}/attribution", response_model=ResultRead)
async def read_attribution(
    result_id: str, services: ServicesOf, team: TeamOf, index: IndexName = None
) -> Response:
    """The newest attribution of a result by an index."""
    source = await services.results.get(team, to_id(result_id, "result"))
    name = _named(services, index)
    row = await services.results.newest_about(team, source.id, queue_of(name))
    if row is None:
        raise NotFoundError(f"There is no attribution of result {source.id} by index {name!r}.")
    return json_response(result_wire(services, row))


def _named(services: Services, index: str | None) -> str:
    if index is not None:
        return index
    raise invalid_field(
        "index", f"must be given: one of {', '.join(services.indexes.names) or 'none'}"
    )


def _key(
    services: Services, given: str | None, content: Mapping[str, Any], seconds: float
) -> NewKey:
    if given is not None:
        return services.keys.new(given, hash_request(content))
    return cache_key(content, seconds)


def _to_stored(parameters: AttributionParameters) -> dict[str, Any]:
    return parameters.model_dump(by_alias=True, exclude_defaults=True, exclude={"response"})


def _too_long(services: Services, result_id: UUID, headers: dict[str, str]) -> ServiceError:
    if services.hub.is_closing:
        return StoppingError(
            f"This process of the service is stopping. Send the request again; its result is "
            f"{result_id}.",
            headers=headers | {"Retry-After": "2"},
        )
    return OverloadedError(
        f"The attribution took longer than {services.settings.attribution_seconds:.0f} s "
        "(LLM_ATTRIBUTION_SECONDS). Try again later, or send it with an Idempotency-Key: then it "
        "goes on, and the same request finds it.",
        headers=headers | {"Retry-After": "10"},
    )


def _failure(row: ResultRow, headers: dict[str, str]) -> ServiceError:
    error: ServiceError = failure_of(row)
    if row.error_code == FailureCode.INFINI_GRAM_ERROR:  # under infini-gram API's name
        error = EngineError(error.detail)
    error.headers.update(headers)
    return error
