"""`python -m app worker`: claims results and runs them, on Triton or on an index.

A worker of attributions needs PostgreSQL and the index's files, and no Triton; each kind imports its
own parts.
"""

import argparse
import asyncio
import signal
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import uvloop

from app.cli.startup import read_settings, schema_fits
from app.core import metrics
from app.core.database import Database
from app.core.listener import Listener
from app.core.settings import Settings
from app.core.tracing import tracing
from app.core.waiting import cancel_all
from app.infini_gram.process import AttributionFailedError, EngineDiedError
from app.queue.job_queue import JobQueue
from app.queue.maintenance import Maintenance, keep_statistics
from app.queue.team_limits import TeamLimits
from app.results.store import ResultStore
from app.results.streams.hub import StreamHub
from app.worker.worker import Worker


def configure(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_run)
    parser.add_argument(
        "--kind",
        choices=("generation", "attribution"),
        default="generation",
        help="kind of its results: generation on Triton (the default), or attribution on an index",
    )
    parser.add_argument("--index", help="the index, for attribution")
    parser.add_argument(
        "--engines",
        type=int,
        choices=range(1, 65),
        metavar="N",
        default=1,
        help="attributions that it runs at the same time, each in its own process (1)",
    )


def _run(options: argparse.Namespace) -> int:
    if options.kind == "attribution":
        return _run_attributions(options.index, options.engines)
    settings = read_settings()
    if not schema_fits(settings):
        return 2
    uvloop.run(_generate(settings))
    return 0


def _run_attributions(index: str | None, engines: int) -> int:
    if index is None:
        return _fail("worker --kind attribution needs --index NAME: see GET /indexes")
    settings = read_settings()
    if settings.indexes_file is None:
        return _fail("worker --kind attribution needs LLM_INDEXES_FILE (see docs/infini_gram.md)")
    if not schema_fits(settings):
        return 2
    try:
        uvloop.run(_attribute(settings, settings.indexes_file, index, engines))
    except (AttributionFailedError, EngineDiedError) as error:
        return _fail(str(error))
    except TimeoutError:
        return _fail(f"index {index} could not be opened in time")
    return 0


def _fail(line: str) -> int:
    sys.stderr.write(f"{line}\n")
    return 2


async def _generate(settings: Settings) -> None:
    from app.api.batch_dialects import batch_services
    from app.api.container import background, new_worker, open_services
    from app.batches.processor import BatchProcessor
    from app.core import interpreter_tuning

    async with (
        tracing(settings.otlp_endpoint, "llm-worker"),
        open_services(settings, "worker") as services,
    ):
        worker = new_worker(services)
        _on_stop_signals(worker.stop)
        interpreter_tuning.settle()
        async with background(services, BatchProcessor(batch_services(services))) as tasks:
            await _run_beside(worker, tasks)


async def _attribute(settings: Settings, file: Path, index: str, engines: int) -> None:
    """Run attributions on the index that `file` declares.

    Raises AttributionFailedError, EngineDiedError or TimeoutError when the index cannot be opened.
    """
    from app.api.metrics_server import MetricsServer
    from app.worker.backends.attribution_backend import AttributionBackend

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
        opening = asyncio.create_task(backend.open(), name="open")
        _on_stop_signals(opening.cancel, worker.stop)
        await asyncio.wait([opening])
        if opening.cancelled():
            return
        opening.result()
        parts = {
            "engines": backend.run(),
            "listener": listener.run(),
            "limits": limits.run(),
            "maintenance": Maintenance(queue, settings).run(),
            "statistics": keep_statistics(queue),
        }
        if settings.metrics_port is not None:
            parts["metrics"] = MetricsServer(
                settings, partial(asyncio.to_thread, metrics.render)
            ).run()
        tasks = [asyncio.create_task(part, name=name) for name, part in parts.items()]
        try:
            await _run_beside(worker, tasks)
        finally:
            await cancel_all(tasks)


def _on_stop_signals(*handlers: Callable[[], object]) -> None:
    def stop() -> None:
        for handle in handlers:
            handle()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop)


async def _run_beside(worker: Worker, tasks: Iterable[asyncio.Task[None]]) -> None:
    """Run until the worker has stopped; a task that ends before stops it, and raises its error."""
    running = asyncio.create_task(worker.run(), name="worker")
    done, _ = await asyncio.wait([running, *tasks], return_when=asyncio.FIRST_COMPLETED)
    if running not in done:
        worker.stop()
        await running
    for task in done:
        task.result()
