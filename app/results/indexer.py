"""What becomes of an ended result beside its row: its words, to be found by, and its minute's totals.

The statement that ends a result leaves its id in `undigested_results`. A worker takes these in
batches: one transaction removes an id, writes the result's row of `result_search`, and adds it to its
minute. That row is the mark that it was counted: who finds it there counts nothing. So each result is
counted once, whoever dies in between, however late it was committed, and whatever the clock says.

Results that ended before there was a digest, or under a process of the version before, are found by a
walk over all of them, newest first, a few at a time, with pauses; a day later by a second walk. What
is digested already it passes over.
"""

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import asyncpg
import orjson

from app.core import metrics
from app.core.database import Connection, Database, is_transient
from app.core.settings import Settings
from app.queue.depth import QueueDepth
from app.results.search import TEAM_MARK
from app.results.stats import histogram

logger = logging.getLogger(__name__)

_PERIOD_SECONDS = 1.0
# What was committed late, or was held by somebody, stands behind the place where the last batch ended.
# To look there means to pass all that is gone, until it is vacuumed: it is done this often.
_LATE_SECONDS = 5.0
_MOST = 500  # results of a transaction
_PIECE_BYTES = 2_000_000  # of their texts
_CHARACTERS = 100_000  # of each text are searched
# With so many, no text exceeds what a tsvector holds (1 MB), whatever its words are.
FEW_CHARACTERS = 10_000
_MOST_DELETED = 1_000  # minutes of a statement
_BROKEN_SECONDS = 60.0

_LOCK = "SELECT pg_try_advisory_xact_lock(hashtext('digest'), 0)"
_LOOK = """
SELECT EXISTS (SELECT FROM undigested_results WHERE place > $1) AS is_due,
  passes_left > 0 AND resumes_at <= now() AS may_walk,
  sampled_minute IS DISTINCT FROM date_trunc('minute', now()) AS is_new_minute
FROM digest_state
"""

_TEXT_SIZE = f"""coalesce(least(octet_length(r.output), {_CHARACTERS}), 0)
  + coalesce(least(octet_length(c.content), {_CHARACTERS}), 0)
  + coalesce(pg_column_size(c.messages), 0) AS size"""

# OFFSET 0: each row is found by its id. A generic plan would join whole tables, as it does not know
# how few are asked for.
_CONTEXT = "LATERAL (SELECT * FROM contexts WHERE id = r.context_id OFFSET 0) c ON true"
_DUE = f"""
SELECT u.place, u.result_id AS id, r.id IS NULL AS is_gone, true AS is_due, {_TEXT_SIZE}
FROM (SELECT * FROM undigested_results WHERE place > $2 ORDER BY place LIMIT $1) u
LEFT JOIN LATERAL (SELECT * FROM results WHERE id = u.result_id OFFSET 0) r ON true
LEFT JOIN {_CONTEXT} ORDER BY u.place
"""
_DISMISS = "DELETE FROM undigested_results WHERE place = ANY($1::bigint[])"

# Every row that it walks over, so that each step is a small one.
_WALK = f"""
SELECT 0 AS place, r.id, r.state <> 'pending' AND s.result_id IS NULL AS is_due, {_TEXT_SIZE}
FROM (SELECT * FROM results WHERE id < $2 ORDER BY id DESC LIMIT $1) r
LEFT JOIN LATERAL (SELECT result_id FROM result_search WHERE result_id = r.id OFFSET 0) s ON true
JOIN {_CONTEXT} ORDER BY r.id DESC
"""

# Results are locked in the order of ids, as all lock them. An attribution is no text. A text that is
# not to be stored leaves no words behind.
_DIGEST = f"""
WITH held AS MATERIALIZED (
  SELECT id FROM results WHERE id = ANY($1::uuid[]) AND state <> 'pending'
  ORDER BY id FOR KEY SHARE {{wait}}
), marked AS (
  INSERT INTO result_search (result_id, team_id, words)
  SELECT r.id, r.team_id,
    CASE WHEN r.kind = 'generation' AND r.store AND r.erased_at IS NULL AND c.erased_at IS NULL
    THEN to_tsvector('simple', concat_ws(E'\\n',
      left(coalesce(c.content, (SELECT string_agg(m ->> 'content', E'\\n' ORDER BY place)
        FROM jsonb_array_elements(
          CASE jsonb_typeof(c.messages) WHEN 'array' THEN c.messages END) WITH ORDINALITY AS i(m, place))), $2),
      left(r.output, $2), left(r.error_message, $2)))
      || array_to_tsvector(ARRAY['{TEAM_MARK}' || encode(convert_to(r.team_id, 'UTF8'), 'hex')])
    END
  FROM results r JOIN contexts c ON c.id = r.context_id
  WHERE r.id = ANY (ARRAY(SELECT id FROM held)) ORDER BY r.id
  ON CONFLICT DO NOTHING RETURNING result_id
), dismissed AS (
  DELETE FROM undigested_results
  WHERE place = ANY($4::bigint[]) AND result_id = ANY (ARRAY(SELECT id FROM held))
)
SELECT id, team_id, model_name, coalesce(error_code, 'completed') AS ended_as, prompt_tokens,
  completion_tokens, started_at, first_token_at, finished_at,
  CASE jsonb_typeof(parameters -> 'max_tokens')
    WHEN 'number' THEN (parameters ->> 'max_tokens')::float8 END AS max_tokens,
  finished_at >= now() - make_interval(days => $3) AS is_counted,
  finished_at >= now() - interval '1 minute' AS is_recent
FROM results WHERE id = ANY (ARRAY(SELECT result_id FROM marked))
"""

_SUMS = ("results", "prompt_tokens", "completion_tokens")
_HISTOGRAMS = ("queue_seconds", "first_token_seconds", "seconds")
_NAMES = ("team_id", "minute", "model_name", "ended_as", *_SUMS, *_HISTOGRAMS)


def _added(name: str) -> str:
    return (
        f"{name} = ARRAY(SELECT a + b FROM unnest(s.{name}, excluded.{name})"
        " WITH ORDINALITY AS i(a, b, place) ORDER BY place)"
    )


_COUNT = f"""
INSERT INTO minute_stats AS s ({", ".join(_NAMES)})
SELECT {", ".join(_NAMES)} FROM jsonb_to_recordset($1::jsonb) AS i(
  team_id text, minute timestamptz, model_name text, ended_as text, results int,
  prompt_tokens bigint, completion_tokens bigint,
  {", ".join(f"{name} int[]" for name in _HISTOGRAMS)})
ON CONFLICT (team_id, minute, model_name, ended_as) DO UPDATE SET
  {", ".join(f"{name} = s.{name} + excluded.{name}" for name in _SUMS)},
  {", ".join(_added(name) for name in _HISTOGRAMS)}
"""

# The pause is a share of what the step took, and every process keeps it.
_FROM = "SELECT digested_from FROM digest_state WHERE passes_left > 0 AND resumes_at <= now()"
_STEP = """
UPDATE digest_state SET digested_from = $1,
  resumes_at = clock_timestamp() + 4 * (clock_timestamp() - now())
"""
_BEGIN_ANEW = """
UPDATE digest_state SET passes_left = passes_left - 1, resumes_at = now() + interval '1 day',
  digested_from = 'ffffffff-ffff-ffff-ffff-ffffffffffff'
"""

_BEGIN_MINUTE = """
UPDATE digest_state SET sampled_minute = date_trunc('minute', now())
WHERE sampled_minute IS DISTINCT FROM date_trunc('minute', now()) RETURNING sampled_minute
"""
_SAMPLE = """
INSERT INTO queue_samples (minute, name, queued, running)
SELECT $1, * FROM unnest($2::text[], $3::int[], $4::int[]) ON CONFLICT DO NOTHING
"""
_FORGET = """
DELETE FROM {table} WHERE ctid = ANY (ARRAY(
  SELECT ctid FROM {table} WHERE minute < now() - make_interval(days => $1) LIMIT $2))
"""


@dataclass(slots=True)
class _Totals:
    """Of one minute, team, model and end."""

    results: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    queue_seconds: list[int] = field(default_factory=lambda: [0] * histogram.SIZE)
    first_token_seconds: list[int] = field(default_factory=lambda: [0] * histogram.SIZE)
    seconds: list[int] = field(default_factory=lambda: [0] * histogram.SIZE)

    def add(self, row: asyncpg.Record) -> None:
        """Count one result: how long it waited, its first token from its start, and all of it."""
        created = (row["id"].int >> 80) / 1000  # as in `ids`; of other ids no date can be made
        ended, started, first = (
            moment and moment.timestamp()
            for moment in (row["finished_at"], row["started_at"], row["first_token_at"])
        )
        self.results += 1
        self.prompt_tokens += row["prompt_tokens"] or 0
        self.completion_tokens += row["completion_tokens"] or 0
        self.seconds[histogram.bucket_of(ended - created)] += 1
        if started is not None:
            self.queue_seconds[histogram.bucket_of(started - created)] += 1
            if first is not None:
                self.first_token_seconds[histogram.bucket_of(first - started)] += 1


class ResultIndexer:
    """Digests what ended, and samples the queues once a minute; any number of processes may run it."""

    def __init__(self, database: Database, depth: QueueDepth, settings: Settings) -> None:
        self._database = database
        self._depth = depth
        self._days = settings.history_days
        self._most = _MOST
        self._place = 0  # where the last batch ended
        self._looked_at = 0.0  # monotonic time of the last look from the first place on

    async def run(self) -> None:
        """Digest until cancelled."""
        while True:
            try:
                pause = await self.step()
                self._most = min(_MOST, 2 * self._most)
            except Exception as error:
                # Nobody's answer depends on it: the process goes on. Should it have been too much
                # at once, it is less next time.
                self._most = max(1, self._most // 4)
                pause = _PERIOD_SECONDS
                if not is_transient(error):
                    pause = _BROKEN_SECONDS
                    logger.exception("results are not digested", extra={"action": "not_digested"})
            await asyncio.sleep(pause)

    async def step(self) -> float:
        """Do what is due; how many seconds to leave to others, however much there is to do."""
        began = time.monotonic()
        if began - self._looked_at >= _LATE_SECONDS:
            self._place, self._looked_at = 0, began
        (look,) = await self._database.fetch(_LOOK, self._place)
        if look["is_new_minute"]:
            await self._begin_minute()
        if look["is_due"] and await self.digest():
            return time.monotonic() - began
        if look["may_walk"] and await self.walk():
            return min(_PERIOD_SECONDS, 5 * (time.monotonic() - began))
        return _PERIOD_SECONDS

    async def digest(self) -> bool:
        """Digest a batch of what ended; whether there may be more."""

        ended: list[asyncpg.Record] = []

        async def work(connection: Connection) -> tuple[int, bool]:
            ended.clear()
            async with connection.transaction():
                if not await connection.fetchval(_LOCK):
                    return self._place, False
                rows = await connection.fetch(_DUE, self._most, self._place)
                gone = [row["place"] for row in rows if row["is_gone"]]
                if gone:
                    await connection.execute(_DISMISS, gone)
                done = await self._digest_first(connection, rows, "SKIP LOCKED", ended)
            is_more = len(rows) == self._most or done < len(rows)
            return rows[done - 1]["place"] if done else self._place, is_more

        self._place, is_more = await self._database.run(work)
        for row in ended:
            _measure(row)
        return is_more

    async def walk(self) -> bool:
        """Digest what is due of some hundred older results; whether there are more, at once."""

        ended: list[asyncpg.Record] = []

        async def work(connection: Connection) -> bool:
            ended.clear()
            async with connection.transaction():
                if not await connection.fetchval(_LOCK):
                    return False
                digested_from = await connection.fetchval(_FROM)
                if digested_from is None:
                    return False
                rows = await connection.fetch(_WALK, self._most, digested_from)
                done = await self._digest_first(connection, rows, "", ended)
                if done:
                    await connection.execute(_STEP, rows[done - 1]["id"])
                else:
                    await connection.execute(_BEGIN_ANEW)
            return bool(done)

        is_more = await self._database.run(work)
        for row in ended:
            if row["is_recent"]:  # it ended while we looked elsewhere; the others did so long ago
                _measure(row)
        return is_more

    async def _digest_first(
        self,
        connection: Connection,
        rows: Sequence[asyncpg.Record],
        wait: str,
        ended: list[asyncpg.Record],
    ) -> int:
        """Digest those that are due of as many rows as go together; how many rows these are.

        What was not digested before is added to `ended`.
        """
        count, characters = _count_together(rows), _CHARACTERS
        while count:
            due = [row for row in rows[:count] if row["is_due"]]
            try:
                async with connection.transaction():
                    ended += await self._digest(connection, due, characters, wait)
            except asyncpg.ProgramLimitExceededError:
                if count > 1:
                    count //= 2
                elif characters > FEW_CHARACTERS:
                    characters = FEW_CHARACTERS
                else:
                    raise
            else:
                break
        return count

    async def _digest(
        self, connection: Connection, due: Sequence[asyncpg.Record], characters: int, wait: str
    ) -> Sequence[asyncpg.Record]:
        if not due:
            return []
        rows = await connection.fetch(
            _DIGEST.format(wait=wait),
            [row["id"] for row in due],
            characters,
            self._days,
            [row["place"] for row in due],
        )
        totals: dict[tuple[str, datetime, str, str], _Totals] = {}
        for row in rows:
            if row["is_counted"]:
                minute = row["finished_at"].replace(second=0, microsecond=0)
                key = (row["team_id"], minute, row["model_name"], row["ended_as"])
                totals.setdefault(key, _Totals()).add(row)
        if totals:
            await connection.execute(_COUNT, orjson.dumps(list(_to_rows(totals))).decode())
        return rows

    async def _begin_minute(self) -> None:
        """Once a minute, and in one process: sample the queues, and forget what is too old."""
        rows = await self._database.fetch(_BEGIN_MINUTE)
        if not rows:
            return
        loads = await self._depth.by_model()
        await self._database.fetch(
            _SAMPLE,
            rows[0]["sampled_minute"],
            list(loads),
            [load.queued for load in loads.values()],
            [load.running for load in loads.values()],
        )
        for table in ("minute_stats", "queue_samples"):
            await self._forget(_FORGET.format(table=table))

    async def _forget(self, statement: str) -> None:
        async def work(connection: Connection) -> str:
            return await connection.execute(statement, self._days, _MOST_DELETED)

        while await self._database.run(work) == f"DELETE {_MOST_DELETED}":
            pass


def _measure(row: asyncpg.Record) -> None:
    """Have this process's metrics count one result that ended."""
    model = row["model_name"]
    created = (row["id"].int >> 80) / 1000
    ended = row["finished_at"].timestamp()
    metrics.RESULTS.of(model, row["ended_as"]).inc()
    metrics.RESULT_SECONDS.of(model).observe(max(0.0, ended - created))
    for tokens, total, each in (
        (row["prompt_tokens"], metrics.PROMPT_TOKENS, metrics.RESULT_PROMPT_TOKENS),
        (row["completion_tokens"], metrics.COMPLETION_TOKENS, metrics.RESULT_COMPLETION_TOKENS),
    ):
        if tokens:
            total.of(row["team_id"], model).inc(tokens)
            each.of(model).observe(tokens)
    if row["max_tokens"] is not None:
        metrics.RESULT_MAX_TOKENS.of(model).observe(row["max_tokens"])
    if row["started_at"] is None:
        return
    started = row["started_at"].timestamp()
    metrics.QUEUE_WAIT.of(model).observe(max(0.0, started - created))
    metrics.INFERENCE.of(model).observe(max(0.0, ended - started))
    if row["first_token_at"] is not None:
        first = row["first_token_at"].timestamp()
        metrics.FIRST_TOKEN.of(model).observe(max(0.0, first - created))
        if (row["completion_tokens"] or 0) > 1:
            spent = max(0.0, ended - first)
            metrics.INTER_TOKEN.of(model).observe(spent / (row["completion_tokens"] - 1))


def _count_together(rows: Sequence[asyncpg.Record]) -> int:
    """How many of the first rows have texts that are not too long together; one at least."""
    together = 0
    for place, row in enumerate(rows):
        together += row["size"] if row["is_due"] else 0
        if place and together > _PIECE_BYTES:
            return place
    return len(rows)


def _to_rows(
    totals: dict[tuple[str, datetime, str, str], _Totals],
) -> Iterator[dict[str, Any]]:
    """In their order, in which all lock minutes."""
    for key, total in sorted(totals.items(), key=lambda item: item[0]):
        values = (*key, *(getattr(total, name) for name in (*_SUMS, *_HISTOGRAMS)))
        yield dict(zip(_NAMES, values, strict=True))
