"""Dependency container for one process: opens and closes its parts together."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from app.api.metrics_collector import MetricsCollector
from app.api.metrics_server import MetricsServer
from app.api.readiness import Readiness
from app.auth.authenticator import Authenticator
from app.auth.token_store import TokenStore
from app.batches.files import FileStore
from app.batches.store import BatchStore
from app.batches.work import BatchWork
from app.core import schema_version
from app.core.database import Database
from app.core.listener import Listener
from app.core.settings import Settings
from app.inference.model_registry import ModelRegistry
from app.inference.server_pool import ServerPool
from app.infini_gram.declarations import read_declarations
from app.infini_gram.indexes import Indexes
from app.provisioning.profiles import Profile, read_profiles
from app.provisioning.reconciler import Reconciler
from app.provisioning.store import LaunchStore
from app.queue.admission import Admission
from app.queue.depth import QueueDepth
from app.queue.idempotency import IdempotencyKeys
from app.queue.job_queue import JobQueue
from app.queue.maintenance import Maintenance, remove_expired
from app.queue.position import QueuePositions
from app.queue.team_limits import TeamLimits
from app.results.contexts import ContextStore
from app.results.export import ResultExport
from app.results.indexer import ResultIndexer
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
from app.webhooks.delivery import WebhookDeliverer
from app.webhooks.outbox import WebhookOutbox
from app.webhooks.sender import Sender


@dataclass(slots=True, frozen=True)
class Services:
    """Parts shared by all requests of a process, or by its worker."""

    settings: Settings
    database: Database
    fleet: ServerPool
    queue: JobQueue
    keys: IdempotencyKeys
    contexts: ContextStore
    results: ResultStore
    submissions: Submissions
    groups: ResultGroups
    export: ResultExport
    registry: ModelRegistry
    depth: QueueDepth
    limits: TeamLimits
    admission: Admission
    positions: QueuePositions
    listener: Listener
    hub: StreamHub
    tickets: StreamTicketStore
    outbox: WebhookOutbox
    files: FileStore
    batches: BatchStore
    batch_work: BatchWork
    erasure: Erasure
    retention: RetentionPolicy
    tokens: TokenStore
    authenticator: Authenticator
    indexes: Indexes
    profiles: dict[str, Profile]
    launches: LaunchStore
    history: HistoryStore
    system: SystemStore
    exposition: MetricsCollector
    readiness: Readiness


@contextlib.asynccontextmanager
async def open_services(settings: Settings, name: str) -> AsyncIterator[Services]:
    """Open the database pool and the Triton connections; `background` starts the tasks.

    Indexes are only declared; the process that uses them opens them.
    """
    async with (
        Database(settings, f"llm {name}") as database,
        ServerPool(database, settings) as fleet,
    ):
        limits = TeamLimits(database, settings)
        queue = JobQueue(database, settings, limits)
        depth = QueueDepth(database, settings)
        history = HistoryStore(database)
        results = ResultStore(database, queue, settings)
        listener = Listener(database)
        limits.subscribe(listener)
        fleet.subscribe(listener)
        tokens = TokenStore(database, settings)
        registry = ModelRegistry(database, fleet, settings)
        keys = IdempotencyKeys(database, settings)
        contexts = ContextStore(database, queue, settings)
        admission = Admission(database, depth, limits, settings)
        retention = RetentionPolicy(database, settings)
        hub = StreamHub(database, results, settings)
        indexes = Indexes(
            read_declarations(settings.indexes_file),
            threads=settings.index_threads,
            queue=settings.index_queue,
        )
        preparation = Preparation(
            settings, registry, indexes, contexts, results, retention, admission
        )
        yield Services(
            settings=settings,
            database=database,
            fleet=fleet,
            queue=queue,
            keys=keys,
            contexts=contexts,
            results=results,
            submissions=Submissions(
                preparation, contexts, results, keys, Replays(keys, results), admission, queue
            ),
            groups=ResultGroups(settings, queue, results, hub),
            export=ResultExport(database),
            registry=registry,
            depth=depth,
            limits=limits,
            admission=admission,
            positions=QueuePositions(database),
            listener=listener,
            hub=hub,
            tickets=StreamTicketStore(database, settings),
            outbox=WebhookOutbox(database, settings),
            files=FileStore(database, settings.team_max_file_bytes),
            batches=BatchStore(database, settings.team_max_batches),
            batch_work=BatchWork(database),
            erasure=Erasure(database),
            retention=retention,
            tokens=tokens,
            authenticator=Authenticator(tokens, settings),
            indexes=indexes,
            profiles=read_profiles(settings.profiles_file),
            launches=LaunchStore(database),
            history=history,
            system=SystemStore(database, depth, history),
            exposition=MetricsCollector(fleet, registry, depth),
            readiness=Readiness(database, registry, depth),
        )


class Runs(Protocol):
    """A task that runs until it is cancelled."""

    async def run(self) -> None: ...


@contextlib.asynccontextmanager
async def background(
    services: Services, feeder: Runs | None
) -> AsyncIterator[list[asyncio.Task[None]]]:
    """Run the maintenance tasks; the caller watches them, the exit cancels them.

    Only processes with a worker deliver webhooks, process batches, index results, delete expired
    results and reconcile launches.
    """
    work = {
        "schema": schema_version.guard(services.database),
        "registry": services.registry.run(),
        "listener": services.listener.run(),
        "limits": services.limits.run(),
        "maintenance": Maintenance(services.queue, services.settings).run(),
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
        work["digest"] = ResultIndexer(services.database, services.depth, services.settings).run()
        work["retention"] = Retention(services.database, services.settings).run()
        work["webhooks"] = WebhookDeliverer(
            services.outbox,
            services.results,
            services.registry,
            services.listener,
            Sender(services.settings),
        ).run()
        if services.profiles:
            work["launches"] = Reconciler(
                services.database, services.listener, services.settings, services.profiles
            ).run()
    if services.settings.metrics_port is not None:
        work["metrics"] = MetricsServer(
            services.settings, services.exposition, services.readiness
        ).run()
    tasks = [asyncio.create_task(run, name=name) for name, run in work.items()]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
