"""The hot statements, run by the service's own functions on the rows of `full_queue`."""

import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, NamedTuple, cast
from uuid import UUID

from asyncpg import Record

from app.batches.work import BatchWork
from app.core.errors import NotFoundError
from app.core.ids import created_at, new_id
from app.core.settings import Settings
from app.queue import rescue
from app.queue.admission import _count
from app.queue.claim import claim_within_limits, owned_results
from app.queue.depth import QueueDepth
from app.queue.enqueue import NewContext, NewResult
from app.queue.finish import AttemptEnd, AttemptOutcome
from app.queue.idempotency import IdempotencyKeys, NewKey
from app.queue.job_queue import JobQueue
from app.queue.position import QueuePositions
from app.queue.progress import Chunk
from app.queue.suspects import end_suspects
from app.queue.team_limits import RunningLimits
from app.results.indexer import ResultIndexer
from app.results.retention.retention import Retention
from app.results.store import ResultStore
from app.webhooks.outbox import WebhookOutbox
from tests.claims import claim_all
from tests.integration.queue.dispatcher import Dispatcher
from tests.integration.queue.plans.explaining import ExplainingDatabase
from tests.integration.queue.plans.full_queue import MODELS, RARE, SUSPECTED, TEAMS, Ids

BATCH = 32  # results of a statement
TEAM = TEAMS[0]


@dataclass(slots=True)
class Queue:
    """The service's parts on one database, and its rows."""

    database: ExplainingDatabase
    settings: Settings
    ids: Ids
    jobs: JobQueue = field(init=False)
    results: ResultStore = field(init=False)

    def __post_init__(self) -> None:
        self.jobs = JobQueue(self.database, self.settings)
        self.results = ResultStore(self.database, self.jobs, self.settings)


Work = Callable[[Queue], Awaitable[None]]


def running(queue: Queue) -> Sequence[UUID]:
    """Running results; unknown ids if there are none, so that the same statements are planned."""
    return queue.ids.running[:BATCH] or [new_id() for _ in range(BATCH)]


def new_results(
    queue: Queue, count: int, model: str = MODELS[0], **members: Any
) -> list[NewResult]:
    """Every other one has a new context."""
    results = []
    for number in range(count):
        context = NewContext(new_id(), TEAM, "a prompt", None, "{}") if number % 2 else None
        results.append(
            NewResult(
                new_id(), TEAM, context.id if context else queue.ids.context, model, "{}", 60.0,
                new_context=context, **members,
            )
        )  # fmt: skip
    return results


async def _enqueue(queue: Queue) -> None:
    await queue.jobs.enqueue(new_results(queue, BATCH))


async def _enqueue_one(queue: Queue) -> None:
    await queue.jobs.enqueue(new_results(queue, 1))


async def _enqueue_flows(queue: Queue) -> None:
    """Results of several models and priorities."""
    results = [
        result
        for model in (*MODELS, RARE, "new")
        for priority in (0, 1, 2)
        for result in new_results(queue, 2, model, priority=priority)
    ]
    await queue.jobs.enqueue(results)


async def _enqueue_with_keys(queue: Queue) -> None:
    results = new_results(queue, BATCH)
    await queue.jobs.enqueue(
        [replace(one, key=NewKey(f"new {one.id}", b"hash", 60.0)) for one in results]
    )


async def _enqueue_reused(queue: Queue) -> None:
    """Half of the results have a source."""
    results = new_results(queue, BATCH)
    await queue.database.fetch(
        "UPDATE results SET reuse_digest = $2 WHERE id = ANY($1)", queue.ids.ended[:BATCH], b"known"
    )
    digests = [b"known" if place % 2 else b"new" for place in range(BATCH)]
    await queue.jobs.enqueue(
        [replace(one, reuse_digest=digest) for one, digest in zip(results, digests, strict=True)]
    )


async def _enqueue_eagerly(queue: Queue) -> None:
    """For a worker with free slots: of a model that nothing waits for, and of others."""
    queue.jobs.dispatcher = Dispatcher(queue.ids.worker)
    try:
        for model in ("new", MODELS[0]):
            await queue.jobs.enqueue(new_results(queue, BATCH // 2, model))
    finally:
        queue.jobs.dispatcher = None


async def _claim(queue: Queue) -> None:
    free = dict.fromkeys((*MODELS, "new"), BATCH // 4)
    await claim_all(queue.jobs, queue.ids.worker, free)


async def _claim_one(queue: Queue) -> None:
    await claim_all(queue.jobs, queue.ids.worker, {MODELS[0]: 1})


async def _claim_within_limits(queue: Queue) -> None:
    limits = RunningLimits(None, {TEAM: 320, "other": 3})
    async with queue.database.connection() as connection:
        await claim_within_limits(
            connection, queue.ids.worker, MODELS[0], BATCH, limits, continues=True
        )


async def _claim_suspects(queue: Queue) -> None:
    in_turn = await queue.jobs.suspects_in_turn([*MODELS, SUSPECTED])
    await queue.jobs.claim_suspects(queue.ids.worker, list(in_turn))


async def _pause_suspects(queue: Queue) -> None:
    for model in (*MODELS, SUSPECTED):
        await queue.jobs.pause_suspects(model, TEAM, 1.0)


async def _end_suspects(queue: Queue) -> None:
    async with queue.database.connection() as connection:
        await end_suspects(connection, SUSPECTED, TEAM)


async def _append(queue: Queue) -> None:
    chunks = [Chunk(one, 1, 90, "text", 1, 1) for one in running(queue)]
    await queue.jobs.append(queue.ids.worker, chunks)


class _Waiters:
    """The readers of this process: they wait for all results."""

    def awaits(self, _: object) -> bool:
        return True

    def deliver(self, _: object) -> None: ...


def _end(outcome: AttemptOutcome, *, reads: bool = False, attributes: bool = False) -> Work:
    async def end(queue: Queue) -> None:
        batcher = queue.jobs.end_batcher(queue.ids.worker, 5.0, _Waiters() if reads else None)
        await batcher.submit_all(
            [
                AttemptEnd(one, 1, outcome, output="x", has_attribution=attributes)
                for one in running(queue)
            ]
        )

    return end


async def _release(queue: Queue) -> None:
    await queue.jobs.release([queue.ids.dead_worker])


async def _retire(queue: Queue) -> None:
    await queue.jobs.retire(queue.ids.worker)


async def _dead_owners(queue: Queue) -> None:
    await queue.database.run(rescue.dead_owners)


async def _expire(queue: Queue) -> None:
    await queue.jobs.expire()


async def _cancel(queue: Queue) -> None:
    await queue.jobs.cancel(TEAM, id=running(queue)[0])
    await queue.jobs.cancel_ids(TEAM, [*queue.ids.waiting[:BATCH], *queue.ids.running[:BATCH]])


async def _owned(queue: Queue) -> None:
    await queue.database.run(lambda one: owned_results(one, queue.ids.worker))


async def _read(queue: Queue) -> None:
    for one in (*queue.ids.ended[:1], running(queue)[0]):
        await queue.results.get(TEAM, one)


async def _text_since(queue: Queue) -> None:
    await queue.results.text_since(running(queue)[0], 1, 20, continues=True)


async def _depth(queue: Queue) -> None:
    await QueueDepth(queue.database, queue.settings).by_model()


async def _oldest(queue: Queue) -> None:
    await QueueDepth(queue.database, queue.settings).oldest_seconds()


async def _position(queue: Queue) -> None:
    await QueuePositions(queue.database).estimate(new_id(), MODELS[0], is_running=False)


async def _count_of_team(queue: Queue) -> None:
    await queue.database.run(lambda one: _count(one, [(TEAM, MODELS[0], 100)], False))


async def _find_key(queue: Queue) -> None:
    keys = IdempotencyKeys(queue.database, queue.settings)
    await keys.find(TEAM, f"key {queue.ids.ended[-1] if queue.ids.ended else new_id()}")


async def _digest(queue: Queue) -> None:
    indexer = ResultIndexer(
        queue.database, QueueDepth(queue.database, queue.settings), queue.settings
    )
    await indexer.index()
    if not queue.ids.running:  # nothing has ended: the statement is planned all the same
        async with queue.database.connection() as connection:
            rows = cast("list[Record]", [{"id": new_id(), "place": 0, "is_due": True}])
            await indexer._count(connection, rows, "SKIP LOCKED", 2_000)
            await indexer.words._index(connection, rows, 100)


async def _retain(queue: Queue) -> None:
    """Two pages of the oldest results are due."""
    oldest = created_at(queue.ids.ended[:301][-1]) if queue.ids.ended else datetime.now(UTC)

    async def clock() -> datetime:
        return datetime.now(UTC)

    seconds = (datetime.now(UTC) - oldest).total_seconds()
    settings = queue.settings.model_copy(update={"results_retention_seconds": seconds})
    await Retention(queue.database, settings, clock=clock, share=1).look()


async def _webhooks(queue: Queue) -> None:
    await WebhookOutbox(queue.database, queue.settings).claim(BATCH, 30.0)


async def _batches(queue: Queue) -> None:
    await BatchWork(queue.database).claim(new_id(), 5, 60.0)


class Bounds(NamedTuple):
    buffers: int
    rows: int


@dataclass(slots=True, frozen=True)
class HotStatement:
    """Run by `work`; the most that one execution may read, in pages and in rows of all nodes.

    Bounds are about twice what the right plan reads. Each is far below the rows that wait, except where
    the comment gives the reason. `unknown` are those of states in which PostgreSQL takes the tables for
    small, if they differ.
    """

    name: str
    work: Work
    buffers: int
    rows: int
    unknown: Bounds | None = None

    def bounds(self, *, knows_sizes: bool) -> Bounds:
        return self.unknown if self.unknown and not knows_sizes else Bounds(self.buffers, self.rows)

    async def run(self, queue: Queue) -> None:
        with contextlib.suppress(NotFoundError):  # an empty queue has no such row
            await self.work(queue)


COMPLETED, RETURNED = AttemptOutcome.COMPLETED, AttemptOutcome.RETURNED
HOT_STATEMENTS: Sequence[HotStatement] = (
    HotStatement("enqueue", _enqueue, 200, 1_000),
    HotStatement("enqueue one", _enqueue_one, 150, 60),
    HotStatement("enqueue flows", _enqueue_flows, 400, 1_200),
    HotStatement("enqueue with keys", _enqueue_with_keys, 300, 1_600),
    HotStatement("enqueue reused", _enqueue_reused, 1_500, 3_000),
    HotStatement("enqueue eagerly", _enqueue_eagerly, 400, 700),
    HotStatement("claim", _claim, 1_000, 800),
    HotStatement("claim one", _claim_one, 150, 100),
    # It counts the running results.
    HotStatement("claim within limits", _claim_within_limits, 2_700, 6_000),
    HotStatement("claim suspects", _claim_suspects, 150, 3_000),
    HotStatement("pause suspects", _pause_suspects, 150, 3_000),
    HotStatement("end suspects", _end_suspects, 1_500, 3_000),
    HotStatement("append", _append, 150, 1_000),
    HotStatement("end", _end(COMPLETED), 1_000, 3_000),
    HotStatement("end and read", _end(COMPLETED, reads=True), 1_000, 3_000),
    HotStatement("end and attribute", _end(COMPLETED, attributes=True), 1_000, 3_500),
    HotStatement(
        "end, read and attribute", _end(COMPLETED, reads=True, attributes=True), 1_000, 3_500
    ),
    HotStatement("hand back", _end(RETURNED), 1_200, 3_000),
    # Two hundred results with their chunks, which it reads several times.
    HotStatement("release", _release, 27_000, 40_000),
    HotStatement("retire", _retire, 27_000, 40_000),
    HotStatement("dead owners", _dead_owners, 50, 60),
    HotStatement("expire", _expire, 600, 2_000),
    HotStatement("cancel", _cancel, 600, 1_600),
    HotStatement("owned", _owned, 200, 1_600),
    HotStatement("read", _read, 50, 20),
    HotStatement("text since", _text_since, 60, 100),
    # It counts all that waits, at most once a second.
    HotStatement("depth", _depth, 40_000, 400_000),
    HotStatement("oldest", _oldest, 600, 600),
    HotStatement("position", _position, 2_500, 4_500),  # of a thousand results
    HotStatement("count of a team", _count_of_team, 250, 500),
    HotStatement("find a key", _find_key, 30, 20),
    HotStatement("digest", _digest, 7_500, 16_000),  # of five hundred results
    HotStatement("retention", _retain, 12_000, 9_500),  # of two hundred
    HotStatement("webhooks", _webhooks, 300, 600),
    HotStatement("batches", _batches, 100, 200),
)
