"""Response schemas of the native API, for the OpenAPI document."""

from datetime import datetime
from typing import Any, Literal
from uuid import UUID

from pydantic import BaseModel, Field

from app.api.container import Services
from app.results.replays import ReplayedRow
from app.results.rows import ResultRow
from app.results.serialization import result_to_wire

MAX_BULK = 1000


class ContextRead(BaseModel):
    id: UUID
    content: str | None
    messages: list[dict[str, Any]] | None
    metadata: dict[str, Any]
    created_at: datetime
    updated_at: datetime
    erased_at: datetime | None = Field(
        None,
        description="Only for an erased prompt (`store: false`, or after its retention): time of erasure.",
    )


class ErrorRead(BaseModel):
    code: str
    message: str
    retryable: bool


class UsageRead(BaseModel):
    """Tokens, counted by the engine; null if it did not count them."""

    prompt_tokens: int | None
    completion_tokens: int | None


class FollowingRead(BaseModel):
    """Attribution requested with a result; a result too, once the text is completed."""

    index: str
    id: UUID | None = Field(description="Its id, for /results/{id}; null until then.")


class ResultRead(BaseModel):
    """A result: `pending`, then `completed` or `failed`, and immutable from then on."""

    id: UUID
    kind: Literal["generation", "attribution", "embedding", "score"]
    context_id: UUID
    model_name: str
    model_version: int | None
    model_ready: bool
    state: Literal["pending", "completed", "failed"]
    result: str | dict[str, Any] | None = Field(
        description="The generated text, without the prompt; for an attribution, the response of "
        "/{index}/attribution; for an embedding `{embedding: [...]}`, for a score `{score: ...}`, with "
        "several documents `{scores: [...]}` (all in lists only with `full`). Null once it is erased."
    )
    error: ErrorRead | None
    finish_reason: Literal["stop", "length", "error", "cancelled"] | None
    parameters: dict[str, Any]
    usage: UsageRead | None
    attempt: int
    continued: int = Field(
        description="Attempts that continued the text of a lost one (docs/continuation.md)."
    )
    cancel_requested_at: datetime | None
    created_at: datetime
    updated_at: datetime
    started_at: datetime | None
    first_token_at: datetime | None
    finished_at: datetime | None
    metadata: dict[str, Any]
    retry_of: UUID | None = Field(description="The result that this one is a retry of.")
    reused: Literal[True] | None = Field(
        None, description="Only for a result that has the text of an equal one (docs/reuse.md)."
    )
    reused_from: UUID | None = Field(
        None, description="Only then: that result; it may have been deleted since."
    )
    source_id: UUID | None = Field(
        None, description="Only for a result's attribution: the result whose text it attributes."
    )
    attribution: FollowingRead | None = Field(None, description="Only if requested.")
    queue_position: int | Literal["1000+"] | None = Field(
        description="While pending, at `GET /results/{id}`: 1 runs next, 0 is running; null "
        "if unknown."
    )
    estimated_wait_seconds: float | None = Field(
        description="Until it runs, from the queue before it and the throughput of the last minute; "
        "null if unknown."
    )
    logprobs: list[Any] | None = Field(
        None, description="Only if requested; in lists only with `full`."
    )
    prompt_logprobs: list[Any] | None = Field(
        None,
        description="Only if requested: an item per token of the prompt, its own entry first; null for "
        "the first token (docs/scoring.md). In lists only with `full`.",
    )
    erased_at: datetime | None = Field(
        None, description="Only for a result that is not stored: time of erasure of its texts."
    )
    truncated: bool = Field(
        False,
        description="Only in lists without `full`, where true: `result` is the first 1,000 characters of "
        "the text, or null for another kind.",
    )
    prompt_start: str | None = Field(
        None,
        description="Only in lists with `prompts`: the first 200 characters of the text, or of the "
        "last message; null for a long chat, and once it is erased.",
    )


class ReplayedRowRead(BaseModel):
    """A row that its job has already, in the response to a list; `/jobs/{id}/results` has its result."""

    id: UUID
    state: Literal["pending", "completed", "failed"]
    job_id: UUID
    job_key: str


class ExportRead(ResultRead):
    """A line of an export: a result and its prompt."""

    content: str | None = Field(description="The prompt; null for messages, and once it is erased.")
    messages: list[dict[str, Any]] | None = Field(
        description="The prompt's messages; null for a text, and once they are erased."
    )


class AttemptRead(BaseModel):
    attempt: int
    worker_id: UUID | None
    started_at: datetime | None
    ended_at: datetime | None
    counted: bool = Field(description="Whether it counts towards the attempts allowed.")
    continued_from: int | None = Field(
        description="Length in code points of the text that it continued; null if it started from the "
        "prompt."
    )
    error: dict[str, str] | None


class TicketRead(BaseModel):
    """A stream ticket; only this response contains it."""

    ticket: str
    expires_at: datetime


class ModelRead(BaseModel):
    """A model that Triton serves, or served before."""

    name: str
    version: int | None
    ready: bool
    reason: str | None = Field(description="Triton's message while it is not ready.")
    chat: bool = Field(description="Whether `messages` are accepted.")
    adapters: list[str] = Field(
        description="LoRA adapters that the team may use, as `name:adapter` (docs/lora.md)."
    )
    max_model_len: int | None = Field(description="Prompt plus output, in tokens; null: unknown.")
    default_parameters: dict[str, float] | None = Field(
        description="Sampling parameters where a request leaves them open, by the model's "
        "generation_config.json (docs/sampling.md); null: unknown."
    )
    queued: int
    running: int
    tokens_per_second: float


class FieldProblem(BaseModel):
    field: str
    message: str


class ProblemRead(BaseModel):
    """An error (RFC 9457)."""

    type: str
    title: str
    status: int
    detail: str = Field(description="For people: what to change.")
    code: str = Field(description="For programs: stable, listed in docs/errors.md.")
    errors: list[FieldProblem] = Field(default_factory=list)


def replayed_row_to_wire(replayed: ReplayedRow) -> dict[str, Any]:
    return {
        "id": str(replayed.result_id),
        "state": replayed.state,
        "job_id": str(replayed.row.job_id),
        "job_key": replayed.row.key,
    }


def result_wire(services: Services, row: ResultRow) -> dict[str, Any]:
    return result_to_wire(row, model_ready=services.registry.is_ready(row.model_name))
