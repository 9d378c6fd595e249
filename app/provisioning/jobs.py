"""What a job is to its follower, whoever runs it: Slurm or this machine."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol
from uuid import UUID

from app.provisioning.profiles import Profile


class Phase(StrEnum):
    """Where a job is. ABSENT: whoever would run it knows nothing of it (any more)."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"
    ABSENT = "absent"


class End(StrEnum):
    """How a job ended."""

    COMPLETED = "completed"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Job:
    """A job as it was seen. `reason` is for people: why it waits, or why it ended."""

    phase: Phase
    id: str | None = None
    node: str | None = None
    reason: str = ""
    end: End | None = None
    exit_code: int | None = None


class RefusedError(Exception):
    """The job is not taken, and would not be the next time: `message` says why."""


class Provider(Protocol):
    """Starts, finds and ends jobs. All of it may be called again, by anybody, at any time."""

    async def submit(self, profile: Profile, launch: UUID, directory: str, /) -> str:
        """Start the job whose script is in the directory; its id. Raises HostError, RefusedError."""

    async def look(self, profile: Profile, launch: UUID, /) -> Job:
        """The launch's job, found by the launch's id alone. Raises HostError."""

    async def cancel(self, profile: Profile, launch: UUID, /) -> None:
        """Have it end, if it is there. Raises HostError."""
