"""Wire schemas of the history and of the service's state."""

from dataclasses import asdict
from datetime import datetime
from typing import Any
from uuid import UUID

from pydantic import BaseModel, Field

from app.queue.depth import ModelLoad
from app.results.stats.histogram import percentile
from app.results.stats.history import Point, Window
from app.results.stats.system import SystemState

_SHARES = {"p50": 0.5, "p95": 0.95}
_PERCENTILE = "Seconds of completed results, interpolated from a histogram; null if there are none."


class PointRead(BaseModel):
    """Results of one model that ended within a time step.

    Percentiles are interpolated from histograms whose buckets double in width: exact to the bucket, and
    usually to a tenth.
    """

    minute: datetime = Field(description="Start of the step.")
    minutes: int = Field(description="Length of the step.")
    model_name: str
    completed: int
    failed: int
    prompt_tokens: int
    completion_tokens: int
    ttft_p50: float | None = Field(description=f"From its start to its first token. {_PERCENTILE}")
    ttft_p95: float | None
    seconds_p50: float | None = Field(description=f"From sending to its end. {_PERCENTILE}")
    seconds_p95: float | None
    queue_p50: float | None = Field(description=f"From sending to its last start. {_PERCENTILE}")
    queue_p95: float | None


class TableRead(BaseModel):
    name: str
    size_bytes: int
    rows_estimate: int | None = Field(description="As PostgreSQL last estimated; null: never.")


class DatabaseRead(BaseModel):
    size_bytes: int
    tables: list[TableRead]


class WorkerRead(BaseModel):
    """A worker process, alive or dead."""

    id: UUID
    host: str
    pid: int
    started_at: datetime
    lease_expires_at: datetime
    is_alive: bool
    running: int = Field(description="Running results, as of its last heartbeat.")


class QueueRead(BaseModel):
    """The queue of a model or of an index."""

    name: str
    queued: int
    running: int
    oldest_seconds: float | None = Field(
        description="Age of the oldest queued result; null if the queue is empty."
    )


class QueueSampleRead(BaseModel):
    """Maximum over the full minutes of a step; empty queues have no sample."""

    minute: datetime
    minutes: int
    name: str
    queued: int
    running: int


class FailureRead(BaseModel):
    code: str
    count: int


class SystemRead(BaseModel):
    """The state of the service, for all teams together; up to two seconds old."""

    version: str
    schema_version: str = Field(description="The last migration of the database.")
    now: datetime
    database: DatabaseRead
    workers: list[WorkerRead]
    queues: list[QueueRead]
    queue_history: list[QueueSampleRead]
    history: list[PointRead]
    failures: list[FailureRead]


def point_to_wire(point: Point, window: Window) -> dict[str, Any]:
    wire: dict[str, Any] = {
        "minute": point.begins,
        "minutes": window.step,
        "model_name": point.model_name,
        "completed": point.completed,
        "failed": point.failed,
        "prompt_tokens": point.prompt_tokens,
        "completion_tokens": point.completion_tokens,
    }
    for name, counts in (
        ("ttft", point.first_token_seconds),
        ("seconds", point.seconds),
        ("queue", point.queue_seconds),
    ):
        for suffix, share in _SHARES.items():
            wire[f"{name}_{suffix}"] = percentile(counts, share)
    return wire


def system_to_wire(state: SystemState, version: str) -> dict[str, Any]:
    names = sorted(state.queues.keys() | state.oldest_seconds.keys())
    loads = {name: state.queues.get(name, ModelLoad()) for name in names}
    return {
        "version": version,
        "schema_version": state.schema_version,
        "now": state.now,
        "database": {
            "size_bytes": state.size_bytes,
            "tables": [asdict(table) for table in state.tables],
        },
        "workers": [asdict(worker) | {"id": str(worker.id)} for worker in state.workers],
        "queues": [
            {
                "name": name,
                "queued": load.queued,
                "running": load.running,
                "oldest_seconds": state.oldest_seconds.get(name),
            }
            for name, load in loads.items()
        ],
        "queue_history": [
            {
                "minute": sample.begins,
                "minutes": state.window.step,
                "name": sample.name,
                "queued": sample.queued,
                "running": sample.running,
            }
            for sample in state.queue_history
        ],
        "history": [point_to_wire(point, state.window) for point in state.history],
        "failures": [asdict(failure) for failure in state.failures],
    }
