"""The native API's responses, as the OpenAPI document describes them."""

from datetime import datetime
from typing import Any, Literal
from uuid import UUID

from pydantic import BaseModel, Field

MAX_BULK = 1000


class ContextRead(BaseModel):
    """A saved prompt."""

    id: UUID
    content: str | None
    messages: list[dict[str, Any]] | None
    metadata: dict[str, Any]
    created_at: datetime
    updated_at: datetime
    erased_at: datetime | None = Field(
        None,
        description="Only of a prompt that is gone (`store: false`, or its time is over): since when.",
    )


class ErrorRead(BaseModel):
    """Why a result failed."""

    code: str
    message: str
    retryable: bool


class UsageRead(BaseModel):
    """Tokens as the engine counted them; null where it told none."""

    prompt_tokens: int | None
    completion_tokens: int | None


class FollowingRead(BaseModel):
    """The attribution that was asked for with a result; a result too, once the text is completed."""

    index: str
    id: UUID | None = Field(description="Where to read it, as /results/{id}; null until then.")


class ResultRead(BaseModel):
    """A result: `pending`, then `completed` or `failed`, and unchanged from then on."""

    id: UUID
    kind: Literal["generation", "attribution"]
    context_id: UUID
    model_name: str
    model_version: int | None
    model_ready: bool
    state: Literal["pending", "completed", "failed"]
    result: str | dict[str, Any] | None = Field(
        description="The generated text, without the prompt; of an attribution, the whole answer of "
        "/{index}/attribution (in lists only with `full`). Null once it is erased."
    )
    error: ErrorRead | None
    finish_reason: Literal["stop", "length", "error", "cancelled"] | None
    parameters: dict[str, Any]
    usage: UsageRead | None
    attempt: int
    continued: int = Field(
        description="How often an attempt continued the text of a lost one (docs/continuation.md)."
    )
    cancel_requested_at: datetime | None
    created_at: datetime
    updated_at: datetime
    started_at: datetime | None
    first_token_at: datetime | None
    finished_at: datetime | None
    metadata: dict[str, Any]
    retry_of: UUID | None = Field(description="The result that this one is a retry of.")
    source_id: UUID | None = Field(
        None, description="Only of a result's attribution: the result whose text it is about."
    )
    attribution: FollowingRead | None = Field(None, description="Only when asked for.")
    queue_position: int | Literal["1000+"] | None = Field(
        description="While pending, at `GET /results/{id}`: 1 is the next to be run, 0 is running; "
        "null where unknown."
    )
    estimated_wait_seconds: float | None = Field(
        description="Until it runs, by the queue before it and the throughput of the last minute; "
        "null where unknown."
    )
    logprobs: list[Any] | None = Field(
        None, description="Only when asked for; in lists only with `full`."
    )
    erased_at: datetime | None = Field(
        None,
        description="Only of a result that was not to be stored: since when its texts are gone.",
    )
    prompt_start: str | None = Field(
        None,
        description="Only in lists with `prompts`: the first 200 characters of the text, or of the "
        "last message; null of a long chat, and once it is erased.",
    )


class ExportRead(ResultRead):
    """A line of an export: a result, and the prompt that it was sent with."""

    content: str | None = Field(description="The prompt; null of messages, and once it is erased.")
    messages: list[dict[str, Any]] | None = Field(
        description="The prompt's messages; null of a plain one, and once they are erased."
    )


class AttemptRead(BaseModel):
    """One attempt of a result: when, where and how it ended."""

    attempt: int
    worker_id: UUID | None
    started_at: datetime | None
    ended_at: datetime | None
    counted: bool = Field(description="Whether it counts towards the attempts allowed.")
    continued_from: int | None = Field(
        description="The length in code points of the text that it was to continue; null where it "
        "began anew."
    )
    error: dict[str, str] | None


class TicketRead(BaseModel):
    """A stream ticket; it is told only now."""

    ticket: str
    expires_at: datetime


class ModelRead(BaseModel):
    """A model that Triton serves, or served before."""

    name: str
    version: int | None
    ready: bool
    reason: str | None = Field(description="Triton's words when it is not ready.")
    chat: bool = Field(description="Whether `messages` are accepted.")
    max_model_len: int | None = Field(description="Prompt plus output, in tokens; null: unknown.")
    queued: int
    running: int
    tokens_per_second: float


class FieldProblem(BaseModel):
    """One wrong field of a request."""

    field: str
    message: str


class ProblemRead(BaseModel):
    """Why a request was not answered as asked (RFC 9457)."""

    type: str
    title: str
    status: int
    detail: str = Field(description="For people: what to change.")
    code: str = Field(description="For programs: stable, listed in docs/errors.md.")
    errors: list[FieldProblem] = Field(default_factory=list)
