"""A bulk job, assembled from its batches: each has the job's key and its place in the metadata.

A job is stored nowhere else. The batch of the last part is created last and names the others: a job
with it is complete, and its id is the job's. A batch of another program is a job of one part.
"""

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

MAX_PARTS = 100
_IDS_PER_VALUE = 15  # a value of metadata has 512 characters, an id 32
_ID = re.compile("[0-9a-f]{32}")
_TERMINAL_STATES = frozenset({"completed", "failed", "expired", "cancelled"})
# The first of these that is the state of any part is the job's.
_ORDER = (
    ("cancelling", "stopping"),
    ("in_progress", "running"),
    ("validating", "checking"),
    ("finalizing", "writing results"),
    ("failed", "failed"),
    ("expired", "expired"),
    ("cancelled", "cancelled"),
    ("completed", "completed"),
)
_ESTIMATE_AFTER = 3.0  # seconds

Batch = Mapping[str, Any]


@dataclass(slots=True, frozen=True)
class Part:
    batch: Batch
    id: str
    state: str
    job: str  # the key of its job; its own id if it has none
    name: str
    model: str
    is_last: bool
    lines: int  # also before the API has counted them
    left_out: int
    rows_file_id: str | None
    earlier_ids: Sequence[str]

    @property
    def is_over(self) -> bool:
        return self.state in _TERMINAL_STATES

    @property
    def file_ids(self) -> list[str]:
        names = ("output_file_id", "error_file_id", "input_file_id")
        ids = [*(self.batch[name] for name in names), self.rows_file_id]
        return [one for one in ids if one is not None]


def to_part(batch: Batch) -> Part:
    identifier, metadata = str(batch["id"]), batch["metadata"] or {}
    number, _, count = metadata.get("bulk_part", "1/1").partition("/")
    texts = (metadata.get(f"bulk_parts_{place}", "") for place in range(1, 10))
    earlier = [UUID(one) for text in texts for one in text.split() if _ID.fullmatch(one)]
    return Part(
        batch=batch,
        id=identifier,
        state=str(batch["status"]),
        job=metadata.get("bulk_job", identifier),
        name=metadata.get("bulk_name") or f"Batch {identifier[-12:]}",
        model=metadata.get("bulk_model", ""),
        is_last=number == count,
        lines=int(batch["request_counts"]["total"]) or _number(metadata, "bulk_lines"),
        left_out=_number(metadata, "bulk_left_out"),
        rows_file_id=metadata.get("bulk_rows"),
        earlier_ids=[f"batch_{one}" for one in earlier[: MAX_PARTS - 1]],
    )


@dataclass(slots=True, frozen=True)
class Job:
    """All batches of a job, in the order of the file. Times in seconds."""

    parts: Sequence[Part]
    is_whole: bool = True

    @property
    def last(self) -> Part:
        return self.parts[-1]

    @property
    def id(self) -> str:
        return self.last.id

    @property
    def created_at(self) -> datetime:
        return datetime.fromtimestamp(self.parts[0].batch["created_at"], UTC)

    @property
    def lines(self) -> int:
        return sum(part.lines for part in self.parts)

    @property
    def completed(self) -> int:
        return sum(part.batch["request_counts"]["completed"] for part in self.parts)

    @property
    def failed(self) -> int:
        """Lines that failed; after the end of a batch, all without an output."""
        counts = [(part, part.batch["request_counts"]) for part in self.parts]
        return sum(
            part.lines - count["completed"] if part.is_over else count["failed"]
            for part, count in counts
        )

    @property
    def left_out(self) -> int:
        return sum(part.left_out for part in self.parts)

    @property
    def done(self) -> int:
        return self.completed + self.failed

    @property
    def is_over(self) -> bool:
        return all(part.is_over for part in self.parts)

    @property
    def state(self) -> str:
        states = {part.state for part in self.parts}
        label = next(label for state, label in _ORDER if state in states)
        return f"{label} with failures" if label == "completed" and self.failed else label

    @property
    def badge(self) -> str:
        if not self.is_over:
            return "running"
        if any(part.state != "completed" for part in self.parts):
            return "failed"
        return "warn" if self.failed else "completed"

    @property
    def refusals(self) -> list[tuple[int, Mapping[str, Any]]]:
        return [
            (number, error)
            for number, part in enumerate(self.parts, 1)
            for error in (part.batch["errors"] or {"data": ()})["data"]
        ]

    def seconds_left(self, now: float | None = None) -> float | None:
        """Estimate of the remaining time by the speed so far; None if it is too early."""
        begun = [part.batch["in_progress_at"] for part in self.parts]
        begun = [one for one in begun if one is not None]
        elapsed = (now or time.time()) - min(begun) if begun else 0
        if self.is_over or not self.done or elapsed < _ESTIMATE_AFTER:
            return None
        return (self.lines - self.done) * elapsed / self.done


def metadata_of(
    *, name: str, job: str, number: int, count: int, lines: int, left_out: int, rows_file_id: str,
    model: str, earlier_ids: Sequence[str],
) -> dict[str, str]:  # fmt: skip
    """Metadata of a part's batch, which `Part` reads; `earlier_ids` are for the last only."""
    metadata = {
        "bulk_name": name[:200],
        "bulk_job": job,
        "bulk_part": f"{number}/{count}",
        "bulk_lines": str(lines),
        "bulk_left_out": str(left_out),
        "bulk_rows": rows_file_id,
    }
    if model:
        metadata["bulk_model"] = model[:256]
    ids = [UUID(one.removeprefix("batch_")).hex for one in earlier_ids]
    for place in range(0, len(ids), _IDS_PER_VALUE):
        key = f"bulk_parts_{place // _IDS_PER_VALUE + 1}"
        metadata[key] = " ".join(ids[place : place + _IDS_PER_VALUE])
    return metadata


def to_jobs(batches: Sequence[Batch], hidden: str = "") -> list[Job]:
    """The jobs of a page of batches, newest first; those of the job `hidden` are left out.

    The last part's `earlier_ids` name the parts that are not among these batches. A job without a last
    part here is incomplete: it is being sent, or its sending was interrupted.
    """
    of_job: dict[str, list[Part]] = {}
    for part in map(to_part, batches):
        of_job.setdefault(part.job, []).append(part)
    return [
        Job(parts[::-1], is_whole=parts[0].is_last)
        for key, parts in of_job.items()
        if key != hidden
    ]


def _number(metadata: Mapping[str, str], key: str) -> int:
    text = metadata.get(key, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 12 else 0
