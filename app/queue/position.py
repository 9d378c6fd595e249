"""Estimates of a queued result's place and wait, at most a second old.

A process reads the head of a model's queue once a second, and only while clients
poll for it: they share one statement.
"""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal
from uuid import UUID

from app.core.database import Connection, Database
from app.core.errors import DatabaseUnavailableError
from app.core.group_commit import Batcher

_HEAD = 1000
_MAX_BATCH = 1000
_CACHE_TTL_SECONDS = 1.0
_RETRY_SECONDS = 1.0  # an estimate is not worth a longer wait
_MAX_POLL_SECONDS = 30

# The head in the order of claims (`claim`), and what the living workers finish per second. The
# limit is an argument, as in a claim: planned for a thousand rows, the statement sorts the queues of
# all models instead of walking down the index.
_READ = """
SELECT m.name,
  ARRAY(
    SELECT r.id FROM results r
    WHERE r.model_name = m.name
      AND r.state = 'pending' AND r.worker_id IS NULL
    ORDER BY r.priority DESC, r.fair_key, r.id LIMIT $2) AS head,
  (SELECT sum((w.load -> m.name ->> 'results_per_second')::float8) FROM workers w
   WHERE w.dead_at IS NULL AND w.lease_expires_at > now()) AS rate
FROM unnest($1::text[]) AS m(name)
"""


@dataclass(slots=True, frozen=True)
class Estimate:
    """A place in the queue: 1 is the next to be run, 0 is running, None unknown."""

    position: int | Literal["1000+"] | None
    wait_seconds: float | None

    @property
    def poll_seconds(self) -> int:
        """When to ask again: sooner the nearer it is; a place for a second if nothing is known."""
        if self.position == "1000+":
            return _MAX_POLL_SECONDS
        expected = self.position if self.wait_seconds is None else self.wait_seconds
        return max(1, min(_MAX_POLL_SECONDS, math.ceil(expected or 0)))


_RUNNING = Estimate(0, 0.0)
_UNKNOWN = Estimate(None, None)


@dataclass(slots=True, frozen=True)
class _Head:
    places: dict[UUID, int]
    rate: float
    expires: float

    def estimate(self, result_id: UUID) -> Estimate:
        place = self.places.get(result_id)
        if place is not None:
            wait = round(place / self.rate, 1) if self.rate > 0 else None
            return Estimate(place, wait)
        # In a short queue: it came, or was taken, since the queue was read.
        return Estimate("1000+", None) if len(self.places) == _HEAD else _UNKNOWN


class QueuePositions:
    """Estimates for pending results."""

    def __init__(self, database: Database) -> None:
        self._heads: dict[str, _Head] = {}  # models that results were sent to: bounded by those
        self._reads: Batcher[str, None] = Batcher(
            database, self._read, max_items=_MAX_BATCH, retry_seconds=_RETRY_SECONDS
        )

    async def estimate(self, result_id: UUID, model: str, *, is_running: bool) -> Estimate:
        """Estimate the place of a pending result; unknown rather than an error."""
        if is_running:
            return _RUNNING
        if not self._is_fresh(model):
            try:
                await self._reads.submit(model)
            except DatabaseUnavailableError:
                return _UNKNOWN
        return self._heads[model].estimate(result_id)

    def _is_fresh(self, model: str) -> bool:
        head = self._heads.get(model)
        return head is not None and asyncio.get_running_loop().time() < head.expires

    async def _read(
        self, connection: Connection, models: Sequence[str], _resent: bool
    ) -> Sequence[None]:
        # Those who came while the last reading was under way find it done.
        stale = sorted({model for model in models if not self._is_fresh(model)})
        if stale:
            expires = asyncio.get_running_loop().time() + _CACHE_TTL_SECONDS
            for row in await connection.fetch(_READ, stale, _HEAD):
                places = {result_id: place for place, result_id in enumerate(row["head"], 1)}
                self._heads[row["name"]] = _Head(places, row["rate"] or 0.0, expires)
        return [None] * len(models)
