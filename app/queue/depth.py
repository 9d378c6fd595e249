"""Counts of waiting and running results by model: exact enough for people and the queue's bound."""

import time
from dataclasses import dataclass, field

import orjson

from app.core.database import Database
from app.core.errors import QueueFullError
from app.core.queue_names import INDEX_QUEUES
from app.core.settings import Settings

_CACHE_TTL_SECONDS = 1.0
_OLDEST_CACHE_TTL_SECONDS = 2.0
# A count of a long queue is repeated so rarely that it takes no more than this share of the time.
_COUNTING_SHARE = 0.005

_QUEUED = """
SELECT model_name, count(*) AS queued FROM results
WHERE state = 'pending' AND worker_id IS NULL GROUP BY model_name
"""

_LOAD = "SELECT load FROM workers WHERE dead_at IS NULL AND lease_expires_at > now()"


def _first(condition: str) -> str:
    return f"""(SELECT r.model_name, r.team_id, r.priority, r.id FROM results r
      WHERE r.state = 'pending' AND r.worker_id IS NULL AND {condition}
      ORDER BY r.model_name, r.team_id, r.priority DESC, r.fair_key, r.id LIMIT 1)"""


# The head of each team and priority is its oldest result: one probe of an index for each, instead of
# a look at all that waits.
_OLDEST = f"""
WITH RECURSIVE heads AS (
  {_first("true")}
  UNION ALL
  SELECT n.* FROM heads h CROSS JOIN LATERAL (
    {_first("r.model_name = h.model_name AND r.team_id = h.team_id AND r.priority < h.priority")}
    UNION ALL
    {_first("(r.model_name, r.team_id) > (h.model_name, h.team_id)")}
    LIMIT 1
  ) n
)
SELECT model_name, extract(epoch FROM now() - to_timestamp(
    ('x' || left(replace(min(id::text), '-', ''), 12))::bit(48)::bigint / 1000.0))::float8 AS seconds
FROM (SELECT * FROM heads LIMIT 10000) h GROUP BY model_name
"""


@dataclass(slots=True)
class ModelLoad:
    queued: int = 0
    running: int = 0
    tokens_per_second: float = 0.0


@dataclass(slots=True)
class _Snapshot:
    by_model: dict[str, ModelLoad] = field(default_factory=dict)
    queued: int = 0
    workers: dict[str, int] = field(default_factory=lambda: {"generation": 0, "attribution": 0})
    expires: float = 0.0


class QueueDepth:
    """Counts at most once a second, and less often when counting is slow."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self._database = database
        self._max_queued = settings.max_queued
        self._snapshot = _Snapshot()
        self._accepted = 0  # since the snapshot, by this process
        self._oldest: dict[str, float] = {}
        self._oldest_expires = 0.0

    async def by_model(self) -> dict[str, ModelLoad]:
        await self._refresh()
        return self._snapshot.by_model

    async def workers(self) -> dict[str, int]:
        await self._refresh()
        return self._snapshot.workers

    @property
    def queued(self) -> int:
        """Results that wait, as of the last count, and those that this process has accepted since."""
        return self._snapshot.queued + self._accepted

    async def oldest_seconds(self) -> dict[str, float]:
        """Return the age of the oldest waiting result by model, as of some seconds ago."""
        began = time.monotonic()
        if began >= self._oldest_expires:
            self._oldest_expires = began + _CACHE_TTL_SECONDS  # others go on with the old one
            rows = await self._database.fetch(_OLDEST)
            self._oldest = {row["model_name"]: max(0.0, row["seconds"]) for row in rows}
            self._oldest_expires = _fresh_until(began, _OLDEST_CACHE_TTL_SECONDS)
        return self._oldest

    async def admit(self, count: int) -> None:
        """Raise QueueFullError beyond the bound; other processes' last second is not counted."""
        await self._refresh()
        if self._snapshot.queued + self._accepted + count > self._max_queued:
            raise QueueFullError(
                f"{self._snapshot.queued} results are queued (LLM_MAX_QUEUED is "
                f"{self._max_queued}). Try again when some have finished.",
                headers={"Retry-After": "10"},
            )
        self._accepted += count

    async def _refresh(self) -> None:
        began = time.monotonic()
        if began < self._snapshot.expires:
            return
        self._snapshot.expires = began + _CACHE_TTL_SECONDS  # others go on with the old count
        queued = await self._database.fetch(_QUEUED)
        loads = await self._database.fetch(_LOAD)
        snapshot = _Snapshot(expires=_fresh_until(began, _CACHE_TTL_SECONDS))
        for row in queued:
            snapshot.by_model[row["model_name"]] = ModelLoad(queued=row["queued"])
            snapshot.queued += row["queued"]
        for row in loads:
            reported = orjson.loads(row["load"])
            is_of_index = any(name.startswith(INDEX_QUEUES) for name in reported)
            snapshot.workers["attribution" if is_of_index else "generation"] += 1
            for name, load in reported.items():
                model = snapshot.by_model.setdefault(name, ModelLoad())
                model.running += load["running"]
                model.tokens_per_second += load["tokens_per_second"]
        self._snapshot, self._accepted = snapshot, 0


def _fresh_until(began: float, seconds: float) -> float:
    """When to look again after a look that began then and has just ended."""
    now = time.monotonic()
    return now + max(seconds, (now - began) / _COUNTING_SHARE)
