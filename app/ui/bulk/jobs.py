"""A job of the API in words: its state, its counts, and the rest of its time."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_BADGES = {"cancelled": "failed", "completed": "completed", "completed with failures": "warn"}


@dataclass(slots=True, frozen=True)
class Job:
    """A job as `GET /jobs/{id}` returns it; `is_sending`: this process sends its rows."""

    read: Mapping[str, Any]
    is_sending: bool = False

    @property
    def id(self) -> str:
        return str(self.read["id"])

    @property
    def name(self) -> str:
        return self.read["name"] or self.read["key"] or f"Job {self.id[-12:]}"

    @property
    def model(self) -> str:
        return self._text("bulk_model")

    @property
    def rows_file_id(self) -> str | None:
        """The file of its rows, if a form of this page sent it."""
        return self._text("bulk_rows") or None

    @property
    def left_out(self) -> int:
        text = self._text("bulk_left_out")
        return int(text) if text.isascii() and text.isdigit() and len(text) < 12 else 0

    @property
    def counts(self) -> Mapping[str, int]:
        counts: Mapping[str, int] = self.read["counts"]
        return counts

    @property
    def is_open(self) -> bool:
        return bool(self.read["state"] == "open")

    @property
    def is_over(self) -> bool:
        return bool(self.read["state"] == "ended")

    @property
    def lines(self) -> int:
        """Rows that it has, or will have once all are sent."""
        rows: int = self.counts["rows"]
        return max(rows, self.read["total"] or 0) if self.is_open else rows

    @property
    def done(self) -> int:
        return self.counts["completed"] + self.counts["failed"]

    @property
    def refused(self) -> int:
        """Rows of the page's file that the API did not take."""
        if self.is_open or self.rows_file_id is None:
            return 0
        return max(0, (self.read["total"] or 0) - self.counts["rows"])

    @property
    def errors(self) -> list[tuple[str, int]]:
        """Failed rows by error code, the most frequent first."""
        return sorted(self.read["errors"].items(), key=lambda one: (-one[1], one[0]))

    @property
    def state(self) -> str:
        if self.is_open:
            return "sending" if self.is_sending else "open"
        if not self.is_over:
            return "stopping" if self.read["cancel_requested_at"] else "running"
        if self.read["errors"].get("cancelled"):
            return "cancelled"
        has_failures = self.counts["failed"] or self.refused
        return "completed with failures" if has_failures else "completed"

    @property
    def badge(self) -> str:
        return _BADGES.get(self.state, "running")

    @property
    def seconds_left(self) -> float | None:
        """The API's estimate of the remaining time; None if the page does not send the rest of the rows."""
        if self.is_open and not self.is_sending:
            return None
        estimate: float | None = self.read.get("estimated_seconds_left")
        return estimate

    def _text(self, member: str) -> str:
        value = self.read["metadata"].get(member)
        return value if isinstance(value, str) else ""
