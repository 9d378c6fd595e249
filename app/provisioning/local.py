"""This machine as a provider of jobs: processes that outlive the worker that started them.

A launch's processes are those with its id in their environment, and all others in their sessions:
any worker of this machine finds them, and never mistakes others with reused process ids for
them. https://man7.org/linux/man-pages/man5/proc.5.html
"""

import asyncio
import contextlib
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from uuid import UUID

from app.provisioning.hosts import Hosts
from app.provisioning.job_script import LAUNCH_VARIABLE
from app.provisioning.jobs import Job, Phase, RefusedError
from app.provisioning.profiles import Profile

GRACE_SECONDS = 12.0  # serve.sh gives Triton 10 s to end its models
_PROC = Path("/proc")


class Local:
    """Jobs as processes in sessions of their own."""

    def __init__(self, hosts: Hosts) -> None:
        self._hosts = hosts
        self._ending: dict[UUID, _Termination] = {}

    async def submit(self, profile: Profile, launch: UUID, directory: str, /) -> str:
        # Daemonized: it survives the end of its worker.
        answer = await self._hosts.run(
            profile,
            ["setsid", "--fork", "bash", f"{directory}/job.sh"],
            environment={LAUNCH_VARIABLE: str(launch)},
        )
        if answer.status != 0:
            raise RefusedError(f"The job could not be started: {answer.error_line}")
        return str(min(await asyncio.to_thread(processes_of, launch), default=""))

    async def find(self, _profile: Profile, launch: UUID, /) -> Job:
        family = await asyncio.to_thread(processes_of, launch)
        if not family:
            self._ending.pop(launch, None)
            return Job(Phase.ABSENT)
        return Job(Phase.RUNNING, str(min(family)), "127.0.0.1")

    async def cancel(self, _profile: Profile, launch: UUID, /) -> None:
        family = await asyncio.to_thread(processes_of, launch)
        ending = self._ending.setdefault(launch, _Termination(time.monotonic()))
        if time.monotonic() > ending.since + GRACE_SECONDS:
            _signal(set(family), signal.SIGKILL)
            return
        # The script forwards the signal to the server, and waits; without the script each process gets it, once.
        leaders = {pid for pid, session in family.items() if pid == session}
        asked = (leaders or set(family)) - ending.asked
        _signal(asked, signal.SIGTERM)
        ending.asked |= asked


@dataclass(slots=True)
class _Termination:
    """Start of a launch's termination, by the monotonic clock, and the signalled processes."""

    since: float
    asked: set[int] = field(default_factory=set)


def processes_of(launch: UUID) -> dict[int, int]:
    mark = f"{LAUNCH_VARIABLE}={launch}".encode()
    sessions: dict[int, int] = {}
    marked: set[int] = set()
    for folder in _PROC.iterdir():
        if not folder.name.isdigit():
            continue
        try:
            # After the name in parentheses: state, parent, group, session.
            state, _, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            if state in "ZX":
                continue
            sessions[int(folder.name)] = int(session)
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                marked.add(int(folder.name))
        except OSError:  # it has ended, or is another user's
            continue
    own = {sessions[pid] for pid in marked}
    return {pid: session for pid, session in sessions.items() if pid in marked or session in own}


def _signal(pids: set[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
