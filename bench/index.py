"""INDEX: results indexed and deleted a second, which share nothing but PostgreSQL.

Processes with one indexer each, that never rests, empty the same queue of ended results: 1, 2 and 4 of
them in turn; short results, long ones, and long ones with the search off. Then one pass of retention deletes a backlog of results with their prompts, words, keys and
webhook deliveries: once without rests, and once with the rests of the service, which are short behind
a backlog. The rows are written by SQL, their words by the indexer.
"""

import asyncio
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice

import asyncpg

from app.core.database import Database
from app.core.settings import Settings
from app.core.settings.fields import DEFAULT_TEAM
from app.queue.depth import QueueDepth
from app.results.indexer import ResultIndexer
from app.results.retention.pacing import SHARE
from bench import progress
from bench.corpus import texts
from bench.cpu import exact_seconds
from bench.report import Options, Report, median_ratio, medians
from bench.retention import Watched
from bench.servers import House

_WORD, _LONG, _OFF = "a word", "3,000 characters", "3,000 characters, search off"
_RESULTS = {_WORD: 20_000, _LONG: 4_000, _OFF: 12_000}
_INDEXERS = (1, 2, 4)
_BACKLOG = 100_000  # results of a word, that one pass deletes
_ROWS = 500  # of a statement that fills
_CHARACTERS = 3_000
_DOCUMENTS = 3_000  # that the texts are parts of
_LOOK_SECONDS = 0.005
_ROUNDS = 2
_GROWTH = 1.2  # by a second indexer: differences below are not findings
_DELETED = 5_000
_LONGEST_SECONDS = 0.5
_COLUMNS = ["results/s", "PostgreSQL us", "process us", "cores"]

_FILL = """
WITH i AS MATERIALIZED (
  SELECT uuidv7(interval '-2 d') AS id, uuidv7(interval '-2 d') AS context_id, t.*
  FROM unnest($1::text[], $2::text[]) AS t(prompt, answer)
), c AS (
  INSERT INTO contexts (id, team_id, content) SELECT context_id, $3, prompt FROM i
)
INSERT INTO results (id, team_id, context_id, model_name, parameters, deadline_at, state, attempt,
  started_at, first_token_at, finished_at, output, finish_reason, prompt_tokens, completion_tokens)
SELECT id, $3, context_id, 'm', '{"max_tokens": 64}', now(), 'completed', 1, now() - interval '2 d',
  now() - interval '2 d', now() - interval '2 d', answer, 'stop', 20, 60 FROM i
"""
_EMPTY = "TRUNCATE contexts, results, result_search, undigested_results, idempotency_keys, webhook_deliveries, minute_stats"
_QUEUE = "INSERT INTO undigested_results (result_id) SELECT id FROM results ORDER BY id"
_BELONGINGS = """
INSERT INTO idempotency_keys SELECT '{team}', id::text, '', id, now() + interval '1 d' FROM results;
INSERT INTO webhook_deliveries (result_id, team_id, url, state, finished_at)
SELECT id, '{team}', 'http://localhost/', 'delivered', now() FROM results
"""
_LEFT = """
SELECT (SELECT count(*) FROM results) + (SELECT count(*) FROM contexts)
  + (SELECT count(*) FROM result_search) + (SELECT count(*) FROM idempotency_keys)
  + (SELECT count(*) FROM webhook_deliveries)
"""


@dataclass(slots=True, frozen=True)
class _Run:
    rate: float
    postgres: float  # seconds of CPU a result
    process: float

    def columns(self) -> list[float]:
        cores = self.rate * (self.postgres + self.process)
        return [self.rate, self.postgres * 1e6, self.process * 1e6, cores]


async def run(house: House, options: Options) -> Report:
    """Index each kind by 1, 2 and 4 processes; then delete."""
    report = Report("INDEX", "results indexed, and deleted", _COLUMNS)
    rounds = min(options.rounds, _ROUNDS)
    environment = await house.environment("bench_index")
    connection = await house.connect("bench_index")
    await connection.execute("UPDATE digest_state SET passes_left = 0")
    for kind in _RESULTS:
        chosen = environment | {"LLM_SEARCH": "off" if kind == _OFF else "words"}
        runs: dict[int, list[_Run]] = {count: [] for count in _INDEXERS}
        for number in range(rounds):
            for count, found in runs.items():
                progress.show(f"{kind}, {count} indexers, round {number + 1} of {rounds}")
                found.append(await _index(house, connection, chosen, kind, count))
        for count, found in runs.items():
            report.rows.append(
                (f"indexed, {kind}, {count} x", medians([one.columns() for one in found]))
            )
        report.raw[kind] = {
            str(count): [one.columns() for one in found] for count, found in runs.items()
        }
        one, two = ([one.rate for one in runs[count]] for count in (1, 2))
        report.check(f"{kind}: two indexers : one", median_ratio(two, one), ">=", _GROWTH)
    for name, share in (("without rests", 1.0), ("with rests", SHARE)):
        progress.show(f"deleting {name}")
        deleted, longest = await _delete(house, connection, environment, share)
        report.rows.append((f"deleted, {_WORD}, {name}", deleted.columns()))
        report.raw[f"deleted {name}"] = [*deleted.columns(), longest]
        report.check(f"deleted {name}", deleted.rate, ">=", _DELETED, "results/s")
        if share == 1:
            report.check("longest transaction", longest, "<=", _LONGEST_SECONDS, "s")
    await connection.close()
    return report


async def _fill(connection: asyncpg.Connection, kind: str, count: int) -> None:
    words = " ".join(islice(texts(5), _DOCUMENTS))
    await connection.execute(_EMPTY)
    for start in range(0, count, _ROWS):
        starts = [place * 100 % (len(words) - _CHARACTERS) for place in range(start, start + _ROWS)]
        said = [words[place:][:_CHARACTERS] for place in starts]
        prompts = ["Write it." if kind == _WORD else text[: _CHARACTERS // 3] for text in said]
        answers = [" word" if kind == _WORD else text[_CHARACTERS // 3 :] for text in said]
        await connection.execute(_FILL, prompts, answers, DEFAULT_TEAM)
    await connection.execute(_QUEUE)
    await _settle(connection)


async def _settle(connection: asyncpg.Connection) -> None:
    await connection.execute("VACUUM (ANALYZE)")
    await connection.execute("CHECKPOINT")


async def _index(
    house: House,
    connection: asyncpg.Connection,
    environment: Mapping[str, str],
    kind: str,
    count: int,
) -> _Run:
    results = _RESULTS[kind]
    await _fill(connection, kind, results)
    indexers = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "bench.index"), env=environment, stdin=-1, stdout=-1
        )
        for _ in range(count)
    ]
    for one in indexers:
        await _line(one)  # it is connected
    before, began = exact_seconds(house.postgres_pid), time.perf_counter()
    for one in indexers:
        _go_on(one)
    process = sum([float(await _line(one)) for one in indexers])
    seconds = time.perf_counter() - began
    # Their backends live on until now, with the CPU time that they used.
    postgres = exact_seconds(house.postgres_pid) - before
    for one in indexers:
        _go_on(one)
        await one.wait()
    counted = await connection.fetchval("SELECT sum(results) FROM minute_stats")
    if counted != results:
        raise RuntimeError(f"{counted} of {results} results were counted")
    return _Run(results / seconds, postgres / results, process / results)


async def _line(process: asyncio.subprocess.Process) -> bytes:
    assert process.stdout is not None
    return await process.stdout.readline()


def _go_on(process: asyncio.subprocess.Process) -> None:
    assert process.stdin is not None
    process.stdin.write(b"\n")


async def _delete(
    house: House, connection: asyncpg.Connection, environment: dict[str, str], share: float
) -> tuple[_Run, float]:
    """One pass that deletes everything; and the seconds of its longest step, with its rest."""
    kept = {"LLM_RESULTS_RETENTION_SECONDS": "3600", "LLM_PROMPTS_RETENTION_SECONDS": "3600"}
    settings = Settings.model_validate(environment | kept)
    await _fill(connection, _WORD, _BACKLOG)
    async with Database(settings, "bench") as database:
        indexer = ResultIndexer(database, QueueDepth(database, settings), settings)
        while await indexer.index():
            pass
        await connection.execute(_BELONGINGS.format(team=DEFAULT_TEAM))
        await connection.execute("UPDATE retention_state SET looked_at = NULL, trusted_at = NULL")
        await _settle(connection)
        retention = Watched(database, settings, share=share)
        postgres, process = exact_seconds(house.postgres_pid), time.process_time()
        began = time.perf_counter()
        await retention.look()
        seconds = time.perf_counter() - began
        postgres = exact_seconds(house.postgres_pid) - postgres
        process = time.process_time() - process
    left = await connection.fetchval(_LEFT)
    if left:
        raise RuntimeError(f"{left} rows of {_BACKLOG} deleted results are left")
    found = _Run(_BACKLOG / seconds, postgres / _BACKLOG, process / _BACKLOG)
    return found, retention.longest


async def _index_all(settings: Settings) -> None:
    """Index until the queue is empty, for `_index`, with which it takes turns by lines."""
    async with Database(settings, "bench") as database:
        indexer = ResultIndexer(database, QueueDepth(database, settings), settings)
        await database.fetch("SELECT 1")
        _say("connected")
        began = time.process_time()
        while True:
            if not await indexer.index():
                if not await database.fetch("SELECT FROM undigested_results LIMIT 1"):
                    break
                await asyncio.sleep(_LOOK_SECONDS)  # the rest is in the hands of others
        _say(str(time.process_time() - began))


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
    sys.stdin.readline()


if __name__ == "__main__":
    asyncio.run(_index_all(Settings.model_validate({})))
