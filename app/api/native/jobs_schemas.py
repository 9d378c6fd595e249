"""Wire schemas of jobs."""

from datetime import datetime
from typing import Any, Literal
from uuid import UUID

from pydantic import BaseModel, Field

from app.api.container import Services
from app.api.native.schemas import ProblemRead, ResultRead, result_wire
from app.auth.principal import Principal
from app.core.ids import new_id
from app.core.settings import Settings
from app.results.drafts import to_json, validate
from app.results.jobs.retry import RetriedBatch
from app.results.jobs.rows import EndedRow, KeyedRow, NewJob
from app.results.requests import JobCreate, SendOptions


class JobCounts(BaseModel):
    """Rows of a job by state; `rows` is their sum."""

    rows: int
    pending: int
    completed: int
    failed: int


class JobUsage(BaseModel):
    """Tokens of ended rows, with those of results that were retried."""

    prompt_tokens: int
    completion_tokens: int


class JobRead(BaseModel):
    """A job: `open` until it is closed, `ended` once it is closed and all its rows have ended."""

    id: UUID
    name: str
    key: str | None
    state: Literal["open", "closed", "ended"]
    total: int | None = Field(description="Rows that its client expects.")
    priority: int
    deadline_seconds: float | None
    webhook_url: str | None
    metadata: dict[str, Any]
    counts: JobCounts
    errors: dict[str, int] = Field(
        description="Failed rows by error code; `deleted`: their results were deleted while pending."
    )
    last_place: int = Field(description="The last place in the order of ends.")
    estimated_seconds_left: float | None = Field(
        description="By the speed of its rows since they began, or since they were retried after all "
        "had ended; null if none is left, or it is too early."
    )
    usage: JobUsage
    created_at: datetime
    closed_at: datetime | None
    cancel_requested_at: datetime | None
    ended_at: datetime | None


class EndedRowRead(BaseModel):
    """A row that has ended."""

    place: int = Field(description="Its place in the order of ends.")
    key: str
    result_id: UUID
    state: Literal["completed", "failed"]
    result: ResultRead | None = Field(
        None, description="Only with `full`; null if the result has been deleted since."
    )


class KeyedRowRead(BaseModel):
    """The row of a key; all other members are null if the job has none."""

    key: str
    result_id: UUID | None
    state: Literal["pending", "completed", "failed"] | None
    place: int | None = Field(description="Its place in the order of ends, once it has ended.")
    result: ResultRead | None = Field(description="Null if it has been deleted since.")


class RefusedRowRead(BaseModel):
    key: str
    result_id: UUID
    error: ProblemRead


class JobRetryRead(BaseModel):
    """A batch of retries."""

    retried: int
    refused: list[RefusedRowRead] = Field(description="Failed rows that cannot be sent again.")
    following: int | None = Field(
        description="`after` of the next batch; null if there is no further failed row."
    )


def to_new_job(principal: Principal, create: JobCreate, settings: Settings) -> NewJob:
    """Raises InvalidRequestError for an option beyond a bound of the service or the token."""
    options = SendOptions(
        priority=create.priority,
        deadline_seconds=create.deadline_seconds,
        webhook_url=create.webhook_url,
    )
    validate(options, settings, max_priority=principal.max_priority, max_retain_seconds=None)
    return NewJob(
        id=new_id(),
        team_id=principal.team_id,
        name=create.name,
        key=create.key,
        total=create.total,
        priority=create.priority,
        deadline_seconds=create.deadline_seconds,
        webhook_url=create.webhook_url,
        metadata=to_json(create.metadata),
        max_rows=settings.max_job_rows,
    )


def ended_row_to_wire(services: Services, row: EndedRow, *, full: bool) -> dict[str, Any]:
    wire: dict[str, Any] = {
        "place": row.place,
        "key": row.key,
        "result_id": str(row.result_id),
        "state": row.state,
    }
    if full:
        wire["result"] = None if row.result is None else result_wire(services, row.result)
    return wire


def keyed_row_to_wire(services: Services, row: KeyedRow) -> dict[str, Any]:
    return {
        "key": row.key,
        "result_id": row.result_id and str(row.result_id),
        "state": row.state,
        "place": row.place,
        "result": None if row.result is None else result_wire(services, row.result),
    }


def retried_to_wire(batch: RetriedBatch) -> dict[str, Any]:
    refused = [
        {"key": one.key, "result_id": str(one.result_id), "error": one.error.to_problem()}
        for one in batch.refused
    ]
    return {"retried": batch.retried, "refused": refused, "following": batch.following}
