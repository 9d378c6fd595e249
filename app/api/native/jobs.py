"""/jobs: sets of results with counts, an order of ends, and keys that live as long as they do."""

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from app.api.dependencies import PrincipalOf, ServicesOf, TeamOf, to_id
from app.api.disconnects import wait_for_job
from app.api.idempotency_header import REPLAYED_HEADER
from app.api.json_codec import json_response, parse
from app.api.native.jobs_schemas import (
    EndedRowRead,
    JobRead,
    JobRetryRead,
    KeyedRowRead,
    ended_row_to_wire,
    keyed_row_to_wire,
    retried_to_wire,
    to_new_job,
)
from app.api.pagination import After, Limit, last_of_full, page_response
from app.api.raw_routes import body_of, describe
from app.core.byte_budget import read_within
from app.core.errors import invalid_field
from app.core.fair_share import in_turns
from app.results.jobs.rows import EndState, JobState
from app.results.jobs.serialization import job_to_wire
from app.results.requests import MAX_METADATA_BYTES, JobCreate, JobKeys, JobRetry

router = APIRouter(tags=["jobs"])

_JOB_BYTES = MAX_METADATA_BYTES + 4_096
_EXAMPLE = {"name": "Summaries", "key": "summaries-2026-11", "total": 100_000}
_KEYS_EXAMPLE = {"keys": ["row-1", "row-2"]}
_RETRY_EXAMPLE = {"after": 0, "limit": 200}

Place = Annotated[
    int, Query(ge=0, lt=2**63, description="Place of the last row that the client has.")
]
Wait = Annotated[
    float,
    Query(ge=0, allow_inf_nan=False, description="Wait up to this many seconds for the job's end."),
]
JobLimit = Annotated[int, Query(ge=1, le=100, description="Most jobs of a page.")]


@router.post(
    "/jobs",
    status_code=201,
    response_model=JobRead,
    responses={200: {"model": JobRead, "description": "The job of this key."}},
    openapi_extra=describe(body=JobCreate, example=_EXAMPLE),
)
async def create_job(request: Request, services: ServicesOf, principal: PrincipalOf) -> Response:
    """Create a job; with a `key` that is known, return its job as it is."""
    body = await body_of(request)
    create = parse(JobCreate, body) if body else JobCreate()
    job, is_new = await services.jobs.create(to_new_job(principal, create, services.settings))
    headers = {"Location": f"/jobs/{job.id}"} | ({} if is_new else {REPLAYED_HEADER: "true"})
    return json_response(job_to_wire(job), 201 if is_new else 200, headers)


@router.get("/jobs", response_model=list[JobRead])
async def list_jobs(
    request: Request,
    services: ServicesOf,
    team: TeamOf,
    state: JobState | None = None,
    limit: JobLimit = 50,
    after: After = None,
) -> Response:
    """List jobs, newest first."""
    jobs, _ = await read_within(
        limit * _JOB_BYTES,
        lambda: services.jobs.list(team, state=state, after=after, limit=limit),
        lambda read: sum(len(job.metadata) for job in read),
    )
    items = [job_to_wire(job) for job in jobs]
    return await page_response(request, items, last_of_full(items, limit))


@router.get("/jobs/{job_id}", response_model=JobRead)
async def read_job(
    request: Request, job_id: str, services: ServicesOf, team: TeamOf, wait: Wait = 0.0
) -> Response:
    """Read a job with its counts, which are exact; with `wait`, when it has ended or the time is over."""
    identifier = to_id(job_id, "job")
    if wait > services.settings.max_wait_seconds:
        most = services.settings.max_wait_seconds
        raise invalid_field("wait", f"must be a number of seconds from 0 to {most:.0f}")
    if wait > 0:
        job = await wait_for_job(request, identifier, wait)
    else:
        job = await services.jobs.get(team, identifier)
    return json_response(job_to_wire(job))


@router.get("/jobs/{job_id}/results", response_model=list[EndedRowRead])
async def list_job_results(
    request: Request,
    job_id: str,
    services: ServicesOf,
    team: TeamOf,
    state: EndState | None = None,
    after: Place = 0,
    limit: Limit = 100,
    full: Annotated[bool, Query(description="Return the results, and not only their keys.")] = True,
) -> Response:
    """List ended rows in the order of their ends: from the last place on, each row once.

    A page ends by its bytes, too: `Link` has the next. An empty page: no further row has ended yet.
    """
    job = await services.jobs.get(team, to_id(job_id, "job"))
    if full:
        page = await services.job_results.page(team, job.id, state=state, after=after, limit=limit)
        rows, has_more = page.rows, page.following is not None
    else:
        rows = await services.job_results.keys(job.id, state=state, after=after, limit=limit)
        has_more = len(rows) == limit
    items = [ended_row_to_wire(services, row, full=full) async for row in in_turns(rows)]
    return await page_response(request, items, str(rows[-1].place) if has_more else None)


@router.post(
    "/jobs/{job_id}/rows",
    response_model=list[KeyedRowRead],
    openapi_extra=describe(body=JobKeys, example=_KEYS_EXAMPLE),
)
async def read_job_rows(
    request: Request, job_id: str, services: ServicesOf, team: TeamOf
) -> Response:
    """Read rows by their keys, in the order of the keys.

    The list ends by its bytes, too, but has at least one row: ask for the rest of the keys again.
    """
    job = await services.jobs.get(team, to_id(job_id, "job"))
    asked = parse(JobKeys, await body_of(request))
    rows = await services.job_results.by_keys(team, job.id, asked.keys)
    return json_response([keyed_row_to_wire(services, row) async for row in in_turns(rows)])


@router.post("/jobs/{job_id}/close", response_model=JobRead)
async def close_job(job_id: str, services: ServicesOf, team: TeamOf) -> Response:
    """Take no further rows; idempotent. The job ends with its last row."""
    return json_response(job_to_wire(await services.jobs.close(team, to_id(job_id, "job"))))


@router.post("/jobs/{job_id}/open", response_model=JobRead)
async def open_job(job_id: str, services: ServicesOf, team: TeamOf) -> Response:
    """Let a closed job take rows again that it lacks; idempotent. 409 for one that was cancelled."""
    return json_response(job_to_wire(await services.jobs.open(team, to_id(job_id, "job"))))


@router.post("/jobs/{job_id}/cancel", response_model=JobRead, responses={202: {"model": JobRead}})
async def cancel_job(job_id: str, services: ServicesOf, team: TeamOf) -> Response:
    """Close a job and cancel its pending rows; idempotent. 202 while rows are pending."""
    job = await services.jobs.cancel(team, to_id(job_id, "job"))
    return json_response(job_to_wire(job), 202 if job.pending else 200)


@router.post(
    "/jobs/{job_id}/retry",
    response_model=JobRetryRead,
    openapi_extra=describe(body=JobRetry, example=_RETRY_EXAMPLE),
)
async def retry_job(
    request: Request, job_id: str, services: ServicesOf, principal: PrincipalOf
) -> Response:
    """Send a batch of failed rows again, in one commit; repeat it with `following` as `after`.

    409 while the job's rows are being cancelled.
    """
    body = await body_of(request)
    retry = parse(JobRetry, body) if body else JobRetry()
    batch = await services.job_retries.retry(principal, to_id(job_id, "job"), retry)
    return json_response(retried_to_wire(batch))


@router.delete("/jobs/{job_id}", status_code=204)
async def delete_job(job_id: str, services: ServicesOf, team: TeamOf) -> Response:
    """Delete an ended job and its keys; its results stay. 409 before its end."""
    await services.jobs.delete(team, to_id(job_id, "job"))
    return Response(status_code=204)
