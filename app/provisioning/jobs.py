"""The interface between the reconciler and the providers of jobs: Slurm and this machine."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol
from uuid import UUID

from app.provisioning.profiles import Profile


class Phase(StrEnum):
    """Phase of a job. ABSENT: the provider does not list it, or no longer."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"
    ABSENT = "absent"


class End(StrEnum):
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Job:
    """A job's last observed state. `reason` is for people: why it waits, or why it ended."""

    phase: Phase
    id: str | None = None
    node: str | None = None
    reason: str = ""
    end: End | None = None
    exit_code: int | None = None


class RefusedError(Exception):
    """The provider refuses the job permanently; `message` is the reason."""


class Provider(Protocol):
    """Starts, finds and ends jobs. Every method may be repeated, by any worker at any time."""

    async def submit(self, profile: Profile, launch: UUID, directory: str, /) -> str:
        """Start the job whose script is in the directory; return its id. Raises HostError, RefusedError."""

    async def find(self, profile: Profile, launch: UUID, /) -> Job:
        """The launch's job, found by the launch's id alone. Raises HostError."""

    async def cancel(self, profile: Profile, launch: UUID, /) -> None:
        """End the job, if it exists. Raises HostError."""
