"""Dependency container for one process: opens and closes its parts together."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from app.api.metrics_collector import MetricsCollector
from app.api.metrics_server import MetricsServer
from app.api.readiness import Readiness
from app.auth.authenticator import Authenticator
from app.auth.token_store import TokenStore
from app.batches.files import FileStore
from app.batches.processor import BatchProcessor
from app.batches.store import BatchStore
from app.batches.work import BatchWork
from app.core import schema_version
from app.core.byte_budget import ByteBudget
from app.core.database import Database
from app.core.listener import Listener
from app.core.settings import Settings
from app.core.waiting import cancel_all
from app.inference.model_registry import ModelRegistry
from app.inference.server_pool import ServerPool
from app.infini_gram.declarations import read_declarations
from app.infini_gram.indexes import Indexes
from app.provisioning.download_store import DownloadStore
from app.provisioning.downloader import Downloader
from app.provisioning.profiles import read_profiles
from app.provisioning.reconciler import Reconciler
from app.provisioning.store import LaunchStore
from app.queue.admission import Admission
from app.queue.api_processes import ApiProcess
from app.queue.budgets import BudgetGuard
from app.queue.depth import QueueDepth
from app.queue.idempotency import IdempotencyKeys
from app.queue.job_queue import JobQueue
from app.queue.maintenance import Maintenance, keep_statistics, remove_expired
from app.queue.position import QueuePositions
from app.queue.team_limits import TeamLimits
from app.results.contexts import ContextStore
from app.results.export import ResultExport
from app.results.image_urls import ImageUrls
from app.results.indexer import ResultIndexer
from app.results.jobs.progress import JobKeeper
from app.results.jobs.results import JobResults
from app.results.jobs.retry import JobRetries
from app.results.jobs.store import JobStore
from app.results.multi_result import ResultGroups
from app.results.preparation import Preparation
from app.results.replays import Replays
from app.results.retention.erasure import Erasure
from app.results.retention.policy import RetentionPolicy
from app.results.retention.retention import Retention
from app.results.stats.history import HistoryStore
from app.results.stats.system import SystemStore
from app.results.store import ResultStore
from app.results.streams.hub import StreamHub
from app.results.streams.tickets import StreamTicketStore
from app.results.submission import Submissions
from app.results.usage.report import UsageReports
from app.results.usage.spending import Spending
from app.webhooks.budget_alerts import BudgetAlerts
from app.webhooks.delivery import WebhookDeliverer
from app.webhooks.outbox import WebhookOutbox
from app.webhooks.sender import Sender
from app.worker.backends.stored_images import StoredImages
from app.worker.backends.triton_backend import TritonBackend
from app.worker.worker import Worker

_BODIES = 16  # of the largest size, at least, for which the byte budget has room


class Services:
    """Parts shared by all requests of a process, or by its worker."""

    def __init__(self, settings: Settings, database: Database, server_pool: ServerPool) -> None:
        self.settings = settings
        self.database = database
        self.server_pool = server_pool
        self.byte_budget = ByteBudget(
            max(settings.max_bytes_in_flight, _BODIES * settings.max_body_bytes)
        )
        self.listener = Listener(database)
        self.limits = TeamLimits(database, settings)
        self.queue = JobQueue(database, settings, self.limits)
        self.keys = IdempotencyKeys(database, settings)
        self.contexts = ContextStore(database, self.queue, settings)
        self.results = ResultStore(database, self.queue, settings)
        self.jobs = JobStore(database, settings)
        self.registry = ModelRegistry(database, server_pool, settings)
        self.depth = QueueDepth(database, settings)
        self.budgets = BudgetGuard(database, settings.currency)
        self.admission = Admission(database, self.depth, self.limits, self.budgets, settings)
        self.retention = RetentionPolicy(database, settings)
        self.indexes = Indexes(
            read_declarations(settings.indexes_file),
            threads=settings.index_threads,
            queue=settings.index_queue,
            file=settings.indexes_file,
        )
        self.api_process = ApiProcess(database)
        self.images = ImageUrls(settings)
        self.submissions = Submissions(
            Preparation(
                settings,
                self.registry,
                self.indexes,
                self.contexts,
                self.results,
                self.retention,
                self.admission,
                self.api_process.id,
                self.images,
            ),
            self.contexts,
            self.results,
            self.jobs,
            self.keys,
            Replays(self.keys, self.jobs, self.results),
            self.admission,
            self.queue,
        )
        self.job_results = JobResults(database)
        self.job_retries = JobRetries(database, self.jobs, self.submissions)
        self.hub = StreamHub(database, self.results, settings)
        self.groups = ResultGroups(settings, self.queue, self.results, self.hub)
        self.export = ResultExport(database, settings)
        self.positions = QueuePositions(database)
        self.tickets = StreamTicketStore(database, settings)
        self.outbox = WebhookOutbox(database, settings)
        self.files = FileStore(database, settings.team_max_file_bytes)
        self.batches = BatchStore(database, settings.team_max_batches)
        self.batch_work = BatchWork(database)
        self.erasure = Erasure(database)
        self.tokens = TokenStore(database, settings)
        self.authenticator = Authenticator(self.tokens, settings)
        self.profiles = read_profiles(settings.profiles_file)
        self.launches = LaunchStore(database)
        self.downloads = DownloadStore(database)
        self.history = HistoryStore(database)
        self.usage = UsageReports(database)
        self.spending = Spending(database)
        self.system = SystemStore(database, self.depth, self.history)
        self.metrics_collector = MetricsCollector(server_pool, self.registry, self.depth)
        self.readiness = Readiness(database, self.registry, self.depth)


@contextlib.asynccontextmanager
async def open_services(settings: Settings, name: str) -> AsyncIterator[Services]:
    """Open the database pool and the Triton connections; `background` starts the tasks.

    Indexes are only declared; the process that uses them opens them.
    """
    async with (
        Database(settings, f"llm {name}") as database,
        ServerPool(database, settings) as server_pool,
    ):
        services = Services(settings, database, server_pool)
        services.limits.subscribe(services.listener)
        services.budgets.subscribe(services.listener)
        server_pool.subscribe(services.listener)
        async with services.images:
            yield services


def new_worker(services: Services) -> Worker:
    settings = services.settings
    backend = TritonBackend(
        services.registry,
        services.server_pool,
        settings.engine_silence_seconds,
        continues_by_text=settings.continue_by_text,
        load_images=StoredImages(services.database, settings.max_image_pixels).load,
    )
    return Worker(
        services.database, services.queue, backend, services.listener, services.hub, settings
    )


@contextlib.asynccontextmanager
async def background(
    services: Services, feeder: BatchProcessor | None
) -> AsyncIterator[list[asyncio.Task[None]]]:
    """Run the maintenance tasks; the caller watches them, the exit cancels them.

    Only processes with a worker deliver webhooks, process batches, index results, delete expired
    results, reconcile launches and download models.
    """
    work = {
        "schema": schema_version.guard(services.database),
        "registry": services.registry.run(),
        "listener": services.listener.run(),
        "limits": services.limits.run(),
        "budgets": services.budgets.run(),
        "api_process": services.api_process.run(),
        "maintenance": Maintenance(services.queue, services.settings).run(),
        "statistics": keep_statistics(services.queue),
        "jobs": JobKeeper(services.database).run(),
        "expired": remove_expired(
            [
                services.keys.remove_expired,
                services.tickets.remove_expired,
                services.files.remove_expired,
                services.erasure.erase_undelivered,
            ]
        ),
    }
    if feeder is not None:
        work["batches"] = feeder.run()
        indexer = ResultIndexer(services.database, services.depth, services.settings)
        work["digest"], work["words"] = indexer.run(), indexer.words.run()
        work["spending"] = services.spending.run()
        work["retention"] = Retention(services.database, services.settings).run()
        work["webhooks"] = WebhookDeliverer(
            services.outbox,
            services.results,
            services.jobs,
            services.registry,
            services.listener,
            Sender(services.settings),
        ).run()
        work["budget_alerts"] = BudgetAlerts(
            services.database, services.outbox, Sender(services.settings), services.settings
        ).run()
        if services.profiles:
            work["launches"] = Reconciler(
                services.database, services.listener, services.settings, services.profiles
            ).run()
            work["downloads"] = Downloader(
                services.database, services.listener, services.settings, services.profiles
            ).run()
    if services.settings.metrics_port is not None:
        work["metrics"] = MetricsServer(
            services.settings, services.metrics_collector.text, services.readiness.report
        ).run()
    tasks = [asyncio.create_task(run, name=name) for name, run in work.items()]
    try:
        yield tasks
    finally:
        await cancel_all(tasks)
