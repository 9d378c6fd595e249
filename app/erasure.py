"""Erasing what nobody wanted kept: texts of results with `store=false`, once delivered or old.

What is left of such a result is that it was: its ids, times, parameters, usage and how it ended.
`erased_at` tells an answer that is gone from an empty one.
"""

from collections.abc import Sequence
from uuid import UUID

from app.database import Database

_MAX_BATCH = 200
# From a result's end: its client may have left without it.
_UNDELIVERED_SECONDS = 3600.0

# A context serves several results of one request: it goes with the last of them.
_ERASE = """
WITH picked AS (
  SELECT r.id, r.context_id FROM results r WHERE {where} AND NOT r.store AND r.erased_at IS NULL
    AND r.finished_at IS NOT NULL
  ORDER BY r.finished_at LIMIT {limit} FOR UPDATE SKIP LOCKED
), erased AS (
  UPDATE results r SET erased_at = now(), prompt = NULL, output = NULL, logprobs = NULL,
    request = NULL
  FROM picked p WHERE r.id = p.id
), contexts_erased AS (
  UPDATE contexts c SET content = '', messages = NULL
  WHERE c.id IN (SELECT context_id FROM picked) AND NOT EXISTS (
    SELECT FROM results o WHERE o.context_id = c.id AND o.erased_at IS NULL
      AND o.id NOT IN (SELECT id FROM picked))
)
SELECT count(*) AS erased FROM picked
"""
_DELIVERED = _ERASE.format(where="r.id = ANY($1::uuid[])", limit="ALL")
_OLD = _ERASE.format(
    where="r.finished_at <= now() - make_interval(secs => $1)", limit=str(_MAX_BATCH)
)


class Erasure:
    """Erases results that are not to be stored; idempotent."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def erase(self, ids: Sequence[UUID]) -> None:
        """Erase results that were delivered just now; those that are to be kept stay."""
        await self._database.fetch(_DELIVERED, list(ids))

    async def erase_undelivered(self) -> None:
        """Erase what ended an hour ago and was not delivered."""
        while True:
            row = await self._database.fetchrow(_OLD, _UNDELIVERED_SECONDS)
            assert row is not None
            if row["erased"] < _MAX_BATCH:
                return
