"""Erasure of the texts of results with `store=false`, once they are delivered or old.

The ids, times, parameters, usage and the end of such a result stay. `erased_at` distinguishes an
erased output or prompt from an empty one.

A context is locked before its results, as by its deletion, so that no two transactions wait for each
other. The lock also waits for uncommitted results of the context, which only a later statement sees.
"""

from collections.abc import Iterable, Sequence
from uuid import UUID

import asyncpg

from app.core.database import Connection, Database

_MAX_BATCH = 200
# From a result's end: its client may have disconnected before.
_UNDELIVERED_SECONDS = 3600.0

_OF_ITS_END = "NOT store AND erased_at IS NULL AND finished_at IS NOT NULL"
_DELIVERED = f"SELECT id, context_id FROM results WHERE id = ANY($1::uuid[]) AND {_OF_ITS_END}"
_OLD = f"""
SELECT id, context_id FROM results
WHERE finished_at <= now() - make_interval(secs => $1) AND {_OF_ITS_END}
ORDER BY finished_at LIMIT {_MAX_BATCH}
"""
_LOCK = "SELECT id FROM contexts WHERE id = ANY($1::uuid[]) ORDER BY id FOR UPDATE {wait}"
_LOCK_FREE = _LOCK.format(wait="SKIP LOCKED")
_LOCK_ONE = _LOCK.format(wait="")
# The rendered prompt of a chat becomes empty, and not NULL: the metrics count it as one still.
# A context serves several results of one request: it goes with the last of them.
_ERASE = f"""
WITH picked AS (
  SELECT id FROM results
  WHERE id = ANY($2::uuid[]) AND context_id = ANY($1::uuid[]) AND {_OF_ITS_END}
  ORDER BY id FOR UPDATE
), erased AS (
  UPDATE results r SET erased_at = now(), output = NULL, logprobs = NULL, prompt_logprobs = NULL,
    prompt = CASE r.kind WHEN 'generation' THEN left(r.prompt, 0) END, vector = NULL, request = NULL,
    parameters = r.parameters - 'prompt_token_ids'
  FROM picked p WHERE r.id = p.id
)
UPDATE contexts c SET content = '', messages = NULL, erased_at = now()
WHERE c.id = ANY($1::uuid[]) AND c.erased_at IS NULL AND NOT EXISTS (
  SELECT FROM results o WHERE o.context_id = c.id AND o.erased_at IS NULL
    AND o.id NOT IN (SELECT id FROM picked))
"""

# A separate statement, which sees the words that the indexer stored while this one waited for locks.
_FORGET_WORDS = """
UPDATE result_search SET words = NULL WHERE result_id = ANY($1::uuid[]) AND words IS NOT NULL
"""


class Erasure:
    """Erases results with `store=false`; idempotent."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def erase(self, ids: Sequence[UUID]) -> None:
        await self._erase(await self._database.fetch(_DELIVERED, list(ids)))

    async def erase_undelivered(self) -> None:
        """Erase results that ended an hour ago and were not delivered."""
        while True:
            rows = await self._database.fetch(_OLD, _UNDELIVERED_SECONDS)
            await self._erase(rows)
            if len(rows) < _MAX_BATCH:
                return

    async def _erase(self, rows: Sequence[asyncpg.Record]) -> None:
        """Erase results of free contexts, then of one context at a time, which waits alone."""
        if not rows:
            return
        ids = [row["id"] for row in rows]
        contexts = {row["context_id"] for row in rows}
        for context_id in contexts - await self._erase_in(contexts, ids, _LOCK_FREE):
            await self._erase_in([context_id], ids, _LOCK_ONE)

    async def _erase_in(
        self, contexts: Iterable[UUID], ids: Sequence[UUID], lock: str
    ) -> set[UUID]:
        async def work(connection: Connection) -> set[UUID]:
            async with connection.transaction():
                rows = await connection.fetch(lock, list(contexts))
                locked = [row["id"] for row in rows]
                if locked:
                    await connection.execute(_ERASE, locked, ids)
                    await connection.execute(_FORGET_WORDS, ids)
            return set(locked)

        return await self._database.run(work)
