"""The parts that a process of the service is made of, opened and closed together."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from app import schema_version
from app.admission import Admission
from app.auth import Authenticator
from app.batches import BatchStore, BatchWork
from app.contexts import ContextStore
from app.database import Database
from app.digest import Digest
from app.erasure import Erasure
from app.exposition import Exposition
from app.files import FileStore
from app.fleet import Fleet
from app.history import HistoryStore
from app.idempotency import IdempotencyKeys
from app.infini_gram.declarations import read_declarations
from app.infini_gram.indexes import Indexes
from app.job_queue import JobQueue
from app.launches.follower import Follower
from app.launches.profiles import Profile, read_profiles
from app.launches.store import LaunchStore
from app.listener import Listener
from app.maintenance import Maintenance, remove_expired
from app.metrics_server import MetricsServer
from app.model_registry import ModelRegistry
from app.queue_depth import QueueDepth
from app.queue_position import QueuePositions
from app.readiness import Readiness
from app.result_export import ResultExport
from app.results import ResultStore
from app.retention import Retention
from app.retention_policy import RetentionPolicy
from app.settings import Settings
from app.stream_hub import StreamHub
from app.system import SystemStore
from app.team_limits import TeamLimits
from app.tickets import TicketOffice
from app.token_store import TokenStore
from app.webhook_outbox import WebhookOutbox
from app.webhook_sender import Sender
from app.webhooks import Deliverer


@dataclass(slots=True, frozen=True)
class Services:
    """Shared by all requests of a process, or by its worker."""

    settings: Settings
    database: Database
    fleet: Fleet
    queue: JobQueue
    keys: IdempotencyKeys
    contexts: ContextStore
    results: ResultStore
    export: ResultExport
    registry: ModelRegistry
    depth: QueueDepth
    limits: TeamLimits
    admission: Admission
    positions: QueuePositions
    listener: Listener
    hub: StreamHub
    tickets: TicketOffice
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
    exposition: Exposition
    readiness: Readiness


@contextlib.asynccontextmanager
async def open_services(settings: Settings, name: str) -> AsyncIterator[Services]:
    """Open pool, channel and lanes. Background tasks are started by `background`.

    Indexes are only declared: whose work they are opens them.
    """
    async with (
        Database(settings, f"llm {name}") as database,
        Fleet(database, settings) as fleet,
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
        yield Services(
            settings=settings,
            database=database,
            fleet=fleet,
            queue=queue,
            keys=IdempotencyKeys(database, settings),
            contexts=ContextStore(database, queue, settings),
            results=results,
            export=ResultExport(database),
            registry=registry,
            depth=depth,
            limits=limits,
            admission=Admission(database, depth, limits, settings),
            positions=QueuePositions(database),
            listener=listener,
            hub=StreamHub(database, results, settings),
            tickets=TicketOffice(database, settings),
            outbox=WebhookOutbox(database, settings),
            files=FileStore(database, settings.team_max_file_bytes),
            batches=BatchStore(database, settings.team_max_batches),
            batch_work=BatchWork(database),
            erasure=Erasure(database),
            retention=RetentionPolicy(database, settings),
            tokens=tokens,
            authenticator=Authenticator(tokens, settings),
            indexes=Indexes(
                read_declarations(settings.indexes_file),
                threads=settings.index_threads,
                queue=settings.index_queue,
            ),
            profiles=read_profiles(settings.profiles_file),
            launches=LaunchStore(database),
            history=history,
            system=SystemStore(database, depth, history),
            exposition=Exposition(fleet, registry, depth),
            readiness=Readiness(database, registry, depth),
        )


class Runs(Protocol):
    """What runs until it is cancelled."""

    async def run(self) -> None: ...


@contextlib.asynccontextmanager
async def background(
    services: Services, feeder: Runs | None
) -> AsyncIterator[list[asyncio.Task[None]]]:
    """Run what keeps a process current; the tasks are watched by the caller, cancelled at exit.

    The processes that have a worker, and those alone, deliver webhooks, have a feeder of batches,
    digest what ended, delete what is over, and follow launches.
    """
    work = {
        "schema": schema_version.guard(services.database),
        "registry": services.registry.run(),
        "listener": services.listener.run(),
        "limits": services.limits.run(),
        "maintenance": Maintenance(services.queue, services.settings).run(),
        "expired": remove_expired(
            services.keys, services.tickets, services.files, services.erasure
        ),
    }
    if feeder is not None:
        work["batches"] = feeder.run()
        work["digest"] = Digest(services.database, services.depth, services.settings).run()
        work["retention"] = Retention(services.database, services.settings).run()
        work["webhooks"] = Deliverer(
            services.outbox,
            services.results,
            services.registry,
            services.listener,
            Sender(services.settings),
        ).run()
        if services.profiles:
            work["launches"] = Follower(
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
