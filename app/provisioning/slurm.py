"""Slurm as a provider of jobs: sbatch, squeue, scontrol, scancel.

A job is found by its name, which has the launch's id: a submission whose response was lost is found
as well, and never repeated. Slurm keeps ended jobs for some minutes (MinJobAge, 300 s); after that
the file `exit` in the launch's directory has the job's end. https://slurm.schedmd.com/squeue.html
"""

import re
from uuid import UUID

from app.provisioning.hosts import HostError, Hosts
from app.provisioning.job_script import job_name
from app.provisioning.jobs import End, Job, Phase, RefusedError
from app.provisioning.profiles import Profile

_FIELDS = "%i|%T|%N|%r"
# The controller was not reached, or was too busy to answer: it may accept the job later, or has.
_PASSING = re.compile(
    r"contact slurm controller|timed? ?out|connect(ion)? (failure|refused)|zero bytes|temporarily|"
    r"cluster configuration|munge|try again|backup mode|resource temporarily",
    re.IGNORECASE,
)
_WAITING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT",
            "RESV_DEL_HOLD"}  # fmt: skip
_RUNNING = {"RUNNING", "COMPLETING", "STAGE_OUT", "SIGNALING", "SUSPENDED", "STOPPED", "RESIZING"}
_ENDS = {
    "COMPLETED": End.COMPLETED,
    "CANCELLED": End.CANCELLED,
    "TIMEOUT": End.TIMEOUT,
    "DEADLINE": End.TIMEOUT,
}
_WORDS = {
    "NODE_FAIL": "its node failed",
    "OUT_OF_MEMORY": "it used more memory than it requested",
    "BOOT_FAIL": "its node did not boot",
    "PREEMPTED": "a job of higher priority took its place",
    "TIMEOUT": "its time limit was reached",
    "DEADLINE": "its deadline was reached",
    "CANCELLED": "it was cancelled",
}


class Slurm:
    """Jobs by Slurm's own commands, on the profile's host."""

    def __init__(self, hosts: Hosts) -> None:
        self._hosts = hosts

    async def submit(self, profile: Profile, _launch: UUID, directory: str, /) -> str:
        answer = await self._hosts.run(
            profile, ["sbatch", "--parsable", "--", f"{directory}/job.sh"]
        )
        if answer.status != 0:
            if _PASSING.search(answer.error):
                raise HostError(f"sbatch: {answer.error_line}")
            raise RefusedError(f"Slurm refused the job: {answer.error_line}")
        return answer.output.strip().split(";")[0]

    async def find(self, profile: Profile, launch: UUID, /) -> Job:
        answer = await self._hosts.run(
            profile,
            ["squeue", "--noheader", "--states=all", f"--name={job_name(launch)}",
             f"--format={_FIELDS}"],
        )  # fmt: skip
        if answer.status != 0:
            raise HostError(f"squeue: {answer.error_line}")
        jobs = [line.split("|", 3) for line in answer.output.splitlines() if line.count("|") >= 3]
        if not jobs:
            return Job(Phase.ABSENT)
        # There should be one. Among several, a living one counts; the script ends a second one at once.
        identifier, state, node, reason = max(jobs, key=lambda job: _rank(job[1]))
        reason = "" if reason == "None" else reason
        if state in _WAITING:
            return Job(Phase.WAITING, identifier, reason=reason)
        if state in _RUNNING:
            return Job(Phase.RUNNING, identifier, node)
        return await self._ended(profile, identifier, state, node, reason)

    async def cancel(self, profile: Profile, launch: UUID, /) -> None:
        answer = await self._hosts.run(profile, ["scancel", f"--name={job_name(launch)}"])
        if answer.status != 0:
            raise HostError(f"scancel: {answer.error_line}")

    async def _ended(
        self, profile: Profile, identifier: str, state: str, node: str, reason: str
    ) -> Job:
        code, signal = await self._exit_code(profile, identifier)
        words = [f"Slurm ended job {identifier}: {state}"]
        if state in _WORDS:
            words.append(_WORDS[state])
        if reason and reason not in ("NonZeroExitCode", state):
            words.append(f"reason {reason}")
        if code:
            words.append(f"exit code {code}")
        if signal:
            words.append(f"signal {signal}")
        if state == "NODE_FAIL" and (why := await self._node_reason(profile, node)):
            words.append(f"node {node}: {why}")
        end = _ENDS.get(state, End.FAILED)
        return Job(Phase.ENDED, identifier, node or None, ", ".join(words), end, code)

    async def _exit_code(self, profile: Profile, identifier: str) -> tuple[int | None, int | None]:
        answer = await self._hosts.run(profile, ["scontrol", "show", "job", "-o", identifier])
        found = re.search(r"\bExitCode=(\d+):(\d+)", answer.output)
        return (int(found[1]), int(found[2])) if found else (None, None)

    async def _node_reason(self, profile: Profile, node: str) -> str:
        # Several nodes are a list such as "n1,n[2-4]": the first reason of one counts.
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._,\[\]-]*", node):
            return ""
        answer = await self._hosts.run(profile, ["scontrol", "show", "node", "-o", node])
        found = re.search(r"\bReason=(.*?) \[", answer.output)
        return found[1][:200] if found else ""


def _rank(state: str) -> int:
    if state in _RUNNING:
        return 3
    return 2 if state in _WAITING else int(state != "COMPLETED")
