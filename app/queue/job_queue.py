"""The queue: every transition of a result, each by the statement of its module.

The result row is the job. Every write names the state, the worker and the attempt that it expects, so
a race becomes a row count of zero: another process decided. All times are the database's clock.
`docs/state_machine.md` draws the transitions; `terminal_state` writes their states.
"""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from uuid import UUID

from app.core import log_context, metrics, tracing
from app.core.database import Connection, Database
from app.core.group_commit import MAX_STATEMENT_BYTES, Batcher
from app.core.pieces import in_pieces
from app.core.settings import Settings
from app.queue import api_processes, cancel, finish, rescue, reuse
from app.queue.claim import (
    Claim,
    claim,
    claim_suspect,
    claim_within_limits,
    suspects_in_turn,
)
from app.queue.enqueue import (
    MAX_ENQUEUE,
    EagerDispatcher,
    NewResult,
    enqueue,
    enqueue_bytes,
)
from app.queue.finish import AttemptEnd, ResultWaiters
from app.queue.live_text import Notification
from app.queue.progress import Chunk, append_chunks, chunk_bytes
from app.queue.result_size import UNBOUNDED
from app.queue.suspects import pause_suspects
from app.queue.table_statistics import analyze_growth
from app.queue.team_limits import TeamLimits
from app.queue.terminal_state import MAX_BATCH

logger = logging.getLogger(__name__)


class JobQueue:
    """Transitions of results; `dispatcher` is the worker of this process, if it has one."""

    def __init__(
        self, database: Database, settings: Settings, limits: TeamLimits | None = None
    ) -> None:
        self.dispatcher: EagerDispatcher | None = None
        self._limits = limits or TeamLimits(database, settings)
        self._database = database
        self._settings = settings
        self._continues = settings.continue_lost_attempts
        seconds = settings.database_timeout_seconds
        self._enqueues: Batcher[NewResult, bool] = Batcher(
            database,
            self._enqueue,
            max_items=MAX_ENQUEUE,
            retry_seconds=seconds,
            size=enqueue_bytes,
        )
        self._reuses: Batcher[NewResult, bool] = Batcher(
            database,
            reuse.enqueue_reused,
            max_items=MAX_ENQUEUE,
            retry_seconds=seconds,
            size=enqueue_bytes,
        )

    # --- new results ----------------------------------------------------------------------------

    async def enqueue(self, results: Sequence[NewResult]) -> list[bool]:
        """Commit new results in one statement; False where the context or source does not
        exist, or the idempotency key is another result's.

        Returns only after the commit: an id may be returned to its client from then on.
        """
        if tracing.active is not None:
            trace = log_context.trace()
            results = [replace(result, trace=trace) for result in results]
        if await self._are_reused(results):
            stored = list(await self._reuses.submit_all(results))
        else:
            # The dispatcher's worker begins with the results of one statement at a time.
            is_eager = self.dispatcher is not None
            stored = list(await self._enqueues.submit_all(results, in_line=is_eager))
        is_debug = logger.isEnabledFor(logging.DEBUG)
        for result, is_stored in zip(results, stored, strict=True):
            if is_stored:
                metrics.SUBMISSIONS.of(result.model_name).inc()
                if is_debug:
                    extra = {"action": "accepted", "result_id": str(result.id)}
                    logger.debug("accepted for %s", result.model_name, extra=extra)
        return stored

    async def _are_reused(self, results: Sequence[NewResult]) -> bool:
        """Return whether an equal result answers one of them. Others cost no statement."""
        if all(one.reuse_digest is None for one in results):
            return False
        return await self._database.run(partial(reuse.has_sources, results=results))

    async def _enqueue(
        self, connection: Connection, results: Sequence[NewResult], resent: bool
    ) -> list[bool]:
        return await enqueue(connection, results, self.dispatcher, resent=resent)

    # --- claims ---------------------------------------------------------------------------------

    @property
    def has_running_limits(self) -> bool:
        """True if the end of one result may let another of its team run."""
        return self._limits.has_running

    async def load_limits(self) -> None:
        await self._limits.load()

    async def claims(
        self, worker_id: UUID, free: Mapping[str, int], room: int = UNBOUNDED
    ) -> AsyncIterator[Sequence[Claim]]:
        """Claim up to `free[model]` results of each model; none once the worker is marked dead.

        `room`: bytes that they may take; the last one may exceed them.
        The caller runs each batch at once: claims of models with running limits may have to wait for
        others.

        Not sent again after a lost connection: rows of a claim whose answer was lost show up in
        `owned` and are handed back by the heartbeat.
        """
        limited = {model: found for model in free if (found := self._limits.running(model))}
        unlimited = {model: count for model, count in free.items() if model not in limited}
        if unlimited:
            async with self._database.connection() as connection:
                # Before the connection's return, which may take time if its server is silent.
                claims = await claim(
                    connection, worker_id, unlimited, continues=self._continues, room=room
                )
                yield claims
                room -= sum(one.expected_bytes for one in claims)
        for model, limits in limited.items():
            async with self._database.connection() as connection:
                claims = await claim_within_limits(
                    *(connection, worker_id, model, free[model], limits),
                    continues=self._continues,
                    room=room,
                )
            yield claims
            room -= sum(one.expected_bytes for one in claims)

    async def suspects_in_turn(self, models: Sequence[str]) -> dict[str, str]:
        """Return the models of which a suspect has its turn, with its team."""
        return await self._database.run(lambda connection: suspects_in_turn(connection, models))

    async def claim_suspects(self, worker_id: UUID, models: Sequence[str]) -> list[Claim]:
        """Claim a suspect of each model, if nothing else of it runs."""
        claims: list[Claim] = []
        for model in models:
            async with self._database.connection() as connection:
                claims += await claim_suspect(
                    connection, worker_id, model, continues=self._continues
                )
        return claims

    async def pause_suspects(self, model: str, team_id: str, seconds: float) -> None:
        """Leave a model to its other results, after a suspect of the team had it for so long."""
        await self._database.run(lambda one: pause_suspects(one, model, team_id, seconds))

    # --- running attempts -----------------------------------------------------------------------

    async def append(
        self,
        worker_id: UUID,
        chunks: Sequence[Chunk],
        notifications: Sequence[Notification] = (),
    ) -> None:
        """Store text of attempts that are ours, and notify of it."""
        *parts, last = in_pieces(chunks, chunk_bytes, MAX_STATEMENT_BYTES) if chunks else [[]]
        for part in parts:
            await self._database.run(partial(append_chunks, worker_id=worker_id, chunks=part))
        await self._database.run(lambda one: append_chunks(one, worker_id, last, notifications))

    def chunk_batcher(self, worker_id: UUID, retry_seconds: float) -> Batcher[Chunk, None]:
        """The batcher of a worker for the last text of its attempts that are to be continued."""

        async def keep_texts(
            connection: Connection, chunks: Sequence[Chunk], _resent: bool
        ) -> list[None]:
            await append_chunks(connection, worker_id, chunks)
            return [None] * len(chunks)

        return Batcher(
            self._database,
            keep_texts,
            max_items=MAX_BATCH,
            retry_seconds=retry_seconds,
            size=lambda chunks: sum(map(chunk_bytes, chunks)),
        )

    def end_batcher(
        self, worker_id: UUID, retry_seconds: float, waiters: ResultWaiters | None = None
    ) -> Batcher[AttemptEnd, bool]:
        """The batcher of a worker for the ends of its attempts; False: it was not ours."""

        async def end_attempts(
            connection: Connection, ends: Sequence[AttemptEnd], resent: bool
        ) -> list[bool]:
            return await finish.end_attempts(
                connection, worker_id, ends, self._settings.max_attempts, waiters, resent=resent
            )

        return Batcher(
            self._database,
            end_attempts,
            max_items=MAX_BATCH,
            retry_seconds=retry_seconds,
            size=lambda ends: sum(map(finish.end_bytes, ends)),
        )

    # --- cancellation ---------------------------------------------------------------------------

    async def cancel(self, team_id: str, **filters: object) -> int:
        """Cancel a team's pending results by `id`, `context_id` or `model_name`; how many.

        Queued ones are terminal on return; running ones are marked and their worker is notified.
        """
        return await self._repeat(lambda one: cancel.cancel_some(one, team_id, filters))

    async def cancel_ids(self, team_id: str, ids: Sequence[UUID]) -> None:
        await self._database.run(lambda connection: cancel.cancel_ids(connection, team_id, ids))

    async def notify_stopped(self, ids: Sequence[UUID]) -> None:
        await self._database.run(lambda connection: cancel.notify_stopped(connection, ids))

    # --- maintenance ----------------------------------------------------------------------------

    async def expire(self) -> int:
        return await self._repeat(rescue.expire_some)

    async def rescue(self, lease_seconds: float) -> int:
        """Release results of workers whose lease ran out; how many. `maintenance` has the rules."""
        await self._database.run(lambda one: rescue.mark_lost_workers(one, lease_seconds))
        return await self.release(await self._database.run(rescue.dead_owners))

    async def cancel_abandoned(self, lease_seconds: float = api_processes.LEASE_SECONDS) -> int:
        """Cancel the results whose client was connected to an API process that is gone; how many."""
        gone = await self._database.run(
            lambda one: api_processes.gone_processes(one, lease_seconds)
        )
        if not gone:
            return 0

        async def cancel_some(connection: Connection) -> int:
            ids = await api_processes.results_of(connection, gone)
            await cancel.cancel_of_any_team(connection, ids)
            return len(ids)

        cancelled = 0
        while count := await self._database.run(cancel_some):
            cancelled += count
        await self._database.run(lambda one: api_processes.remove(one, gone))
        return cancelled

    async def release(self, worker_ids: Sequence[UUID]) -> int:
        """Release the results of lost workers, or end those that have no attempt or time left."""

        def release(connection: Connection) -> Awaitable[int]:
            return rescue.release_some(connection, worker_ids, self._settings, counted=True)

        released = 0
        while worker_ids and (count := await self._database.run(release)):
            released += count
        return released

    async def retire(self, worker_id: UUID) -> int:
        return await self._database.run(lambda one: rescue.retire(one, worker_id, self._settings))

    async def clock(self) -> float:
        return await self._database.run(rescue.clock)

    async def analyze_growth(self) -> None:
        await self._database.run(analyze_growth)

    async def _repeat(self, change_some: Callable[[Connection], Awaitable[int]]) -> int:
        total = 0
        while True:
            count = await self._database.run(change_some)
            total += count
            if count < MAX_BATCH:
                return total
