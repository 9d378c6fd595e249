"""Wire schemas of OpenAI's files and batches.

https://platform.openai.com/docs/api-reference/files, .../batch, and guides/batch for the lines.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal
from uuid import UUID

import orjson
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from app.auth.principal import Principal
from app.batches.files import File, FileDetails
from app.batches.rows import Batch, NewBatch
from app.core.errors import invalid_field
from app.core.ids import new_id, unix_seconds
from app.core.whole_numbers import WHOLE
from app.queue.idempotency import NewKey

Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"]

WINDOWS = {"24h": 86_400.0}  # seconds
_MAX_FILENAME = 255
_MIN_EXPIRY, _MAX_EXPIRY = 3_600, 2_592_000  # seconds

OpenAIMetadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=16),
]


class ExpiresAfter(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=_MIN_EXPIRY, le=_MAX_EXPIRY), WHOLE]


class BatchCreate(BaseModel):
    """A batch of the requests of a file, all for one endpoint."""

    model_config = ConfigDict(extra="ignore", strict=True)

    input_file_id: str
    endpoint: Endpoint
    completion_window: Literal["24h"]
    metadata: OpenAIMetadata | None = None
    output_expires_after: ExpiresAfter | None = None


class FileRead(BaseModel):
    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int | None = None
    filename: str
    purpose: str
    status: Literal["processed"]


class DeletedRead(BaseModel):
    id: str
    object: str
    deleted: bool


class ListRead(BaseModel):
    object: Literal["list"]
    data: list[Any]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileListRead(ListRead):
    data: list[FileRead]


class BatchErrorRead(BaseModel):
    """An error in a line of the input file."""

    code: str
    message: str
    line: int | None
    param: str | None


class BatchErrorsRead(BaseModel):
    """The first hundred errors of the input file."""

    object: Literal["list"]
    data: list[BatchErrorRead]


class RequestCountsRead(BaseModel):
    total: int
    completed: int
    failed: int


class BatchRead(BaseModel):
    id: str
    object: Literal["batch"]
    endpoint: Endpoint
    errors: BatchErrorsRead | None
    input_file_id: str
    completion_window: str
    status: Literal[
        "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling",
        "cancelled",
    ]  # fmt: skip
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCountsRead
    metadata: dict[str, str] | None


class BatchListRead(ListRead):
    data: list[BatchRead]


_EXPIRY = TypeAdapter(Annotated[int, Field(ge=_MIN_EXPIRY, le=_MAX_EXPIRY), WHOLE])


def to_file_details(fields: dict[str, str], filename: str | None) -> FileDetails:
    if filename is None:
        raise invalid_field("file", "the form has no file of this name")
    if fields.get("purpose") != "batch":
        raise invalid_field("purpose", "must be `batch`: files have no other use here")
    expires = None
    if fields.get("expires_after[anchor]", "created_at") != "created_at":
        raise invalid_field("expires_after.anchor", "must be `created_at`")
    if "expires_after[seconds]" in fields:
        try:
            expires = _EXPIRY.validate_strings(fields["expires_after[seconds]"])
        except ValidationError as error:
            raise invalid_field(
                "expires_after.seconds", f"must be from {_MIN_EXPIRY} to {_MAX_EXPIRY}"
            ) from error
    return FileDetails("batch", filename[:_MAX_FILENAME], expires)


def file_to_wire(file: File) -> dict[str, Any]:
    wire: dict[str, Any] = {
        "id": f"file-{file.id}",
        "object": "file",
        "bytes": file.size,
        "created_at": int(unix_seconds(file.id)),
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
    }
    if file.expires_at is not None:
        wire["expires_at"] = _seconds(file.expires_at)
    return wire


def to_new_batch(
    principal: Principal, create: BatchCreate, input_file_id: UUID, key: NewKey | None
) -> NewBatch:
    expires = create.output_expires_after
    return NewBatch(
        id=new_id(),
        team_id=principal.team_id,
        endpoint=create.endpoint,
        input_file_id=input_file_id,
        completion_window=create.completion_window,
        metadata=orjson.dumps(create.metadata or {}).decode(),
        window_seconds=WINDOWS[create.completion_window],
        output_seconds=expires.seconds if expires else None,
        key=key,
        token_id=principal.token_id,
    )


def batch_to_wire(batch: Batch) -> dict[str, Any]:
    ended = {batch.state: _seconds(batch.ended_at)}
    errors = orjson.loads(batch.errors)
    return {
        "id": f"batch_{batch.id}",
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": {"object": "list", "data": errors} if errors else None,
        "input_file_id": f"file-{batch.input_file_id}",
        "completion_window": batch.completion_window,
        "status": batch.state,
        "output_file_id": batch.output_file_id and f"file-{batch.output_file_id}",
        "error_file_id": batch.error_file_id and f"file-{batch.error_file_id}",
        "created_at": int(unix_seconds(batch.id)),
        "in_progress_at": _seconds(batch.in_progress_at),
        "expires_at": _seconds(batch.expires_at),
        "finalizing_at": _seconds(batch.finalizing_at),
        "completed_at": ended.get("completed"),
        "failed_at": ended.get("failed"),
        "expired_at": ended.get("expired"),
        "cancelling_at": _seconds(batch.cancelling_at),
        "cancelled_at": ended.get("cancelled"),
        "request_counts": {
            "total": batch.total,
            "completed": batch.completed,
            "failed": batch.failed,
        },
        "metadata": orjson.loads(batch.metadata) or None,
    }


def page_to_wire(items: Sequence[dict[str, Any]], limit: int) -> dict[str, Any]:
    """A page of `items`, which holds one row more than the limit if there is a next page."""
    data = list(items[:limit])
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": len(items) > limit,
    }


def _seconds(moment: Any) -> Any:
    return None if moment is None else int(moment.timestamp())
