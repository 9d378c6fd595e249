"""The state of the service for its operators: database, workers, queues. Estimates, never counts."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from app.core.database import Database
from app.core.fair_share import shared_lock
from app.queue.depth import ModelLoad, QueueDepth
from app.results.stats.history import FailureCount, HistoryStore, Point, QueueSample, Window

_CACHE_TTL_SECONDS = 2.0
_WORKERS = 200

_DATABASE = """
SELECT now() AS now, pg_database_size(current_database()) AS size_bytes,
  (SELECT version_num FROM alembic_version) AS schema_version
"""
# `reltuples` is -1 before the first analysis.
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
class TableSize:
    name: str
    size_bytes: int
    rows_estimate: int | None


@dataclass(slots=True, frozen=True)
class WorkerState:
    id: UUID
    host: str
    pid: int
    started_at: datetime
    lease_expires_at: datetime
    running: int
    is_alive: bool


@dataclass(slots=True, frozen=True)
class SystemState:
    now: datetime
    schema_version: str
    size_bytes: int
    tables: Sequence[TableSize]
    workers: Sequence[WorkerState]
    queues: dict[str, ModelLoad]
    oldest_seconds: dict[str, float]
    window: Window
    queue_history: Sequence[QueueSample]
    history: Sequence[Point]
    failures: Sequence[FailureCount]


class SystemStore:
    """Reads the state of the whole service, at most every two seconds."""

    def __init__(self, database: Database, depth: QueueDepth, history: HistoryStore) -> None:
        self._database = database
        self._depth = depth
        self._history = history
        self._cached: dict[int, tuple[float, SystemState]] = {}  # by minutes: expiry and state
        self._lock = asyncio.Lock()

    async def state(self, minutes: int) -> SystemState:
        async with shared_lock(self._lock):
            now = time.monotonic()
            self._cached = {key: entry for key, entry in self._cached.items() if entry[0] > now}
            if minutes not in self._cached:
                state = await self._look(minutes)
                self._cached[minutes] = (time.monotonic() + _CACHE_TTL_SECONDS, state)
            return self._cached[minutes][1]

    async def _look(self, minutes: int) -> SystemState:
        fetch = self._database.fetch
        window = await self._history.window(minutes)
        (database,) = await fetch(_DATABASE)
        return SystemState(
            **database,
            tables=[TableSize(**row) for row in await fetch(_TABLES)],
            workers=[WorkerState(**row) for row in await fetch(_ALL_WORKERS)],
            queues=await self._depth.by_model(),
            oldest_seconds=await self._depth.oldest_seconds(),
            window=window,
            queue_history=await self._history.queues(window),
            history=await self._history.points(window, None),
            failures=await self._history.failures(window),
        )
