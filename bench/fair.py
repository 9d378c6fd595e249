"""FAIR: what the fair order costs PostgreSQL, and whether it costs throughput.

Two databases take turns: one with the queue as it is, one that serves first in, first out, by the
same statements without fair keys and by the one index that this needs. 64 results of four teams are
stored a statement, 100 are claimed a statement, from a queue of 10,000. Cost is PostgreSQL's CPU
time per row. Throughput is simulated: 16 places, exponential service times, ten teams that send at
random beside one that starts with 5,000 results; both orders serve the same arrivals.
"""

import heapq
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from uuid import UUID

import asyncpg

from app.core.ids import new_id
from app.queue.claim import CLAIM
from app.queue.enqueue import NewContext, NewResult, to_statement
from app.queue.virtual_time import next_key_sql
from bench import progress
from bench.cpu import tree_seconds
from bench.report import Options, Report, median_ratio
from bench.servers import House

_TEAMS = 4
_QUEUED = 10_000
_STORED = 64
_CLAIMED = 100
_STATEMENTS = 60  # a round
_ORDER = "r.priority DESC, r.fair_key, r.id"

_FIFO_SCHEMA = """
DROP INDEX ix_results_queue; DROP INDEX ix_results_queue_team;
CREATE INDEX ix_results_queue ON results (model_name, priority DESC, id)
  WHERE state = 'pending' AND worker_id IS NULL
"""


@dataclass(slots=True)
class _Arm:
    """A database, and the statements that it is used by."""

    name: str
    connection: asyncpg.Connection
    next_key: str
    claim: str
    worker: UUID
    enqueue_us: list[float]
    claim_us: list[float]


async def run(house: House, options: Options) -> Report:
    """Store and claim in turns, then simulate."""
    report = Report("FAIR", "The fair order", ["stored, us a row", "claimed, us a row"])
    by_age = CLAIM.replace(_ORDER, "r.priority DESC, r.id")
    fifo = await _arm(house, "first in, first out", "0::float8", by_age)
    await fifo.connection.execute(_FIFO_SCHEMA)
    fair = await _arm(house, "fair shares", next_key_sql("f"), CLAIM)
    for arm in (fifo, fair):
        for _ in range(_QUEUED // _STORED):
            await _store(arm)
        await arm.connection.execute("VACUUM ANALYZE results")
    for turn in range(-1, options.rounds * 2):  # the first one warms up
        for arm in (fifo, fair):
            progress.show(arm.name, turn, options.rounds * 2)
            stored = await _cost(house, arm, _store, _STORED)
            claimed = await _cost(house, arm, _claim, _CLAIMED)
            if turn >= 0:
                arm.enqueue_us.append(stored)
                arm.claim_us.append(claimed)
            for _ in range(_STATEMENTS * (_CLAIMED - _STORED) // _STORED):
                await _store(arm)
    for arm in (fifo, fair):
        report.rows.append(
            (arm.name, [statistics.median(arm.enqueue_us), statistics.median(arm.claim_us)])
        )
        await arm.connection.close()
    report.check("claim, CPU", median_ratio(fair.claim_us, fifo.claim_us), "<=", 1.2, "x")
    stored = median_ratio(fair.enqueue_us, fifo.enqueue_us)
    report.notes.append(
        f"A row that waits costs {stored:.2f} times as much to store: two probes, and a second index "
        "over what waits. A row that is claimed as it is stored enters neither index."
    )
    progress.show("simulating throughput")
    _simulate(report)
    return report


async def _arm(house: House, name: str, next_key: str, claim: str) -> _Arm:
    database = f"bench_{name.split()[0]}"
    await house.environment(database)  # migrates it
    connection = await house.connect(database)
    await connection.execute("SET plan_cache_mode = force_generic_plan")
    worker = new_id()
    await connection.execute(
        "INSERT INTO workers (id, host, pid, lease_expires_at)"
        " VALUES ($1, 'h', 1, now() + interval '1 h')",
        worker,
    )
    return _Arm(name, connection, next_key, claim, worker, [], [])


async def _store(arm: _Arm) -> None:
    results = [_result(f"team {place % _TEAMS}") for place in range(_STORED)]
    statement, arguments = to_statement(results, [False] * _STORED, None)
    statement = statement.replace(next_key_sql("f"), arm.next_key)
    await arm.connection.fetch(statement, *arguments)


def _result(team: str) -> NewResult:
    context = NewContext(new_id(), team, "a prompt", None, "{}")
    return NewResult(
        id=new_id(),
        team_id=team,
        context_id=context.id,
        model_name="m",
        parameters='{"max_tokens": 9}',
        deadline_seconds=3600.0,
        new_context=context,
    )


async def _claim(arm: _Arm) -> None:
    rows = await arm.connection.fetch(arm.claim, arm.worker, ["m"], [_CLAIMED])
    if len(rows) != _CLAIMED:
        raise RuntimeError("the queue ran short")


async def _cost(house: House, arm: _Arm, work: object, rows: int) -> float:
    """PostgreSQL's CPU time per row, in microseconds."""
    began = tree_seconds(house.postgres_pid)
    for _ in range(_STATEMENTS):
        await work(arm)  # type: ignore[operator]
    return (tree_seconds(house.postgres_pid) - began) / _STATEMENTS / rows * 1e6


# --- throughput, simulated ------------------------------------------------------------------------

_PLACES = 16
_BACKLOG = 5_000
_OTHERS = 10
_EACH = 200


@dataclass(slots=True, frozen=True)
class _Job:
    at: float
    team: int
    seconds: float


class _FairQueue:
    """The order of docs/limits.md; weights are equal."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, _Job]] = []
        self._last: dict[int, list[float]] = {}
        self._count = 0

    def push(self, job: _Job) -> None:
        waiting = self._last.setdefault(job.team, [])
        behind = waiting[-1] + 1 if waiting else 0.0
        key = max(behind, self._heap[0][0] if self._heap else 0.0)
        waiting.append(key)
        heapq.heappush(self._heap, (key, self._count, job))
        self._count += 1

    def pop(self) -> _Job:
        _, _, job = heapq.heappop(self._heap)
        self._last[job.team].pop(0)
        return job

    def __len__(self) -> int:
        return len(self._heap)


class _Fifo(_FairQueue):
    """First in, first out."""

    def push(self, job: _Job) -> None:
        heapq.heappush(self._heap, (0.0, self._count, job))
        self._last.setdefault(job.team, []).append(0.0)
        self._count += 1


def _simulate(report: Report) -> None:
    dice = random.Random(1)
    jobs = [_Job(0.0, 0, dice.expovariate(1.0)) for _ in range(_BACKLOG)]
    for team in range(1, _OTHERS + 1):
        at = 0.0
        for _ in range(_EACH):
            at += dice.expovariate(0.8)
            jobs.append(_Job(at, team, dice.expovariate(1.0)))
    jobs.sort(key=lambda job: job.at)
    fifo, fair = (list(_serve(jobs, queue)) for queue in (_Fifo(), _FairQueue()))
    ends = [max(started + job.seconds for job, started in served) for served in (fifo, fair)]
    report.check("throughput, simulated", ends[0] / ends[1], ">=", 0.98, "x")
    waits = [_waits(served) for served in (fifo, fair)]
    report.notes.append(
        f"Simulated, in service times: the median of the other teams' waits is "
        f"{statistics.median(waits[1]):.2f}, first in first out {statistics.median(waits[0]):.0f}; "
        f"the longest {max(waits[1]):.2f}, and {max(waits[0]):.0f}."
    )
    firsts = [started - job.at for job, started in _firsts(fair)]
    report.check("a team's first, waits", max(firsts), "<=", 2.0, "service times")


def _serve(jobs: Sequence[_Job], queue: _FairQueue) -> Iterator[tuple[_Job, float]]:
    """Each job with the time at which it starts."""
    free = [0.0] * _PLACES
    place = 0
    while place < len(jobs) or len(queue):
        now = heapq.heappop(free)
        if not len(queue) and place < len(jobs):
            now = max(now, jobs[place].at)
        while place < len(jobs) and jobs[place].at <= now:
            queue.push(jobs[place])
            place += 1
        job = queue.pop()
        heapq.heappush(free, now + job.seconds)
        yield job, now


def _waits(served: Sequence[tuple[_Job, float]]) -> list[float]:
    return [started - job.at for job, started in served if job.team]


def _firsts(served: Sequence[tuple[_Job, float]]) -> Iterator[tuple[_Job, float]]:
    """The first job of each of the other teams."""
    seen = set()
    for job, started in sorted(served, key=lambda item: item[0].at):
        if job.team and job.team not in seen:
            seen.add(job.team)
            yield job, started
