"""/metrics: the process's own counters, and gauges read from the database.

Concurrent scrapes share one rendering per second.
"""

import asyncio
import logging
import time
from collections import Counter

from app.core import metrics
from app.core.database import is_transient
from app.core.errors import FailureCode
from app.core.fair_share import shared_lock
from app.inference.model_registry import ModelRegistry
from app.inference.server_pool import ServerPool
from app.queue.depth import ModelLoad, QueueDepth
from app.queue.finish import AttemptOutcome

logger = logging.getLogger(__name__)

_CACHE_TTL_SECONDS = 1.0
# For the database; shorter than a scrape's, so that the process's own counters are always returned.
_TIMEOUT_SECONDS = 3.0


class MetricsCollector:
    def __init__(self, server_pool: ServerPool, registry: ModelRegistry, depth: QueueDepth) -> None:
        self._server_pool = server_pool
        self._registry = registry
        self._depth = depth
        self._making = asyncio.Lock()
        self._text = b""
        self._expires = 0.0

    async def text(self) -> bytes:
        async with shared_lock(self._making):
            if time.monotonic() >= self._expires:
                await self._set_gauges()
                # On a thread: with many models it takes many milliseconds.
                self._text = await asyncio.to_thread(metrics.render)
                self._expires = time.monotonic() + _CACHE_TTL_SECONDS
            return self._text

    async def _set_gauges(self) -> None:
        """Set the gauges; those of the database are absent while it is unavailable, for alerts."""
        models = self._registry.all()
        for model in models:
            _initialize_counters(model.name)
        running = Counter({model.name: 0 for model in models})
        dead = running.copy()
        for server in self._server_pool.servers:
            running.update(server.running)
            dead.update(server.dead.keys())
        metrics.show(metrics.IN_FLIGHT, running)
        metrics.show(metrics.ENGINES_DEAD, dead)
        metrics.show(metrics.MODEL_READY, {model.name: float(model.ready) for model in models})
        loads: dict[str, ModelLoad] = {}
        oldest: dict[str, float] = {}
        workers: dict[str, int] = {}
        try:
            async with asyncio.timeout(_TIMEOUT_SECONDS):
                known = await self._depth.by_model()
                oldest = await self._depth.oldest_seconds()
                workers = await self._depth.workers()
        except Exception as error:
            if not is_transient(error):
                logger.exception("the queues are not measured", extra={"action": "not_measured"})
            metrics.DATABASE_UP.set(0)
        else:
            metrics.DATABASE_UP.set(1)
            loads = {model.name: ModelLoad() for model in models} | known
            oldest = dict.fromkeys(loads, 0.0) | oldest
        queued = {name: load.queued for name, load in loads.items()}
        at_work = {name: load.running for name, load in loads.items()}
        metrics.show(metrics.QUEUE_DEPTH, queued)
        metrics.show(metrics.RUNNING, at_work)
        metrics.show(metrics.WORKERS, workers)
        metrics.show(metrics.QUEUE_OLDEST, oldest)


def _initialize_counters(model: str) -> None:
    """Start counters of failures at 0: a rate ignores the first value of a new series."""
    for code in ("completed", *FailureCode):
        metrics.RESULTS.of(model, code)
    for outcome in AttemptOutcome:
        metrics.ATTEMPTS.of(model, outcome)
    for kind in metrics.TRITON_ERROR_KINDS:
        metrics.TRITON_ERRORS.of(model, kind)
