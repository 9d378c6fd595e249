"""Rows of batches and of their lines."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Literal
from uuid import UUID

from app.queue.idempotency import NewKey

State = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling",
    "cancelled",
]  # fmt: skip
End = Literal["completed", "expired", "cancelled"]

MESSAGES = (
    "/v1/messages"  # endpoint of batches that Anthropic's API shows; OpenAI's shows the others
)

ACTIVE = "state IN ('validating', 'in_progress', 'cancelling', 'finalizing')"


@dataclass(slots=True, frozen=True)
class NewBatch:
    """A requested batch, whose input file exists."""

    id: UUID
    team_id: str
    endpoint: str
    input_file_id: UUID
    completion_window: str
    metadata: str  # JSON text
    window_seconds: float
    output_seconds: int | None  # lifetime of its output files; None: no limit
    key: NewKey | None = None
    token_id: str | None = None  # of its request


@dataclass(slots=True, frozen=True)
class Batch:
    """A batch. `ended_at` is when it entered its terminal state."""

    id: UUID
    team_id: str
    endpoint: str
    input_file_id: UUID
    output_file_id: UUID | None
    error_file_id: UUID | None
    completion_window: str
    metadata: str
    state: State
    errors: str
    total: int
    completed: int
    failed: int
    output_seconds: int | None
    expires_at: datetime
    in_progress_at: datetime | None
    cancelling_at: datetime | None
    expiring_at: datetime | None
    finalizing_at: datetime | None
    ended_at: datetime | None
    token_id: str | None
    seconds_left: float = 0.0  # until it expires; only a feeder reads it

    @property
    def is_of_messages(self) -> bool:
        return self.endpoint == MESSAGES

    @property
    def expected_end(self) -> End:
        """The state in which the batch ends if nothing else happens."""
        if self.cancelling_at is not None:
            return "cancelled"
        return "completed" if self.expiring_at is None else "expired"


COLUMNS = ", ".join(field.name for field in fields(Batch) if field.name != "seconds_left")


@dataclass(slots=True, frozen=True)
class NewLine:
    """One request of a batch's file; `body` is JSON text, empty where it was not read."""

    line: int
    custom_id: str
    body: str


@dataclass(slots=True, frozen=True)
class Line(NewLine):
    """A line that is not done, with the ids of its results once it has them."""

    result_ids: Sequence[UUID]


@dataclass(slots=True, frozen=True)
class LineOutcome:
    """The entry of a line in its output or error file: a JSON object as text."""

    line: int
    is_completed: bool
    outcome: str
