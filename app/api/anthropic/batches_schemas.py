"""Batches of messages: requests to lines of a file, and its outcomes to results.

https://docs.anthropic.com/en/api/creating-message-batches
"""

from datetime import UTC, datetime
from typing import Annotated, Any, Literal, Self
from uuid import UUID

import orjson
from pydantic import AfterValidator, BaseModel, Field, JsonValue, model_validator

from app.api.schema_parts import STRICT, value_error
from app.batches.rows import MESSAGES, Batch
from app.core.bounded_json import check_json
from app.core.ids import unix_seconds
from app.core.json_lines import on_one_line

WINDOW_SECONDS = 86_400.0
_MAX_BYTES = 100_000_000  # no body is larger
_MAX_DEPTH = 128  # more than the arguments of a call have, within the messages around them

Params = Annotated[
    dict[str, JsonValue],
    AfterValidator(
        lambda value: check_json(
            value, max_bytes=_MAX_BYTES, max_depth=_MAX_DEPTH, refuses_nul=False
        )
    ),
]


class BatchedRequest(BaseModel):
    """A request of a batch. Its `params` are validated when it is run."""

    model_config = STRICT

    custom_id: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    params: Params

    def to_line(self) -> bytes:
        """The request as a line of the file that the batch reads."""
        line = {"custom_id": self.custom_id, "method": "POST", "url": MESSAGES, "body": self.params}
        return on_one_line(orjson.dumps(line)) + b"\n"


class MessageBatchCreate(BaseModel):
    """Messages to create as capacity allows."""

    model_config = STRICT

    requests: Annotated[list[BatchedRequest], Field(min_length=1, max_length=100_000)]

    @model_validator(mode="after")
    def _has_no_stream_and_own_ids(self) -> Self:
        seen: set[str] = set()
        for place, request in enumerate(self.requests):
            if request.custom_id in seen:
                raise value_error(f"requests.{place}: its custom_id is another request's")
            if request.params.get("stream"):
                raise value_error(f"requests.{place}: stream has no meaning in a batch")
            seen.add(request.custom_id)
        return self


class RequestCountsRead(BaseModel):
    processing: int
    succeeded: int
    errored: int
    canceled: int
    expired: int


class MessageBatchRead(BaseModel):
    id: str
    type: Literal["message_batch"]
    processing_status: Literal["in_progress", "canceling", "ended"]
    request_counts: RequestCountsRead
    created_at: str
    expires_at: str
    ended_at: str | None
    cancel_initiated_at: str | None
    archived_at: None
    results_url: str | None


class MessageBatchListRead(BaseModel):
    data: list[MessageBatchRead]
    has_more: bool
    first_id: str | None
    last_id: str | None


class DeletedBatchRead(BaseModel):
    id: str
    type: Literal["message_batch_deleted"]


def to_batch_id(batch_id: UUID) -> str:
    return f"msgbatch_{batch_id}"


def batch_to_wire(batch: Batch, base_url: str) -> dict[str, Any]:
    identifier = to_batch_id(batch.id)
    status = "in_progress"
    if batch.ended_at is not None:
        status = "ended"
    elif batch.cancelling_at is not None:
        status = "canceling"
    return {
        "id": identifier,
        "type": "message_batch",
        "processing_status": status,
        "request_counts": _counts(batch),
        "created_at": datetime.fromtimestamp(unix_seconds(batch.id), UTC).isoformat(),
        "expires_at": _moment(batch.expires_at),
        "ended_at": _moment(batch.ended_at),
        "cancel_initiated_at": _moment(batch.cancelling_at),
        "archived_at": None,
        "results_url": f"{base_url}v1/messages/batches/{identifier}/results"
        if status == "ended"
        else None,
    }


def _counts(batch: Batch) -> dict[str, int]:
    """Requests by their ends, all of which are known at the end of the batch.

    The failed ones of a batch that was stopped count as stopped.
    """
    counts = dict.fromkeys(RequestCountsRead.model_fields, 0)
    total = orjson.loads(batch.metadata)["requests"]
    if batch.ended_at is None:
        return counts | {"processing": total}
    kind = {"cancelled": "canceled", "expired": "expired"}.get(batch.state, "errored")
    return counts | {"succeeded": batch.completed, kind: total - batch.completed}


def _moment(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat()


def result_to_wire(line: bytes) -> bytes:
    """A line of the results, from one of the batch's files."""
    outcome = orjson.loads(line)
    response, error = outcome["response"], outcome["error"]
    result: dict[str, Any]
    if error is not None:
        result = {"type": "canceled" if error["code"] == "batch_cancelled" else "expired"}
    elif response["status_code"] == 200:
        result = {"type": "succeeded", "message": response["body"]}
    else:
        failure = response["body"] | {"request_id": response["request_id"]}
        result = {"type": "errored", "error": failure}
    wire = orjson.dumps({"custom_id": outcome["custom_id"], "result": result})
    return on_one_line(wire) + b"\n"
