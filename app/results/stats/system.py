"""The state of the service for its operators: database, workers, queues. Estimates, never counts."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import asyncpg

from app.core.database import Database
from app.queue.depth import ModelLoad, QueueDepth
from app.results.stats.history import HistoryStore, Point, Window

_FRESH_SECONDS = 2.0
_WORKERS = 200

_DATABASE = """
SELECT now() AS now, pg_database_size(current_database()) AS size_bytes,
  (SELECT version_num FROM alembic_version) AS schema_version
"""
# `reltuples` is -1 until somebody has looked.
_TABLES = """
SELECT relname AS name, pg_total_relation_size(oid) AS size_bytes,
  CASE WHEN reltuples >= 0 THEN reltuples::bigint END AS rows_estimate
FROM pg_class WHERE relkind = 'r' AND relnamespace = current_schema()::regnamespace
ORDER BY size_bytes DESC, name
"""
_RUNNING = "SELECT sum((value ->> 'running')::int) FROM jsonb_each(load)"
_ALL_WORKERS = f"""
SELECT id, host, pid, started_at, lease_expires_at, coalesce(({_RUNNING}), 0)::int AS running,
  dead_at IS NULL AND lease_expires_at > now() AS is_alive
FROM workers ORDER BY dead_at IS NULL DESC, lease_expires_at DESC LIMIT {_WORKERS}
"""


@dataclass(slots=True, frozen=True)
class SystemState:
    """What an operator is told, as of one moment."""

    now: datetime
    schema_version: str
    size_bytes: int
    tables: Sequence[asyncpg.Record]
    workers: Sequence[asyncpg.Record]
    queues: dict[str, ModelLoad]
    oldest_seconds: dict[str, float]
    window: Window
    queue_history: Sequence[asyncpg.Record]
    history: Sequence[Point]
    failures: Sequence[asyncpg.Record]


class SystemStore:
    """Looks at the whole service; what it saw is told for two seconds, however many ask."""

    def __init__(self, database: Database, depth: QueueDepth, history: HistoryStore) -> None:
        self._database = database
        self._depth = depth
        self._history = history
        self._seen: dict[int, tuple[float, SystemState]] = {}  # by minutes: when, and what
        self._looking = asyncio.Lock()

    async def state(self, minutes: int) -> SystemState:
        """The state now, with the history of the last minutes."""
        async with self._looking:
            now = time.monotonic()
            self._seen = {m: seen for m, seen in self._seen.items() if seen[0] > now}
            if minutes not in self._seen:
                state = await self._look(minutes)
                self._seen[minutes] = (time.monotonic() + _FRESH_SECONDS, state)
            return self._seen[minutes][1]

    async def _look(self, minutes: int) -> SystemState:
        fetch = self._database.fetch
        window = await self._history.window(minutes)
        (database,) = await fetch(_DATABASE)
        parts: dict[str, Any] = dict(database.items())
        return SystemState(
            **parts,
            tables=await fetch(_TABLES),
            workers=await fetch(_ALL_WORKERS),
            queues=await self._depth.by_model(),
            oldest_seconds=await self._depth.oldest_seconds(),
            window=window,
            queue_history=await self._history.queues(window),
            history=await self._history.points(window, None),
            failures=await self._history.failures(window),
        )
