"""Command that runs attributions: `python -m app worker --kind attribution --index NAME`.

It needs PostgreSQL and the index's files, and no Triton.
"""

import asyncio
import signal
from functools import partial
from pathlib import Path

from app.api.metrics_server import MetricsServer
from app.core import metrics
from app.core.database import Database
from app.core.listener import Listener
from app.core.settings import Settings
from app.core.tracing import tracing
from app.queue.job_queue import JobQueue
from app.queue.maintenance import Maintenance
from app.queue.team_limits import TeamLimits
from app.results.store import ResultStore
from app.results.streams.hub import StreamHub
from app.worker.backends.attribution_backend import AttributionBackend
from app.worker.worker import Worker


async def run_attribution_worker(settings: Settings, file: Path, index: str, engines: int) -> None:
    """Run until SIGTERM or SIGINT; a background task that dies ends it.

    `file` declares the index. Raises AttributionFailedError when the index cannot be opened.
    """
    async with (
        tracing(settings.otlp_endpoint, "llm-attribution"),
        Database(settings, "llm attribution") as database,
    ):
        limits = TeamLimits(database, settings)
        queue = JobQueue(database, settings, limits)
        listener = Listener(database)
        limits.subscribe(listener)
        hub = StreamHub(database, ResultStore(database, queue, settings), settings)
        backend = AttributionBackend(file, index, engines)
        worker = Worker(database, queue, backend, listener, hub, settings)
        loop = asyncio.get_running_loop()
        opening = asyncio.create_task(backend.open(), name="open")

        def stop() -> None:
            opening.cancel()
            worker.stop()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop)
        await asyncio.wait([opening])
        if opening.cancelled():
            return
        opening.result()
        parts = {
            "worker": worker.run(),
            "engines": backend.run(),
            "listener": listener.run(),
            "limits": limits.run(),
            "maintenance": Maintenance(queue, settings).run(),
        }
        if settings.metrics_port is not None:
            parts["metrics"] = MetricsServer(
                settings, partial(asyncio.to_thread, metrics.render)
            ).run()
        tasks = [asyncio.create_task(work, name=name) for name, work in parts.items()]
        running = tasks[0]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if running not in done:
                worker.stop()
                await running
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
