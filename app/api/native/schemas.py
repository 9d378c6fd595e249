"""The native API's wire shapes: requests in, contexts and results out."""

import json
from datetime import datetime
from typing import Annotated, Any, Literal, Self
from uuid import UUID

import asyncpg
import orjson
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    field_validator,
    model_validator,
)

from app.core.ids import created_at
from app.core.settings import MAX_RETAIN_SECONDS, MIN_RETAIN_SECONDS
from app.inference.sampling import SamplingParameters
from app.infini_gram.attribution import AttributionParameters
from app.queue.job_queue import NewResult
from app.results.attributions import index_of
from app.results.contexts import Context

MAX_BULK = 1000
MAX_METADATA_BYTES = 16_384
MAX_PROMPT_CHARACTERS = 2_000_000
MAX_URL_CHARACTERS = 2_048

_STRICT = ConfigDict(extra="forbid", strict=True)

# Without control characters: a key is printed in logs and problems.
Key = Annotated[str, Field(min_length=1, max_length=255, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")]
Prompt = Annotated[str, Field(min_length=1, max_length=MAX_PROMPT_CHARACTERS)]
Metadata = Annotated[dict[str, JsonValue], Field(max_length=64)]


class Message(BaseModel):
    """One chat message."""

    model_config = _STRICT

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: Annotated[str, Field(max_length=MAX_PROMPT_CHARACTERS)]


Messages = Annotated[list[Message], Field(min_length=1, max_length=10_000)]


class _WithMetadata(BaseModel):
    model_config = _STRICT

    metadata: Metadata = Field(
        default_factory=dict, description="Kept and returned; at most 16 KiB as JSON."
    )

    @field_validator("metadata")
    @classmethod
    def _bounded_metadata(cls, metadata: dict[str, JsonValue]) -> dict[str, JsonValue]:
        try:
            json.dumps(metadata, allow_nan=False)  # orjson would write null
            size = len(orjson.dumps(metadata))
        except (ValueError, TypeError) as error:
            raise ValueError("numbers must be finite, and integers must fit 64 bits") from error
        if size > MAX_METADATA_BYTES:
            raise ValueError(f"must not exceed {MAX_METADATA_BYTES} bytes as JSON")
        return metadata


class ContextCreate(_WithMetadata):
    """A prompt to save: plain `content` or chat `messages`."""

    content: Prompt | None = None
    messages: Messages | None = None

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if (self.content is None) == (self.messages is None):
            raise ValueError("give either content or messages")
        return self


def _named_index(value: object) -> object:
    return {"index": value} if isinstance(value, str) else value


class AttributeOptions(AttributionParameters):
    """The index that a text is to be attributed to, and how."""

    index: Annotated[str, Field(min_length=1, max_length=128)]

    def to_stored(self) -> dict[str, Any]:
        """The parameters that differ from their defaults."""
        return self.model_dump(by_alias=True, exclude_defaults=True, exclude={"index"})


class SendOptions(_WithMetadata):
    """How a context is sent; every member is optional."""

    parameters: SamplingParameters = Field(default_factory=SamplingParameters)
    priority: Annotated[int, Field(ge=-100, le=100)] = Field(
        0,
        description="Below 0 lets other results go first; above 0 goes first itself, as far as the "
        "token's `max_priority` allows.",
    )
    deadline_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None, description="Fail if not finished by then; default 24 h, at most 7 days."
    )
    webhook_url: Annotated[str, Field(max_length=MAX_URL_CHARACTERS)] | None = Field(
        None, description="Told when the result is terminal; see /webhooks/deliveries."
    )
    attribute: Annotated[AttributeOptions | None, BeforeValidator(_named_index)] = Field(
        None,
        description="An index's name, or `{index, ...parameters}`: once completed, the text is "
        "attributed to that corpus, by a result of its own that `attribution` names.",
        strict=False,
    )
    retain_seconds: (
        Annotated[float, Field(ge=MIN_RETAIN_SECONDS, le=MAX_RETAIN_SECONDS, allow_inf_nan=False)]
        | None
    ) = Field(
        None,
        description="Delete the result so long after its end; at most as long as the team's are kept.",
    )
    continue_lost_attempts: bool | None = Field(
        None,
        description="False: an attempt after a lost one starts over. Otherwise it continues the text "
        "where the parameters allow it and LLM_CONTINUE_LOST_ATTEMPTS is on (docs/continuation.md).",
    )
    idempotency_key: Key | None = Field(
        None,
        description="The same key and body again are answered with the first result, another body "
        "with 409. The header `Idempotency-Key` says the same of a request that is no list.",
    )


class ResultCreate(SendOptions):
    """A prompt and how to send it, in one call."""

    model: Annotated[str, Field(min_length=1, max_length=256)]
    content: Prompt | None = None
    messages: Messages | None = None
    context_id: Annotated[UUID, Field(strict=False)] | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [self.content, self.messages, self.context_id]
        if sum(source is not None for source in given) != 1:
            raise ValueError("give exactly one of content, messages and context_id")
        return self


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


def context_to_wire(context: Context) -> dict[str, Any]:
    """A context as JSON members; it never changes, so both times are its creation."""
    created = created_at(context.id)
    wire: dict[str, Any] = {
        "id": str(context.id),
        "content": context.content,
        "messages": context.messages,
        "metadata": context.metadata,
        "created_at": created,
        "updated_at": created,
    }
    if context.erased_at is not None:
        wire["erased_at"] = context.erased_at
    return wire


def result_to_wire(row: asyncpg.Record, *, model_ready: bool) -> dict[str, Any]:
    """A result as JSON members; JSON columns are passed through as they are stored."""
    created = created_at(row["id"])
    started, cancelled, finished = (
        row["started_at"],
        row["cancel_requested_at"],
        row["finished_at"],
    )
    retry_of = row["retry_of"]
    error = None
    if row["error_code"] is not None:
        error = {
            "code": row["error_code"],
            "message": row["error_message"],
            "retryable": row["error_retryable"],
        }
    usage = None
    if row["completion_tokens"] is not None or row["prompt_tokens"] is not None:
        usage = {
            "prompt_tokens": row["prompt_tokens"],
            "completion_tokens": row["completion_tokens"],
        }
    result = row["output"]
    if row["kind"] == "attribution":
        result = orjson.Fragment(result) if result else None
    wire = {
        "id": str(row["id"]),
        "kind": row["kind"],
        "context_id": str(row["context_id"]),
        "model_name": row["model_name"],
        "model_version": row["model_version"],
        "model_ready": model_ready,
        "state": row["state"],
        "result": result,
        "error": error,
        "finish_reason": row["finish_reason"],
        "parameters": orjson.Fragment(row["parameters"]),
        "usage": usage,
        "attempt": row["attempt"],
        "continued": row["continuations"],
        "cancel_requested_at": cancelled,
        "created_at": created,
        "updated_at": finished or max(filter(None, (created, started, cancelled))),
        "started_at": started,
        "first_token_at": row["first_token_at"],
        "finished_at": finished,
        "metadata": orjson.Fragment(row["metadata"]),
        "retry_of": retry_of and str(retry_of),
        "queue_position": None,
        "estimated_wait_seconds": None,
    }
    if row["logprobs"] is not None:
        wire["logprobs"] = orjson.Fragment(row["logprobs"])
    if row["erased_at"] is not None:
        wire["erased_at"] = row["erased_at"]
    if row["source_id"] is not None:
        wire["source_id"] = str(row["source_id"])
    if row["attribution"] is not None:
        is_there = row["state"] == "completed"
        wire["attribution"] = _following_to_wire(row["attribution"], is_there=is_there)
    return wire


def _following_to_wire(stored: str, *, is_there: bool) -> dict[str, Any]:
    following = orjson.loads(stored)
    identifier = following["id"] if is_there else None
    return {"index": index_of(following["queue"]), "id": identifier}


def accepted_to_wire(result: NewResult, *, model_ready: bool) -> dict[str, Any]:
    """A result that was just accepted, without reading it back."""
    created = created_at(result.id)
    wire: dict[str, Any] = {
        "id": str(result.id),
        "kind": result.kind,
        "context_id": str(result.context_id),
        "model_name": result.model_name,
        "model_version": result.model_version,
        "model_ready": model_ready,
        "state": "pending",
        "result": None,
        "error": None,
        "finish_reason": None,
        "parameters": orjson.Fragment(result.parameters),
        "usage": None,
        "attempt": 0,
        "continued": 0,
        "cancel_requested_at": None,
        "created_at": created,
        "updated_at": created,
        "started_at": None,
        "first_token_at": None,
        "finished_at": None,
        "metadata": orjson.Fragment(result.metadata),
        "retry_of": result.retry_of and str(result.retry_of),
        "queue_position": None,
        "estimated_wait_seconds": None,
    }
    if result.source_id is not None:
        wire["source_id"] = str(result.source_id)
    if result.attribution is not None:
        wire["attribution"] = _following_to_wire(result.attribution, is_there=False)
    return wire


def attempts_to_wire(row: asyncpg.Record) -> list[dict[str, Any]]:
    """The history of a result's attempts, with the present or last one at the end."""
    history: list[dict[str, Any]] = [
        {"continued_from": None} | entry for entry in orjson.loads(row["attempt_history"])
    ]
    attempt = row["attempt"]
    if row["worker_id"] is not None and not any(item["attempt"] == attempt for item in history):
        error = None
        if row["error_code"] is not None:
            error = {"code": row["error_code"], "message": row["error_message"]}
        history.append(
            {
                "attempt": attempt,
                "worker_id": str(row["worker_id"]),
                "started_at": row["started_at"],
                "ended_at": row["finished_at"],
                "counted": row["state"] != "pending",
                "continued_from": row["continued_from"],
                "error": error,
            }
        )
    return history
