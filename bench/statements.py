"""Cost of the service's own statements, each measured by itself: CPU, time, log, notification.

The service's classes run them in this process on a database of their own: many statements of one row,
and many of 64, which separates the cost of a statement from that of a row in it.
"""

import asyncio
import math
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from uuid import UUID

import asyncpg

from app.core.database import Database
from app.core.ids import new_id
from app.core.listener import ENDED, split_ids
from app.core.settings import Settings
from app.core.settings.fields import DEFAULT_TEAM
from app.queue.claim import Claim
from app.queue.depth import QueueDepth
from app.queue.enqueue import NewContext, NewResult
from app.queue.finish import AttemptEnd, AttemptOutcome
from app.queue.job_queue import JobQueue
from app.results.indexer import ResultIndexer
from app.results.store import ResultStore
from bench.corpus import texts
from bench.cpu import exact_seconds
from bench.servers import House

_MANY = 64  # rows of a large statement
_STATEMENTS = {1: 120, _MANY: 24}  # of each size, a turn
_LISTENERS = 16
_NOTIFICATIONS = 400
_INSERT = "INSERT INTO probes VALUES (1)"
# A transaction that only notifies has nothing to flush.
_INSERT_AND_NOTIFY = f"WITH i AS ({_INSERT}) SELECT pg_notify('{ENDED}', '')"
_COMMITS = 100  # of each connection
_TRIES = 3  # of which the fastest was disturbed least
_STORED = 2_000  # long results
_MODEL = "calibrated"
_CHARACTERS = 1_000  # of a prompt that is long; an answer has twice as many

STORED = "stored"
STARTED = "stored and claimed"
CLAIMED = "claimed"
ENDED_ALONE = "ended"
ENDED_AND_TOLD = "ended and handed over"
READ = "read"
_KINDS = (STORED, CLAIMED, ENDED_ALONE, READ, STARTED, ENDED_AND_TOLD)


@dataclass(slots=True, frozen=True)
class Cost:
    """Seconds of CPU time: of a statement however long it is, and of each of its rows."""

    each: float
    row: float

    def of(self, rows: int) -> float:
        return self.each + self.row * rows


@dataclass(slots=True, frozen=True)
class Statement:
    """Cost of one kind for its process and PostgreSQL; `seconds` is the undisturbed time for one row."""

    process: Cost
    postgres: Cost
    seconds: float
    log_bytes: Cost  # of PostgreSQL's write-ahead log


@dataclass(slots=True, frozen=True)
class Notified:
    """Extra cost of a commit that notifies."""

    postgres: float  # seconds of CPU time for each connection that listens
    process: Cost  # of a notified process: a notification, and each id in it
    commits: float  # a second at most, however many connections commit: they take turns
    unlocked_commits: float  # the same of commits that do not notify


@dataclass(slots=True, frozen=True)
class Stored:
    """Storage of a result, including its prompt and its words in the search."""

    table_bytes: float
    log_bytes: float  # until it ended
    digest_log_bytes: float  # and then, counted and made searchable
    digest: float  # seconds of PostgreSQL's CPU time for that


@dataclass(slots=True)
class _Taken:
    """One stretch: per statement."""

    process: float
    postgres: float
    seconds: float
    log_bytes: float


@dataclass(slots=True)
class _Turn:
    taken: dict[tuple[str, int], list[_Taken]] = field(default_factory=dict)

    def add(self, kind: str, rows: int, taken: _Taken) -> None:
        self.taken.setdefault((kind, rows), []).append(taken)

    def statement(self, kind: str) -> Statement:
        def median(rows: int, name: str) -> float:
            values: list[float] = [getattr(one, name) for one in self.taken[kind, rows]]
            return statistics.median(values)

        def cost(name: str) -> Cost:
            one, many = median(1, name), median(_MANY, name)
            row = max(0.0, (many - one) / (_MANY - 1))
            return Cost(max(0.0, one - row), row)

        return Statement(cost("process"), cost("postgres"), median(1, "seconds"), cost("log_bytes"))


class Bench:
    """A database, and this process in the place of an API and a worker."""

    def __init__(
        self, house: House, connection: asyncpg.Connection, database: Database, settings: Settings
    ) -> None:
        self._house = house
        self._connection = connection
        self._queue = JobQueue(database, settings)
        self._results = ResultStore(database, self._queue, settings)
        self._digest = ResultIndexer(database, QueueDepth(database, settings), settings)
        self.worker_id = new_id()
        self._silent = self._queue.end_batcher(self.worker_id, math.inf)
        self._told = self._queue.end_batcher(self.worker_id, math.inf, self)

    async def register(self) -> None:
        """Be a worker whose lease holds."""
        await self._connection.execute("UPDATE digest_state SET passes_left = 0")
        await self._connection.execute(
            """INSERT INTO workers (id, host, pid, lease_expires_at)
               VALUES ($1, 'h', 1, now() + interval '1 h')""",
            self.worker_id,
        )

    # --- the dispatcher and the waiters: both take all results --------------------------------------

    def reserve(self, results: Sequence[tuple[str, int]]) -> list[bool]:
        return [True] * len(results)

    def begin(self, claims: Sequence[Claim]) -> None: ...

    def confirm(self, worker_id: UUID, claims: Sequence[Claim]) -> None: ...

    def abort(self, worker_id: UUID) -> None: ...

    def awaits(self, _result_id: UUID) -> bool:
        return True

    def deliver(self, row: asyncpg.Record) -> None: ...

    # --- lives, a kind of statement after the other ---------------------------------------------------

    async def turn(self, turn: _Turn) -> None:
        """Whole lives, in statements of one row and of many, by both ways that there are."""
        for rows, count in _STATEMENTS.items():
            batches = [_new_results(rows) for _ in range(count)]
            await self._measure(turn, STORED, rows, batches, self._queue.enqueue)
            await self._measure(turn, CLAIMED, rows, batches, self._claim)
            await self._measure(turn, ENDED_ALONE, rows, batches, self._end)
            await self._measure(turn, READ, rows, batches, self._read)
            batches = [_new_results(rows) for _ in range(count)]
            self._queue.dispatcher = self
            await self._measure(turn, STARTED, rows, batches, self._queue.enqueue)
            self._queue.dispatcher = None
            await self._measure(turn, ENDED_AND_TOLD, rows, batches, self._end_and_tell)

    async def _measure(
        self,
        turn: _Turn,
        kind: str,
        rows: int,
        batches: Sequence[Sequence[NewResult]],
        run: Callable[[Sequence[NewResult]], Awaitable[object]],
    ) -> None:
        before, times = await self._look(), []
        for batch in batches:
            began = time.perf_counter()
            await run(batch)
            times.append(time.perf_counter() - began)
        undisturbed = statistics.quantiles(times, n=10)[0]
        process, postgres, log = (
            (after - earlier) / len(batches)
            for after, earlier in zip(await self._look(), before, strict=True)
        )
        turn.add(kind, rows, _Taken(process, postgres, undisturbed, log))

    async def _look(self) -> tuple[float, float, float]:
        """CPU seconds of this process and of PostgreSQL so far, and bytes of its log."""
        log = await self._connection.fetchval(
            "SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::float8"
        )
        return time.process_time(), exact_seconds(self._house.postgres_pid), float(log)

    async def _claim(self, batch: Sequence[NewResult]) -> None:
        async for claims in self._queue.claims(self.worker_id, {_MODEL: len(batch)}):
            if len(claims) != len(batch):
                raise RuntimeError("the queue ran short")

    async def _end(self, batch: Sequence[NewResult]) -> None:
        await self._silent.submit_all([_end_of(one, " word") for one in batch])

    async def _end_and_tell(self, batch: Sequence[NewResult]) -> None:
        await self._told.submit_all([_end_of(one, " word") for one in batch])

    async def _read(self, batch: Sequence[NewResult]) -> None:
        await asyncio.gather(*(self._results.get(DEFAULT_TEAM, one.id) for one in batch))

    async def digest(self) -> float:
        """Digest all that ended; seconds of PostgreSQL's CPU time."""
        before = exact_seconds(self._house.postgres_pid)
        while await self._digest.index():
            pass
        return exact_seconds(self._house.postgres_pid) - before

    # --- what stays -------------------------------------------------------------------------------

    async def stored(self, count: int) -> Stored:
        """Results of texts as long as people's; pages are changed before, so that none is logged whole."""
        words = " ".join(islice(texts(5), count // 10))
        await self._live(words, count // 4)
        await self.digest()
        size, (_, _, began) = await self._size(), await self._look()
        await self._live(words, count)
        _, _, ended = await self._look()
        digest = await self.digest()
        _, _, digested = await self._look()
        size = await self._size() - size
        return Stored(*(total / count for total in (size, ended - began, digested - ended, digest)))

    async def _live(self, words: str, count: int) -> None:
        for start in range(0, count, _MANY):
            places = range(start, min(start + _MANY, count))
            said = [words[place * 100 :][: 3 * _CHARACTERS] for place in places]
            batch = [_new_result(text[:_CHARACTERS]) for text in said]
            ends = [_end_of(one, text[_CHARACTERS:]) for one, text in zip(batch, said, strict=True)]
            await self._queue.enqueue(batch)
            await self._claim(batch)
            await self._silent.submit_all(ends)

    async def _size(self) -> float:
        for table in ("results", "contexts", "result_search", "undigested_results"):
            await self._connection.execute(f"VACUUM {table}")
        return float(
            await self._connection.fetchval(
                """SELECT sum(pg_total_relation_size(name::regclass))::float8
                   FROM unnest(ARRAY['results', 'contexts', 'result_search']) AS name"""
            )
        )


async def measure_statements(house: House, turns: int) -> tuple[dict[str, Statement], Stored]:
    """Each kind of statement, of short results; and what stays of long ones."""
    environment = await house.environment("bench_scaling_statements")
    settings = Settings.model_validate(environment)
    connection = await house.connect(settings.database_name)
    turn = _Turn()
    async with Database(settings, "bench") as database:
        bench = Bench(house, connection, database, settings)
        await bench.register()
        for kept in (_Turn(), *[turn] * turns):  # the first one warms up
            await bench.turn(kept)
            await bench.digest()
        stored = await bench.stored(_STORED)
    await connection.close()
    return {kind: turn.statement(kind) for kind in _KINDS}, stored


def _new_results(count: int) -> list[NewResult]:
    return [_new_result("Write it. {{chunks=1}}") for _ in range(count)]


def _new_result(prompt: str) -> NewResult:
    context = NewContext(new_id(), DEFAULT_TEAM, prompt, None, "{}")
    return NewResult(
        id=new_id(),
        team_id=DEFAULT_TEAM,
        context_id=context.id,
        model_name=_MODEL,
        parameters='{"max_tokens": 16, "temperature": 0}',
        deadline_seconds=3600.0,
        new_context=context,
    )


def _end_of(result: NewResult, output: str) -> AttemptEnd:
    return AttemptEnd(
        result.id,
        1,
        AttemptOutcome.COMPLETED,
        output=output,
        finish_reason="stop",
        prompt_tokens=20,
        completion_tokens=1,
        first_token_seconds=0.001,
    )


# --- notifications --------------------------------------------------------------------------------


async def measure_notifications(house: House) -> Notified:
    """Notify with no listener and with many; the differences, by listener."""
    settings = Settings.model_validate(await house.environment("bench_scaling_notified"))
    name = settings.database_name
    sender = await house.connect(name)
    one, many = ",".join([new_id().hex]), ",".join(new_id().hex for _ in range(_MANY))
    alone, _ = await _notify(house, sender, one)
    listeners = [await house.connect(name) for _ in range(_LISTENERS)]
    await sender.execute("CREATE TABLE probes (id int)")
    unlocked, commits = [
        max([await _commit(listeners, statement) for _ in range(_TRIES)])
        for statement in (_INSERT, _INSERT_AND_NOTIFY)
    ]
    for listener in listeners:
        await listener.add_listener(ENDED, _hear)
    postgres, of_one = await _notify(house, sender, one)
    _, of_many = await _notify(house, sender, many)
    for listener in (*listeners, sender):
        await listener.close()
    row = max(0.0, (of_many - of_one) / _LISTENERS / (_MANY - 1))
    each = max(0.0, of_one / _LISTENERS - row)
    per_listener = max(0.0, postgres - alone) / _LISTENERS
    return Notified(per_listener, Cost(each, row), commits, unlocked)


async def _commit(connections: Sequence[asyncpg.Connection], statement: str) -> float:
    """Commits a second by so many at once."""

    async def commit(connection: asyncpg.Connection) -> None:
        prepared = await connection.prepare(statement)
        for _ in range(_COMMITS):
            await prepared.fetch()

    began = time.perf_counter()
    await asyncio.gather(*(commit(connection) for connection in connections))
    return len(connections) * _COMMITS / (time.perf_counter() - began)


def _hear(*news: object) -> None:
    """Look up each id among the awaited ones, as the hub does."""
    for identifier in split_ids(str(news[-1])):
        _AWAITED.get(identifier)


_AWAITED: dict[UUID, object] = {}


async def _notify(house: House, sender: asyncpg.Connection, payload: str) -> tuple[float, float]:
    """CPU seconds a notification, of PostgreSQL and of this process."""
    statement = await sender.prepare("SELECT pg_notify($1, $2)")
    postgres, process = exact_seconds(house.postgres_pid), time.process_time()
    for _ in range(_NOTIFICATIONS):
        await statement.fetch(ENDED, payload)
    await asyncio.sleep(0.1)
    return (
        (exact_seconds(house.postgres_pid) - postgres) / _NOTIFICATIONS,
        (time.process_time() - process) / _NOTIFICATIONS,
    )
