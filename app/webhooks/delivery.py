"""Delivery of webhooks: the part of a worker process that empties the outbox.

The receiver of each terminal result or ended job with a webhook is called at least once, under one message id, until
it accepts the message or the delivery is given up after more than a day; the delivery's log has the
calls. Any number of processes may deliver: a claim skips rows that another process holds.
"""

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import orjson

from app.core import metrics
from app.core.errors import DatabaseUnavailableError, NotFoundError
from app.core.listener import WEBHOOKS, Listener
from app.core.polling import PollingLoop
from app.core.waiting import cancel_all
from app.inference.model_registry import ModelRegistry
from app.results.jobs.rows import Job
from app.results.jobs.serialization import job_to_wire
from app.results.jobs.store import JobStore
from app.results.rows import ResultRow
from app.results.serialization import result_to_wire
from app.results.store import ResultStore
from app.webhooks.outbox import Due, Receiver, Verdict, WebhookOutbox
from app.webhooks.sender import CallOutcome, Sender, sign

logger = logging.getLogger(__name__)

_MINUTE, _HOUR = 60.0, 3600.0
# Seconds from each failed call to the next, as Standard Webhooks advises: ten calls, three days.
SCHEDULE = (
    5.0, 5 * _MINUTE, 30 * _MINUTE, 2 * _HOUR, 5 * _HOUR, 10 * _HOUR, 14 * _HOUR, 20 * _HOUR,
    24 * _HOUR,
)  # fmt: skip
_LONGEST_PAUSE = 24 * _HOUR
_JITTER = 0.1  # random delay: calls that failed together are not repeated together
_CALLS = 64  # at the same time
# A team's receiver with so many of them gets no more for now: one that hangs leaves places to the
# team's others.
_CALLS_OF_ONE = 8
_CLAIM_SHARE = 8  # a claim takes one part of so many of the free places
_MARGIN_SECONDS = 15.0  # of a claim beyond the call itself: to read the result, write the verdict
_POLL_SECONDS = 30.0  # for deliveries of a dead process; all others are notified or scheduled
_SHORTEST_PAUSE = 0.05
_STOP_SECONDS = 5.0  # calls under way when the process stops may end; what is cut is due again

_OUTCOMES = {"delivered": "delivered", "failed": "given_up", "pending": "to_be_retried"}
_BROKE = "webhook of result %s broke"
_BUG = CallOutcome("a bug in the service; its worker's log has the details")


class WebhookDeliverer:
    """Makes due calls until cancelled. One instance per process; `schedule` is in seconds."""

    def __init__(
        self,
        outbox: WebhookOutbox,
        results: ResultStore,
        jobs: JobStore,
        registry: ModelRegistry,
        listener: Listener,
        sender: Sender,
        schedule: Sequence[float] = SCHEDULE,
    ) -> None:
        self._outbox = outbox
        self._results = results
        self._jobs = jobs
        self._registry = registry
        self._sender = sender
        self._schedule = schedule
        self._lease = sender.timeout + _MARGIN_SECONDS
        self._loop = PollingLoop("webhooks", self._start_due, seconds=_POLL_SECONDS)
        self._calls: dict[asyncio.Task[None], Receiver] = {}  # and the receiver of each
        self._is_short = False  # the last look was limited by places, not by the outbox
        listener.subscribe(WEBHOOKS, lambda _: self._loop.wake())

    async def run(self) -> None:
        async with self._sender:
            try:
                await self._loop.run()
            finally:
                await self._stop_calls()

    async def _start_due(self) -> float:
        """Start due calls, as far as there are free places; seconds until the next look."""
        while free := _CALLS - len(self._calls):
            asked = max(1, free // _CLAIM_SHARE)
            due = await self._outbox.claim(asked, self._lease, *busy(self._calls.values(), free))
            teams = {delivery.team_id for delivery in due}
            secrets = {team: (await self._outbox.secret(team)).all for team in teams}
            for delivery in due:
                self._start(delivery, secrets[delivery.team_id])
            if len(due) < asked:
                break
        self._is_short = not free or any(busy(self._calls.values(), free))
        seconds = None if self._is_short else await self._outbox.seconds_until_due()
        if seconds is None:
            return _POLL_SECONDS
        return min(max(seconds, _SHORTEST_PAUSE), _POLL_SECONDS)

    def _start(self, due: Due, secrets: Sequence[str]) -> None:
        task = asyncio.create_task(self._run(due, secrets), name=f"webhook {due.result_id}")
        self._calls[task] = due.team_id, due.receiver
        task.add_done_callback(self._on_end)

    def _on_end(self, task: asyncio.Task[None]) -> None:
        del self._calls[task]
        if self._is_short:
            self._loop.wake()

    async def _run(self, due: Due, secrets: Sequence[str]) -> None:
        try:
            await self._deliver(due, secrets)
        except NotFoundError:
            pass  # the result or job was deleted, and this delivery with it
        except DatabaseUnavailableError as error:
            # It is due again when the lease is over, under the same message id.
            logger.info("webhook waits: %s", error, extra=_extra("webhook_waits", due))
        except Exception:
            logger.exception(_BROKE, due.result_id, extra=_extra("webhook_broke", due))

    async def _deliver(self, due: Due, secrets: Sequence[str]) -> None:
        event = await self._event(due)
        if event is None:
            return
        at, started = datetime.now(UTC), time.monotonic()
        try:
            identifier, body = event()
            headers = sign(secrets, identifier, body)
            answer = await self._sender.send(due.team_id, due.url, headers, body)
        except Exception:
            # Recorded as a failed call: a bug must not cause endless calls or claims.
            logger.exception(_BROKE, due.result_id, extra=_extra("webhook_broke", due))
            answer = _BUG
        entry = {
            "at": at,
            "status": answer.status,
            "error": answer.error,
            "seconds": round(time.monotonic() - started, 3),
        }
        verdict = verdict_after(due, answer, self._schedule, orjson.dumps(entry).decode())
        if verdict.state == "failed":
            message = "webhook of result %s was given up after %d calls"
            extra = _extra("webhook_given_up", due)
            logger.warning(message, due.result_id, due.attempts, extra=extra)
        await self._outbox.conclude(verdict)
        metrics.WEBHOOKS.of(_OUTCOMES[verdict.state]).inc()
        if verdict.state == "pending":
            self._loop.wake()  # it may be due before the next look

    async def _event(self, due: Due) -> Callable[[], tuple[str, bytes]] | None:
        """Read what is delivered; a message's id and body. None while retried rows of a job run.

        Raises NotFoundError and DatabaseUnavailableError.
        """
        if due.is_job:
            job = await self._jobs.get(due.team_id, due.result_id)
            if job.state != "ended":
                return None  # its next end makes the delivery due
            return lambda: (job_message_id(job), job_event_body(job))
        row = await self._results.get(due.team_id, due.result_id)
        is_ready = self._registry.is_ready(row.model_name)
        return lambda: (message_id(row.id), event_body(row, model_ready=is_ready))

    async def _stop_calls(self) -> None:
        if self._calls:
            await asyncio.wait(self._calls, timeout=_STOP_SECONDS)
        await cancel_all(self._calls)


def busy(calls: Collection[Receiver], free: int) -> tuple[list[str], list[Receiver]]:
    """The teams and receivers that get no more calls while these run and so many places are free.

    A team may have as many places as it leaves free: one has half of them, the next one half of the
    rest, so that a further team finds some. (Dynamic thresholds, Choudhury and Hahne 1998.)
    """
    teams, receivers = Counter(team for team, _ in calls), Counter(calls)
    return (
        [team for team, count in teams.items() if count >= free],
        [receiver for receiver, count in receivers.items() if count >= _CALLS_OF_ONE],
    )


def verdict_after(due: Due, outcome: CallOutcome, schedule: Sequence[float], entry: str) -> Verdict:
    """The state of a delivery after a call with this outcome."""
    if outcome.error is None:
        return Verdict(due, "delivered", 0, entry)
    if outcome.is_final or due.attempts > len(schedule):
        return Verdict(due, "failed", 0, entry)
    pause = max(schedule[due.attempts - 1], outcome.retry_after)
    spread = 1 + _JITTER * random.random()  # noqa: S311 - no secret
    return Verdict(due, "pending", min(pause, _LONGEST_PAUSE) * spread, entry)


def message_id(result_id: UUID) -> str:
    """The message's id, the same in every call, by which receivers detect repetitions."""
    return f"msg_{result_id.hex}"


def job_message_id(job: Job) -> str:
    """The id of the message about one end of a job."""
    assert job.ended_at is not None
    return f"msg_{job.id.hex}_{int(job.ended_at.timestamp() * 1000)}"


def job_event_body(job: Job) -> bytes:
    """The message about an ended job; `data` is the body of `GET /jobs/{id}`."""
    return orjson.dumps({"type": "job.ended", "timestamp": job.ended_at, "data": job_to_wire(job)})


def event_body(row: ResultRow, *, model_ready: bool) -> bytes:
    """The message about a terminal result; `data` is the body of `GET /results/{id}`."""
    event: dict[str, Any] = {
        "type": f"result.{row.state}",
        "timestamp": row.finished_at,
        "data": result_to_wire(row, model_ready=model_ready),
    }
    return orjson.dumps(event)


def _extra(action: str, due: Due) -> dict[str, str]:
    return {"action": action, "result_id": str(due.result_id), "team_id": due.team_id}
