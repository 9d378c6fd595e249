"""The Triton servers as one process sees them: their state, their models, and its results on them.

The servers are those of the settings and of the table `servers`. Triton sends no notifications, so each
process queries the repository index of every server every few seconds.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextvars import Context
from dataclasses import dataclass, replace
from datetime import datetime

from app.core.database import Database, is_transient
from app.core.errors import ServiceError
from app.core.listener import SERVERS, Listener
from app.core.settings import Settings
from app.core.settings.fields import split_list
from app.inference.server_store import STATIC_NAME, ServerAddress, ServerStore, server_not_found
from app.inference.triton_client import IndexEntry, TritonClient

logger = logging.getLogger(__name__)

_QUERY_TIMEOUT_SECONDS = 3.0  # for one slow server to delay a refresh
_FAILED_QUERY_TIMEOUT_SECONDS = 0.25  # for a server whose previous query failed
_LATE_SECONDS = 5.0  # after this time without an answer a server is not ready: it may be frozen
_NOT_ASKED = "not asked yet"


@dataclass(slots=True, frozen=True)
class DeadEngine:
    """An engine that answers no probe, although Triton may report its model as ready."""

    since: datetime
    reason: str

    def __str__(self) -> str:
        return f"engine dead since {self.since:%Y-%m-%d %H:%M:%S} UTC: {self.reason}"


@dataclass(slots=True, frozen=True)
class DeadReport:
    """A dead engine as workers report it; `is_agreed`: all workers that run the model report it."""

    server: str
    model: str
    dead: DeadEngine
    is_agreed: bool


class Server:
    """One server. `error` is None while it answers."""

    def __init__(
        self, address: ServerAddress, default_slots: int, flush_seconds: float = 0.5
    ) -> None:
        self.address = address
        self.client = TritonClient(address.grpc, address.secret, flush_seconds=flush_seconds)
        self.models: dict[str, IndexEntry] = {}
        self.error: str | None = _NOT_ASKED
        self.dead: dict[str, DeadEngine] = {}  # engines, by model
        self.heard_at: dict[str, float] = {}  # loop time of the last response, by model
        self.running: Counter[str] = Counter()  # results of this process, by model
        self._default_slots = default_slots
        self._query: asyncio.Task[None] | None = None
        self._queried_at = 0.0  # loop time

    @property
    def name(self) -> str:
        return self.address.name

    def is_at(self, address: ServerAddress) -> bool:
        """True if its channel also serves this declaration: the address and secret are equal."""
        own = self.address
        return (own.grpc, own.secret) == (address.grpc, address.secret)

    @property
    def slots(self) -> int:
        return self.address.slots or self._default_slots

    def ready(self) -> list[str]:
        if self.address.is_draining:
            return []
        return [name for name, one in self.models.items() if one.ready and name not in self.dead]

    def entries(self) -> list[IndexEntry]:
        """Its models by name; a model whose engine is dead is not ready, although Triton reports so."""
        entries = self.models.copy()
        for name in self.dead.keys() & entries.keys():
            dead = self.dead[name]
            entries[name] = replace(
                entries[name],
                ready=False,
                reason=f"{dead} (server {self.name})",
                engine_dead_since=dead.since,
            )
        return [entries[name] for name in sorted(entries)]

    @contextlib.contextmanager
    def occupied(self, model: str) -> Iterator[None]:
        self.running[model] += 1
        try:
            yield
        finally:
            self.running[model] -= 1

    def query_index(self) -> "asyncio.Task[None]":
        if self._query is None or self._query.done():
            self._queried_at = asyncio.get_running_loop().time()
            # In a context of its own: it works for all requests, not only for the first one.
            self._query = asyncio.create_task(
                self._query_index(), name=f"query {self.name}", context=Context()
            )
        return self._query

    async def _query_index(self) -> None:
        try:
            self.models = {entry.name: entry for entry in await self.client.index()}
        except ServiceError as error:
            self.models = {}
            detail = error.detail
            if self.client.address not in detail:
                detail = f"{self.client.address}: {detail}. Is that Triton's gRPC port?"
            elif "HTTP/2" in detail:
                detail = f"{detail} Is that Triton's gRPC port?"
            if self.error != detail:
                extra = {"action": "triton_away", "server": self.name}
                logger.warning("server %s: %s", self.name, detail, extra=extra)
            self.error = detail
        else:
            self.error = None
            self.client.retire_sessions([one.name for one in self.models.values() if one.ready])

    def check_lateness(self) -> None:
        """Mark it as not ready if its answer is late: a frozen server keeps its connections."""
        if asyncio.get_running_loop().time() - self._queried_at < _LATE_SECONDS:
            return
        self.error = f"{self.client.address}: no answer for {_LATE_SECONDS:g} s"
        self.models = {
            name: replace(entry, ready=False, reason=self.error)
            for name, entry in self.models.items()
        }

    async def close(self) -> None:
        """Close its channel, which ends the results that still run on it."""
        self.models = {}
        if self._query is not None:
            self._query.cancel()
            await asyncio.gather(self._query, return_exceptions=True)
        await self.client.__aexit__(None, None, None)


class ServerPool:
    def __init__(self, database: Database, settings: Settings) -> None:
        self.store = ServerStore(database)
        self._static = static_addresses(settings)
        self._slots = settings.worker_slots
        self._flush_seconds = settings.flush_seconds
        self._servers: dict[str, Server] = {}
        self._leaving: list[Server] = []  # removed, but results of this process run on them
        self._is_stale = True  # the table may have changed
        # Set by a process with a worker, which has probes of its own: called with each dead engine that
        # another worker reports.
        self.on_report: Callable[[Server, str, DeadEngine], None] | None = None

    def subscribe(self, listener: Listener) -> None:
        listener.subscribe(SERVERS, lambda _: self.outdate())

    def outdate(self) -> None:
        self._is_stale = True

    async def __aenter__(self) -> "ServerPool":
        for address in self._static:
            await self._enter(address)
        return self

    async def __aexit__(self, *_: object) -> None:
        servers = (*self._servers.values(), *self._leaving)
        await asyncio.gather(*(server.close() for server in servers))

    @property
    def servers(self) -> list[Server]:
        """All servers: those of the settings first, the others by name."""
        return list(self._servers.values())

    @property
    def error(self) -> str | None:
        if not self._servers:
            return "there is no server: TRITON_GRPC_SERVICE names none, and none is registered"
        errors = [server.error for server in self._servers.values()]
        return None if None in errors else errors[0]

    def get(self, name: str) -> Server:
        server = self._servers.get(name)
        if server is None:
            raise server_not_found(name)
        return server

    def find(self, name: str) -> Server | None:
        return self._servers.get(name)

    def at(self, grpc: str) -> Server | None:
        """The server at an address; also a removed one on which results still run."""
        servers = (*self._servers.values(), *self._leaving)
        return next((server for server in servers if server.address.grpc == grpc), None)

    def serving(self, model: str) -> list[Server]:
        return [server for server in self._servers.values() if model in server.ready()]

    def placement(self) -> dict[str, list[str]]:
        return {server.name: sorted(server.ready()) for server in self._servers.values()}

    def entries(self) -> dict[str, IndexEntry]:
        """The best entry of each model among all servers: a ready one, then the highest version."""
        best: dict[str, IndexEntry] = {}
        for server in self._servers.values():
            for entry in server.entries():
                if server.address.is_draining and entry.ready:
                    entry = replace(entry, ready=False, reason="its server is drained")
                known = best.get(entry.name)
                if known is None or entry.rank > known.rank:
                    best[entry.name] = entry
        return best

    def report(self, reports: Sequence[DeadReport]) -> None:
        """Apply the workers' reports; a process that has no worker shows those they agree on."""
        for server in self._servers.values():
            own = [report for report in reports if report.server == server.name]
            if self.on_report is None:
                server.dead = {report.model: report.dead for report in own if report.is_agreed}
                continue
            for report in own:
                self.on_report(server, report.model, report.dead)

    async def refresh(self) -> None:
        """Query every server, for a limited time; slow servers answer later."""
        if self._is_stale:
            await self._read()
        queries = {one.query_index(): one for one in self._servers.values()}
        if queries:
            await asyncio.wait(queries, timeout=_FAILED_QUERY_TIMEOUT_SECONDS)
        late = {
            task: server
            for task, server in queries.items()
            if server.error in (None, _NOT_ASKED) and not task.done()
        }
        if late:
            await asyncio.wait(late, timeout=_QUERY_TIMEOUT_SECONDS)
        for task, server in late.items():
            if not task.done():
                server.check_lateness()
        for server in [one for one in self._leaving if not one.running.total()]:
            self._leaving.remove(server)
            await server.close()

    async def _read(self) -> None:
        """Apply the table's rows; while the database is unavailable, keep the previous ones."""
        self._is_stale = False
        try:
            registered = await self.store.all()
        except BaseException as error:  # also a cancellation
            self._is_stale = True
            if not is_transient(error):
                raise
            return
        static = {address.name for address in self._static}
        wanted = {one.name: one for one in registered if one.name not in static}
        for name in [name for name in self._servers if name not in static]:
            if name not in wanted or not self._servers[name].is_at(wanted[name]):
                self._leaving.append(self._servers.pop(name))
        for name, address in wanted.items():
            if name in self._servers:
                self._servers[name].address = address
            elif left := [one for one in self._leaving if one.is_at(address)]:
                self._leaving.remove(left[0])  # its running results still count
                left[0].address = address
                self._servers[name] = left[0]
            else:
                await self._enter(address)
            self._servers[name] = self._servers.pop(name)  # to the end: by name

    async def _enter(self, address: ServerAddress) -> None:
        server = Server(address, self._slots, self._flush_seconds)
        await server.client.__aenter__()
        self._servers[address.name] = server


def static_addresses(settings: Settings) -> list[ServerAddress]:
    grpc, http, metrics = (
        split_list(text)
        for text in (settings.triton_grpc, settings.triton_http, settings.triton_metrics)
    )
    secrets = settings.triton_secrets()
    return [
        ServerAddress(
            STATIC_NAME if place == 0 else f"{STATIC_NAME}-{place + 1}",
            address,
            http[place] if place < len(http) else None,
            metrics[place] if place < len(metrics) else None,
            is_static=True,
            secret=secrets[place],
        )
        for place, address in enumerate(grpc)
    ]
