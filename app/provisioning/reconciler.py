"""Follows launches from their row to their end: the part of a worker process that starts servers.

A worker claims each launch every LLM_LAUNCH_POLL_SECONDS, and each check makes one step, which
depends on the row and on the job, never on a process's memory. When a worker dies, another one claims
its launches after their leases, and finds the jobs by the launches' ids.

    submitted   the directory is made, and the job submitted
    pending     the job waits; `reason` is the provider's
    starting    the job runs, and its server is not ready yet
    healthy     the server answers, and is registered: results are routed to it
    unhealthy   the job runs, and its server does not answer, or its engine is dead
    stopping    the server is drained, the job ended, and its files removed
    stopped, timeout, failed
"""

import asyncio
import logging
import socket
from dataclasses import replace
from datetime import datetime, timedelta
from uuid import UUID, uuid4

from app.core.database import Database
from app.core.errors import ConflictError, DatabaseUnavailableError
from app.core.listener import LAUNCHES, Listener
from app.core.polling import PollingLoop
from app.core.settings import Settings
from app.core.waiting import cancel_all
from app.inference.server_store import ServerStore
from app.inference.triton_access import new_secret
from app.inference.triton_client import TritonClient
from app.provisioning import engine_probe
from app.provisioning.directory import Directory, PublishedAddress
from app.provisioning.hosts import HostError, Hosts
from app.provisioning.job_end import job_from_exit_file, last_words
from app.provisioning.jobs import End, Job, Phase, Provider, RefusedError
from app.provisioning.launched_servers import LaunchedServers
from app.provisioning.local import Local
from app.provisioning.profiles import Profile
from app.provisioning.slurm import Slurm
from app.provisioning.store import ClaimedLaunch, EndState, Follower, LaunchStore, Step
from app.provisioning.tunnels import TunnelError, Tunnels

logger = logging.getLogger(__name__)

_MAX_CONCURRENT_CHECKS = 8  # launches that one process checks at the same time
_MIN_CHECK_SECONDS = 1.0  # seconds, at least, between checks of a launch that is about to change
_RECHECK_SECONDS = 0.2  # seconds to a check that has work to do
_MIN_PAUSE_SECONDS = 0.05
# The follower of a tunnel is replaced when it is so many checks late.
_TAKEOVER_CHECKS = 4
_END_STATES: dict[End, EndState] = {
    End.COMPLETED: "stopped",
    End.CANCELLED: "stopped",
    End.TIMEOUT: "timeout",
    End.FAILED: "failed",
}
_UNKNOWN_COUNT = -1  # of requests: differs from each


class Reconciler:
    """Follows the launches of some profiles until cancelled. One instance per process."""

    def __init__(
        self,
        database: Database,
        listener: Listener,
        settings: Settings,
        profiles: dict[str, Profile],
    ) -> None:
        self._store = LaunchStore(database)
        self._profiles = profiles
        self._poll = settings.launch_poll_seconds
        self._lease = settings.launch_lease_seconds
        self._follower = Follower(
            list(profiles), socket.gethostname(), uuid4(), self._poll * _TAKEOVER_CHECKS
        )
        self._hosts = Hosts()
        self._tunnels = Tunnels(self._hosts)
        self._servers = LaunchedServers(ServerStore(database), self._tunnels, settings)
        self._providers: dict[str, Provider] = {
            "slurm": Slurm(self._hosts),
            "local": Local(self._hosts),
        }
        self._loop = PollingLoop("launches", self._start_due, seconds=self._poll)
        self._checks: set[asyncio.Task[None]] = set()
        listener.subscribe(LAUNCHES, lambda _: self._loop.wake())

    async def run(self) -> None:
        """Follow until cancelled. The steps under way are cancelled; another worker resumes them."""
        async with self._hosts, self._tunnels:
            try:
                await self._loop.run()
            finally:
                await cancel_all(self._checks)

    async def _start_due(self) -> float:
        """Check the due launches, as far as slots are free; return the seconds until the next check."""
        free = _MAX_CONCURRENT_CHECKS - len(self._checks)
        if not free:
            return self._poll
        for launch in await self._store.claim(self._follower, free, self._lease):
            task = asyncio.create_task(self._check(launch), name=f"launch {launch.id}")
            self._checks.add(task)
            task.add_done_callback(self._on_end)
        seconds = await self._store.seconds_until_due(self._follower)
        return self._poll if seconds is None else min(max(seconds, _MIN_PAUSE_SECONDS), self._poll)

    def _on_end(self, task: asyncio.Task[None]) -> None:
        self._checks.discard(task)
        self._loop.wake()

    async def _check(self, launch: ClaimedLaunch) -> None:
        extra = {"action": "launch", "launch_id": str(launch.id)}
        # After an error the lease stays: the launch is due again at its end.
        try:
            step = await self._step_or_retry(launch)
            await self._store.advance(launch, step)
        except TimeoutError:
            # A command may still be running, and be a submission.
            logger.warning("launch %s: a check took too long", launch.name, extra=extra)
        except DatabaseUnavailableError as error:
            logger.info("launch %s waits: %s", launch.name, error, extra=extra)
        except Exception:
            logger.exception("launch %s: unexpected error", launch.name, extra=extra)
        else:
            if step.state != launch.state:
                logger.info("launch %s: %s %s", launch.name, step.state, step.reason, extra=extra)

    async def _step_or_retry(self, launch: ClaimedLaunch) -> Step:
        try:
            async with asyncio.timeout(self._lease * 2 / 3):
                return await self._step(launch)
        except (TimeoutError, DatabaseUnavailableError):
            raise
        except (HostError, TunnelError) as error:
            note = str(error)
        except Exception:
            logger.exception("launch %s: unexpected error", launch.name)
            note = "a bug in the service; its worker's log has the details"
        logger.warning("launch %s: %s", launch.name, note)
        # A stopping launch keeps the reason of its stop.
        return Step(launch.state, self._poll, note, follower_id=self._follower_of(launch))

    async def _step(self, launch: ClaimedLaunch) -> Step:
        directory = Directory(self._hosts, self._profiles[launch.profile], launch.id)
        job = await self._job(launch, directory)
        if launch.state == "stopping":
            return await self._stop(launch, directory, job)
        if job.phase is Phase.ABSENT and launch.state == "submitted":
            return await self._submit(launch, directory)
        if job.phase in (Phase.ABSENT, Phase.ENDED):
            return await self._end(launch, directory, job)
        if job.phase is Phase.WAITING:
            reason = f"Slurm: {job.reason}" if job.reason else ""
            return Step("pending", self._pause(launch, launch.submitted_at), reason, job_id=job.id)
        try:
            return await self._check_server(launch, directory, job)
        except RefusedError as error:
            return Step("stopping", _RECHECK_SECONDS, str(error), "failed", job_id=job.id)

    async def _job(self, launch: ClaimedLaunch, directory: Directory) -> Job:
        """The job; if its provider has forgotten it, its state by its last file."""
        job = await self._providers[launch.provider].find(directory.profile, launch.id)
        if job.phase is not Phase.ABSENT:
            return job
        status = await directory.exit_status()
        return job if status is None else job_from_exit_file(launch, *status)

    async def _submit(self, launch: ClaimedLaunch, directory: Directory) -> Step:
        if launch.secret is None:
            # Stored before anything runs: each worker must reach the server, and of a local launch
            # no other machine may look for it.
            machine = self._follower.machine if launch.provider == "local" else None
            return Step("submitted", 0, machine=machine, secret=new_secret())
        try:
            await directory.make(launch.spec, launch.secret)
            job_id = await self._providers[launch.provider].submit(
                directory.profile, launch.id, directory.path
            )
        except RefusedError as error:
            return Step("stopping", 0, str(error), "failed")
        return Step("pending", _RECHECK_SECONDS, job_id=job_id)

    async def _end(self, launch: ClaimedLaunch, directory: Directory, job: Job) -> Step:
        """Store the job's end before its traces are removed."""
        log = await directory.log() or ""
        state, reason = _END_STATES[job.end or End.FAILED], job.reason
        if job.phase is Phase.ABSENT:
            is_slurm = launch.provider == "slurm"
            missing = "Slurm does not list the job" if is_slurm else "The job is missing"
            reason = f"{missing}, and it left no exit status: it was killed, or its node failed"
        if state == "stopped" and launch.state != "submitted":
            by_itself = "the server ended by itself"
            cancelled = "the job was cancelled outside of the service"
            reason = f"{cancelled if job.end is End.CANCELLED else by_itself} ({reason})"
        if state == "failed" and (last := last_words(log)):
            reason = f"{reason}. Its last words: {last}"
        return Step(
            "stopping", 0, reason, state, job_id=job.id, node=job.node, log=log,
            exit_code=job.exit_code,
        )  # fmt: skip

    async def _check_server(self, launch: ClaimedLaunch, directory: Directory, job: Job) -> Step:
        found = Step(
            "starting", self._pause(launch, launch.started_at), job_id=job.id, node=job.node, log=await directory.log(),
            follower_id=self._follower_of(launch),
        )  # fmt: skip
        is_over = _has_passed(launch.now, launch.started_at, launch.spec.time_limit_minutes)
        if launch.provider == "local" and is_over:
            reason = f"the time limit of {launch.spec.time_limit_minutes} minutes was reached"
            return _ended(found, reason, "timeout")
        if launch.node is not None and launch.ports is not None:
            published: PublishedAddress | None = PublishedAddress(launch.node, launch.ports)
        else:
            published = await directory.published()
        if published is None:
            return self._not_ready(launch, found, "")
        address = await self._servers.address(launch, directory.profile, published)
        found = replace(found, node=published.node, ports=published.ports, address=address)
        if address != launch.address:
            # Stored before it is registered, so that the worker that ends the launch finds the entry.
            state = "starting" if launch.healthy_at is None else launch.state
            return replace(found, state=state, pause=0)
        return await self._check_model(launch, directory.profile, found)

    async def _check_model(self, launch: ClaimedLaunch, profile: Profile, found: Step) -> Step:
        assert found.address is not None
        model, seconds = launch.spec.served_name, self._lease / 6
        server = TritonClient(found.address["grpc"], launch.secret)
        dead_since = engine_probe.dead_since(launch.reason)
        is_doubtful = launch.healthy_at is None or dead_since is not None
        finding = await engine_probe.check(
            server, model, _UNKNOWN_COUNT if is_doubtful else launch.requests,
            None if profile.is_supervised and not is_doubtful else seconds,
        )  # fmt: skip
        if finding.requests is None:
            return self._not_ready(launch, found, "the server does not answer")
        found = replace(found, requests=finding.requests)
        if not finding.error:
            return await self._serve(launch, profile, found, is_used=finding.is_used)
        reason = engine_probe.dead_reason(finding.error, launch.now, launch.reason)
        step = self._dead(launch, found, reason)
        if step.state == "unhealthy" and not profile.is_supervised:
            logger.warning("launch %s: %s; reloading the model", launch.name, reason)
            await engine_probe.reload(server, model, seconds)
        return step

    def _dead(self, launch: ClaimedLaunch, found: Step, reason: str) -> Step:
        minutes = launch.spec.start_minutes
        if not _has_passed(launch.now, engine_probe.dead_since(reason), minutes):
            return replace(found, state="unhealthy", pause=self._poll, reason=reason)
        profile = self._profiles[launch.profile]
        advice = "" if profile.is_supervised else (
            f"; `supervise = true` in the profile {profile.name!r} has its job restart the server"
        )  # fmt: skip
        return _ended(
            found,
            f"{reason}. It did not recover within {minutes:g} minutes: launch it again{advice}",
            "failed",
        )

    def _not_ready(self, launch: ClaimedLaunch, found: Step, reason: str) -> Step:
        if engine_probe.dead_since(launch.reason) is not None:
            return self._dead(launch, found, launch.reason)
        if launch.healthy_at is not None:
            return replace(found, state="unhealthy", pause=self._poll, reason=reason)
        minutes = launch.spec.start_minutes
        if not _has_passed(launch.now, launch.started_at, minutes):
            return found
        reason = f"the model was not ready {minutes:g} minutes after the job's start"
        if last := last_words(found.log or ""):
            reason = f"{reason}. The job's last words: {last}"
        return _ended(found, reason, "failed")

    async def _serve(
        self, launch: ClaimedLaunch, profile: Profile, found: Step, *, is_used: bool
    ) -> Step:
        assert found.address is not None
        try:
            await self._servers.register(launch, profile, found.address)
        except ConflictError as error:
            return _ended(found, error.detail, "failed")
        is_used = launch.healthy_at is None or is_used or await self._servers.has_running(launch)
        idle = launch.spec.idle_minutes
        if not is_used and idle and _has_passed(launch.now, launch.last_used_at, idle):
            return _ended(found, f"idle for {idle:g} minutes", "stopped")
        return replace(found, state="healthy", pause=self._poll, used=is_used)

    async def _stop(self, launch: ClaimedLaunch, directory: Directory, job: Job) -> Step:
        """Drain the server, end the job, remove its files: then the launch has ended."""
        again = Step("stopping", min(self._poll, 1.0), follower_id=self._follower_of(launch))
        if job.phase in (Phase.WAITING, Phase.RUNNING):
            if not await self._servers.is_drained(launch):
                return again
            await self._providers[launch.provider].cancel(directory.profile, launch.id)
            pause = min(self._poll, _RECHECK_SECONDS)
            return replace(again, pause=pause, log=await directory.log())
        log = await directory.log()
        if launch.address is not None:
            await self._servers.unregister(launch)
        await self._tunnels.close(launch.id)
        await directory.remove()
        return Step(
            launch.end_state or "stopped", 0, launch.reason, log=log, exit_code=job.exit_code
        )

    def _pause(self, launch: ClaimedLaunch, since: datetime | None) -> float:
        """Seconds to the next check of a launch about to change, growing with the time it takes."""
        elapsed = (launch.now - since).total_seconds() if since else 0.0
        return min(self._poll, max(_MIN_CHECK_SECONDS, elapsed / 5))

    def _follower_of(self, launch: ClaimedLaunch) -> UUID | None:
        """This process, if the launch needs a tunnel: a tunnel belongs to a process."""
        return None if self._profiles[launch.profile].host is None else self._follower.id


def _ended(found: Step, reason: str, end_state: EndState) -> Step:
    return replace(found, state="stopping", pause=0, reason=reason, end_state=end_state)


def _has_passed(now: datetime, since: datetime | None, minutes: float) -> bool:
    return since is not None and now - since >= timedelta(minutes=minutes)
