"""Tables of any size, as months of use would leave them: filled in SQL, with ids spread over time."""

import asyncpg

from app.core.settings.fields import DEFAULT_TEAM
from app.results.search_words import TEAM_MARK

SPAN_SECONDS = 30 * 86_400  # from the oldest row to the newest
CONTEXTS = 1_000

_CONTEXTS = """
INSERT INTO contexts (id, team_id, content)
SELECT md5('context' || i)::uuid, $1, 'a prompt of some words, number ' || i
FROM generate_series(1, $2::int) AS i
"""

# Every filter meets common and rare values: 1 in 2 rows is of context 1, 1 in 1,000 of model
# "rare"; 3 in 100 failed, 1 in 1,000 of these with "engine_crashed".
_RESULTS = """
INSERT INTO results (id, team_id, context_id, model_name, parameters, deadline_at, state, attempt,
  started_at, first_token_at, finished_at, output, finish_reason, prompt_tokens,
  completion_tokens, error_code, error_message, error_retryable)
SELECT r.id, $1, md5('context' || r.context)::uuid, r.model,
  '{"max_tokens": 64, "temperature": 0}', now(), r.state,
  (r.state <> 'pending')::int, r.at, r.at, CASE WHEN r.state <> 'pending' THEN r.at END,
  CASE WHEN r.state = 'completed' THEN repeat(md5(r.id::text) || ' ', 9) END,
  CASE r.state WHEN 'completed' THEN 'stop' WHEN 'failed' THEN 'error' END,
  7, CASE WHEN r.state = 'completed' THEN 64 END,
  r.error, CASE WHEN r.state = 'failed' THEN 'It failed.' END,
  CASE WHEN r.state = 'failed' THEN r.error <> 'deadline_exceeded' END
FROM (
  SELECT uuidv7(make_interval(secs => -$3::float8 * i / $2)) AS id,
    now() - make_interval(secs => $3::float8 * i / $2) AS at,
    CASE WHEN c < 0.5 THEN 1 ELSE 1 + (c * 1000)::int % $4::int END AS context,
    CASE WHEN m < 0.001 THEN 'rare' WHEN m < 0.1 THEN 'quiet' ELSE 'busy' END AS model,
    CASE WHEN s < 0.001 THEN 'pending' WHEN s < 0.031 THEN 'failed' ELSE 'completed' END AS state,
    CASE WHEN s < 0.001 OR s >= 0.031 THEN NULL WHEN e < 0.001 THEN 'engine_crashed'
         WHEN e < 0.1 THEN 'deadline_exceeded' ELSE 'model_error' END AS error
  FROM generate_series(1, $2::int) AS i,
    LATERAL (SELECT random() + 0 * i AS c, random() AS m, random() AS s, random() AS e) AS dice
) AS r
"""


_WORDS = f"""
INSERT INTO result_search (result_id, team_id, words)
SELECT r.id, r.team_id, to_tsvector('simple', concat_ws(E'\\n', c.content, r.output, r.error_message))
  || array_to_tsvector(ARRAY['{TEAM_MARK}' || encode(convert_to(r.team_id, 'UTF8'), 'hex')])
FROM results r JOIN contexts c ON c.id = r.context_id WHERE r.state <> 'pending'
"""
_DIGESTED = "UPDATE digest_state SET passes_left = 0"


async def digest(connection: asyncpg.Connection) -> None:
    """Make all that ended searchable, as `app.results.indexer` does it in the background."""
    index = await connection.fetchrow(
        """SELECT indexname, indexdef FROM pg_indexes
           WHERE tablename = 'result_search' AND indexdef LIKE '%gin%'"""
    )
    assert index is not None
    await connection.execute(f"DROP INDEX {index['indexname']}")
    await connection.execute(_WORDS)
    await connection.execute(index["indexdef"])
    await connection.execute(_DIGESTED)
    await connection.execute("VACUUM (ANALYZE) result_search")


async def fill(connection: asyncpg.Connection, rows: int) -> None:
    """Write so many results; indexes are made afterwards, and statistics taken."""
    indexes = await connection.fetch(
        """SELECT indexname, indexdef FROM pg_indexes
           WHERE tablename = 'results' AND indexname NOT LIKE 'pk%'"""
    )
    await connection.execute(_CONTEXTS, DEFAULT_TEAM, CONTEXTS)
    for index in indexes:
        await connection.execute(f"DROP INDEX {index['indexname']}")
    await connection.execute("SET session_replication_role = replica")  # the contexts are there
    await connection.execute(_RESULTS, DEFAULT_TEAM, rows, float(SPAN_SECONDS), CONTEXTS)
    await connection.execute("SET session_replication_role = DEFAULT")
    await connection.execute("SET maintenance_work_mem = '512MB'")
    for index in indexes:
        await connection.execute(index["indexdef"])
    await connection.execute("VACUUM (ANALYZE) results")
    await connection.execute("CHECKPOINT")
