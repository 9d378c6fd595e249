"""Retention: a week of results, kept for a day; the size of the tables by the simulated day.

The clock is a parameter: the week ends now, and every ten minutes of it some results are stored, claimed,
streamed into chunks and ended, by as many versions of their rows as the service writes; then the digest
and one pass of retention run, both the service's own, the pass by the week's clock. A simulated day takes
seconds, so autovacuum looks once a second instead of once a minute: it has far fewer turns than in a
real day. Two arms: the tables as the migrations leave them, and with PostgreSQL's own settings.
"""

import asyncio
import statistics
import time
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

import asyncpg

from app.core.database import Database
from app.core.ids import lowest_id, new_id
from app.core.settings import Settings
from app.core.settings.fields import DEFAULT_TEAM
from app.queue.depth import QueueDepth
from app.results.indexer import ResultIndexer
from app.results.retention.retention import Retention
from bench import progress
from bench.plots import Lines, Series
from bench.report import Options, Report
from bench.servers import House

_DAYS = 7
_STEP = timedelta(minutes=10)
_STEPS = 144  # a day
_MOST_A_DAY = 20_000
_KEPT_SECONDS = 86_400.0
_CHUNKS = 3  # of each result
_FULL = slice(1, 4)  # the days after the first ones are deleted
_LAST = slice(4, 7)
_GROWTH = 1.1
_LONGEST_SECONDS = 0.5
_COLUMNS = ["results", "its indexes", "contexts", "words", "queues", "all", "rows", "dead rows"]

_STORE = """
WITH i AS (SELECT * FROM unnest($1::uuid[], $2::uuid[]) AS i(context_id, id)), c AS (
  INSERT INTO contexts (id, team_id, content)
  SELECT context_id, $3, repeat('a prompt of some words, ' || id, 8) FROM i
)
INSERT INTO results (id, team_id, context_id, model_name, parameters, deadline_at)
SELECT id, $3, context_id, 'simulated', '{"max_tokens": 64, "temperature": 0}', $4 FROM i
"""
_CLAIM = """
UPDATE results SET worker_id = $2, attempt = 1, started_at = $3 WHERE id = ANY($1::uuid[])
"""
_APPEND = """
INSERT INTO result_chunks (result_id, attempt, "offset", text)
SELECT id, 1, $2 * 100, repeat('word ', 20) FROM unnest($1::uuid[]) AS i(id)
"""
_END = """
WITH ended AS (
  UPDATE results SET state = 'completed', finished_at = $2, first_token_at = $2,
    output = (SELECT string_agg(md5(id::text || n), ' ') FROM generate_series(1, 12) AS n),
    finish_reason = 'stop', prompt_tokens = 20, completion_tokens = 60
  WHERE id = ANY($1::uuid[]) RETURNING id
), swept AS (
  DELETE FROM result_chunks WHERE result_id = ANY($1::uuid[])
)
INSERT INTO undigested_results (result_id) SELECT id FROM ended
"""
_SIZES = """
SELECT pg_table_size('results') AS results, pg_indexes_size('results') AS indexes,
  pg_total_relation_size('contexts') AS contexts,
  pg_total_relation_size('result_search') AS words,
  pg_total_relation_size('result_chunks') + pg_total_relation_size('undigested_results') AS queues,
  pg_database_size(current_database()) AS everything,
  (SELECT count(*) FROM results) AS live,
  (SELECT sum(n_dead_tup)::bigint FROM pg_stat_user_tables
   WHERE relname IN ('results', 'contexts', 'result_search')) AS dead
"""
_WITH_PARAMETERS = """
SELECT oid::regclass::text AS name, reloptions AS options FROM pg_class
WHERE reloptions IS NOT NULL AND relkind = 'r' AND relnamespace = 'public'::regnamespace
"""


@dataclass(slots=True)
class _Week:
    """One arm: what each day's end found."""

    days: list[asyncpg.Record]
    seconds: float
    deleted: int
    retaining: float  # seconds of it
    longest: float  # seconds of a transaction


class Watched(Retention):
    """Knows how long its longest transaction took."""

    longest = 0.0

    async def _step(self, work, rows=0):  # type: ignore[no-untyped-def]
        began = time.perf_counter()
        try:
            return await super()._step(work, rows)
        finally:
            self.longest = max(self.longest, time.perf_counter() - began)


async def run(house: House, options: Options) -> Report:
    """Live the week twice."""
    a_day = min(_MOST_A_DAY, options.rows // 10)
    report = Report(
        "RETENTION", f"MB at the end of a day; {a_day:,} results a day, kept for one", _COLUMNS
    )
    series: list[Series] = []
    days = list(range(1, _DAYS + 1))
    for arm, has_parameters in (("as migrated", True), ("PostgreSQL's settings", False)):
        week = await _live(house, a_day, has_parameters=has_parameters)
        series += [
            Series(f"{text}, {arm}", days, [row[name] / 1e6 for row in week.days])
            for name, text in (("everything", "all"), ("results", "results"))
        ]
        for number, row in enumerate(week.days, 1):
            values = [row[name] / 1e6 for name in list(row.keys())[:6]]
            report.rows.append((f"{arm}, day {number}", [*values, row["live"], row["dead"] or 0]))
        report.raw[arm] = [dict(row) | {"dead": int(row["dead"] or 0)} for row in week.days]
        report.notes.append(
            f"{arm}: the week took {week.seconds:.0f} s, {week.retaining:.0f} s of it the passes, which "
            f"deleted {week.deleted:,} results ({week.deleted / week.retaining:,.0f} a second); the "
            f"longest transaction took {1000 * week.longest:.0f} ms."
        )
        last = week.days[-1]
        if has_parameters:
            for name in ("results", "indexes", "everything"):
                full, late = (
                    statistics.mean(row[name] for row in week.days[days]) for days in (_FULL, _LAST)
                )
                report.check(f"{name}, days 5 to 7 : days 2 to 4", late / full, "<=", _GROWTH)
            report.check("results left : of a day", last["live"] / a_day, "<=", 1.05)
            report.check("the week", week.seconds, "<=", 300, "s")
            report.check("longest transaction", week.longest, "<=", _LONGEST_SECONDS, "s")
    title = f"A week of {a_day:,} results a day, each kept for a day"
    report.plots.append(Lines("size", title, "day", "MB on disk at its end", series))
    return report


async def _live(house: House, a_day: int, *, has_parameters: bool) -> _Week:
    environment = await house.environment(f"bench_retention_{int(has_parameters)}")
    settings = Settings.model_validate(
        environment
        | {
            "LLM_RESULTS_RETENTION_SECONDS": _KEPT_SECONDS,
            "LLM_PROMPTS_RETENTION_SECONDS": _KEPT_SECONDS,
        }
    )
    connection = await house.connect(settings.database_name)
    await connection.execute("ALTER SYSTEM SET autovacuum_naptime = '1s'")
    await connection.execute("SELECT pg_reload_conf()")
    await connection.execute("UPDATE digest_state SET passes_left = 0")
    if not has_parameters:
        for row in await connection.fetch(_WITH_PARAMETERS):
            names = ", ".join(option.split("=")[0] for option in row["options"])
            await connection.execute(f"ALTER TABLE {row['name']} RESET ({names})")
    async with Database(settings, "bench") as database:
        now = (
            await connection.fetchval("SELECT date_trunc('minute', now())") - _DAYS * _STEPS * _STEP
        )

        async def clock() -> datetime:
            return now  # type: ignore[no-any-return]

        digest = ResultIndexer(database, QueueDepth(database, settings), settings)
        retention = Watched(database, settings, clock=clock, share=1)
        week = _Week([], 0.0, 0, 0.0, 0.0)
        began = time.perf_counter()
        arm = "as migrated" if has_parameters else "PostgreSQL's settings"
        for day in range(_DAYS):
            progress.show(f"{arm}, day {day + 1} of {_DAYS}")
            for step in range(_STEPS):
                now += _STEP
                count = a_day * (step + 1) // _STEPS - a_day * step // _STEPS
                await _work(connection, now, count)
                while await digest.index():
                    pass
                resumed = time.perf_counter()
                await retention.look()
                week.retaining += time.perf_counter() - resumed
            await connection.execute("SELECT pg_stat_clear_snapshot()")
            week.days += await connection.fetch(_SIZES)
        week.seconds = time.perf_counter() - began
        week.deleted = _DAYS * a_day - week.days[-1]["live"]
        week.longest = retention.longest
    await connection.close()
    return week


async def _work(connection: asyncpg.Connection, now: datetime, count: int) -> None:
    """The whole life of so many results, ten seconds before now."""
    ids = [_id_at(now - timedelta(seconds=20)) for _ in range(count)]
    contexts = [_id_at(now - timedelta(seconds=20)) for _ in range(count)]
    await connection.execute(_STORE, contexts, ids, DEFAULT_TEAM, now + timedelta(days=1))
    await connection.execute(_CLAIM, ids, new_id(), now - timedelta(seconds=19))
    for place in range(_CHUNKS):
        await connection.execute(_APPEND, ids, place)
    await connection.execute(_END, ids, now - timedelta(seconds=10))
    await asyncio.sleep(0)


def _id_at(moment: datetime) -> UUID:
    """An id as it would have been made then."""
    return UUID(int=lowest_id(moment).int | new_id().int & ((1 << 62) - 1))
