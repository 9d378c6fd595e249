"""Jobs and their rows as their readers get them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal, TypeVar
from uuid import UUID

from app.results.requests import SendOptions
from app.results.rows import ResultRow

_Options = TypeVar("_Options", bound=SendOptions)

JobState = Literal["open", "closed", "ended"]
EndState = Literal["completed", "failed"]
COMPLETED = "completed"
DELETED = "deleted"  # the end of a row whose result was deleted while pending
_ESTIMATE_AFTER_SECONDS = 3.0


@dataclass(slots=True, frozen=True)
class NewJob:
    """A job to create; `metadata` is JSON text."""

    id: UUID
    team_id: str
    name: str
    key: str | None
    total: int | None
    priority: int
    deadline_seconds: float | None
    webhook_url: str | None
    metadata: str
    max_rows: int


@dataclass(slots=True, frozen=True)
class JobDefaults:
    """The team of a job, and the options of its rows that do not have their own; they never change."""

    team_id: str
    priority: int
    deadline_seconds: float | None

    def completed(self, options: _Options, max_priority: int) -> _Options:
        """The options of a row, with those of the job that it does not set."""
        defaults: dict[str, object] = {}
        if "priority" not in options.model_fields_set:
            defaults["priority"] = min(self.priority, max_priority)
        if options.deadline_seconds is None:
            defaults["deadline_seconds"] = self.deadline_seconds
        return options.model_copy(update=defaults)


@dataclass(slots=True, frozen=True)
class Job:
    """A job with its counts; `metadata` is JSON text."""

    id: UUID
    team_id: str
    name: str
    key: str | None
    total: int | None
    priority: int
    deadline_seconds: float | None
    webhook_url: str | None
    metadata: str
    max_rows: int
    closed_at: datetime | None
    cancel_requested_at: datetime | None
    ended_at: datetime | None
    rows: int
    last_place: int  # that a row has in the order of ends
    began_place: int  # its last place when its rows began, or were retried after all had ended
    running_seconds: float = field(compare=False)  # since then, at the time of the read
    ended: Mapping[str, int]  # by `completed` or error code
    prompt_tokens: int
    completion_tokens: int
    is_settled: bool  # all ended rows have their places

    @property
    def pending(self) -> int:
        return self.rows - sum(self.ended.values())

    @property
    def completed(self) -> int:
        return self.ended.get(COMPLETED, 0)

    @property
    def errors(self) -> dict[str, int]:
        """Failed rows by error code."""
        return {code: count for code, count in self.ended.items() if code != COMPLETED and count}

    @property
    def seconds_left(self) -> float | None:
        """Estimate of the time until all rows have ended, by their speed since they began.

        An open job has as many rows as its client expects. None: none is left, or it is too early.
        """
        left = self.pending
        if self.state == "open":
            left = max(self.rows, self.total or 0) - sum(self.ended.values())
        ends = self.last_place - self.began_place
        is_early = ends <= 0 or self.running_seconds < _ESTIMATE_AFTER_SECONDS
        # Retried rows of an ended job are not counted as its beginning yet.
        if left <= 0 or is_early or self.ended_at is not None:
            return None
        return left * self.running_seconds / ends

    @property
    def state(self) -> JobState:
        if self.closed_at is None:
            return "open"
        return "ended" if self.ended_at is not None and self.is_settled else "closed"


@dataclass(slots=True, frozen=True)
class EndedRow:
    """An ended row of a job; `result` is None if it has been deleted since."""

    place: int
    key: str
    result_id: UUID
    ended_as: str
    result: ResultRow | None

    @property
    def state(self) -> EndState:
        return "completed" if self.ended_as == COMPLETED else "failed"


@dataclass(slots=True, frozen=True)
class KeyedRow:
    """The row of a key; `result_id` is None if the job has none, `ended_as` while it is pending."""

    key: str
    result_id: UUID | None
    place: int | None
    ended_as: str | None
    result: ResultRow | None

    @property
    def state(self) -> Literal["pending", "completed", "failed"] | None:
        if self.result_id is None:
            return None
        if self.ended_as is None:
            return "pending"
        return "completed" if self.ended_as == COMPLETED else "failed"


def add_counts(counts: Mapping[str, int], more: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Counts with more of some names; those that become zero are left out."""
    total = dict(counts)
    for name, count in more:
        total[name] = total.get(name, 0) + count
    return {name: count for name, count in total.items() if count}
