"""How much waits and runs, by model: exact enough for people and for the queue's bound."""

import time
from dataclasses import dataclass, field

import orjson

from app.database import Database
from app.errors import QueueFullError
from app.settings import Settings

_FRESH_SECONDS = 1.0
# A count of a long queue is repeated so rarely that it takes no more than this share of the time.
_COUNTING_SHARE = 0.005

_QUEUED = """
SELECT model_name, count(*) AS queued FROM results
WHERE state = 'pending' AND worker_id IS NULL GROUP BY model_name
"""

_LOAD = "SELECT load FROM workers WHERE dead_at IS NULL AND lease_expires_at > now()"


@dataclass(slots=True)
class ModelLoad:
    """Of one model over all teams and workers."""

    queued: int = 0
    running: int = 0
    tokens_per_second: float = 0.0


@dataclass(slots=True)
class _Snapshot:
    by_model: dict[str, ModelLoad] = field(default_factory=dict)
    queued: int = 0
    expires: float = 0.0


class QueueDepth:
    """Counts at most once a second, and less often when counting is slow."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self._database = database
        self._max_queued = settings.max_queued
        self._snapshot = _Snapshot()
        self._accepted = 0  # since the snapshot, by this process

    async def by_model(self) -> dict[str, ModelLoad]:
        """The load of each model that has any."""
        await self._refresh()
        return self._snapshot.by_model

    async def admit(self, count: int) -> None:
        """Let `count` more results into the queue. Raises QueueFullError beyond its bound.

        Other processes' submissions since the last count are not seen: the bound may be exceeded
        by what they accept in about a second.
        """
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
        self._snapshot.expires = began + _FRESH_SECONDS  # others go on with the old count
        queued = await self._database.fetch(_QUEUED)
        loads = await self._database.fetch(_LOAD)
        now = time.monotonic()
        snapshot = _Snapshot(expires=now + max(_FRESH_SECONDS, (now - began) / _COUNTING_SHARE))
        for row in queued:
            snapshot.by_model[row["model_name"]] = ModelLoad(queued=row["queued"])
            snapshot.queued += row["queued"]
        for row in loads:
            for name, load in orjson.loads(row["load"]).items():
                model = snapshot.by_model.setdefault(name, ModelLoad())
                model.running += load["running"]
                model.tokens_per_second += load["tokens_per_second"]
        self._snapshot, self._accepted = snapshot, 0
