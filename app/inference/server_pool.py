"""The Triton servers of one process: which are up, what each serves, and what runs on it from here.

Those that the settings name, and those of the table `servers`. Triton notifies nobody, so each process
asks every server for its repository index every few seconds.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from types import TracebackType

from app.core.database import Database, is_transient
from app.core.errors import ServiceError
from app.core.listener import SERVERS, Listener
from app.core.settings import Settings
from app.core.settings.fields import split_list
from app.inference.server_store import STATIC_NAME, ServerAddress, ServerStore, server_not_found
from app.inference.triton_client import IndexEntry, TritonClient

logger = logging.getLogger(__name__)

_PATIENCE = 3.0  # seconds that one slow server may keep what others say
_LATE_SECONDS = 5.0  # without an answer a server is not ready: it may be frozen
_PATIENCE_WITH_THE_LOST = 0.25  # that one may which did not answer before
_NOT_ASKED = "not asked yet"


@dataclass(slots=True, frozen=True)
class DeadEngine:
    """A model's engine that answers no probe although Triton may call the model ready."""

    since: datetime
    reason: str

    def __str__(self) -> str:
        return f"engine dead since {self.since:%Y-%m-%d %H:%M:%S} UTC: {self.reason}"


@dataclass(slots=True, frozen=True)
class DeadReport:
    """A dead engine as workers report it; `is_agreed`: all that run the model do."""

    server: str
    model: str
    dead: DeadEngine
    is_agreed: bool


class Server:
    """A server as this process sees it. `error` is None while it answers."""

    def __init__(self, address: ServerAddress, default_slots: int) -> None:
        self.address = address
        self.client = TritonClient(address.grpc)
        self.models: dict[str, IndexEntry] = {}
        self.error: str | None = _NOT_ASKED
        self.dead: dict[str, DeadEngine] = {}  # engines, by model
        self.heard_at: dict[str, float] = {}  # loop time of the last response, by model
        self.running: Counter[str] = Counter()  # results of this process, by model
        self._default_slots = default_slots
        self._asking: asyncio.Task[None] | None = None
        self._asked_at = 0.0  # loop time

    @property
    def name(self) -> str:
        return self.address.name

    @property
    def slots(self) -> int:
        """Most results of this process that it is given at a time."""
        return self.address.slots or self._default_slots

    def ready(self) -> list[str]:
        """The models that it may be given results of."""
        if self.address.is_draining:
            return []
        return [
            entry.name
            for entry in self.models.values()
            if entry.ready and entry.name not in self.dead
        ]

    def entries(self) -> list[IndexEntry]:
        """Its models by name; one whose engine is dead is not ready, whatever Triton reports."""
        return [self._entry(name) for name in sorted(self.models)]

    def _entry(self, name: str) -> IndexEntry:
        entry, dead = self.models[name], self.dead.get(name)
        if dead is None:
            return entry
        reason = f"{dead} (server {self.name})"
        return replace(entry, ready=False, reason=reason, engine_dead_since=dead.since)

    @contextlib.contextmanager
    def occupied(self, model: str) -> Iterator[None]:
        """A result of this model runs on it."""
        self.running[model] += 1
        try:
            yield
        finally:
            self.running[model] -= 1

    def ask(self) -> "asyncio.Task[None]":
        """Have it tell what it serves; who asks meanwhile has the same answer."""
        if self._asking is None or self._asking.done():
            self._asked_at = asyncio.get_running_loop().time()
            self._asking = asyncio.create_task(self._ask(), name=f"ask {self.name}")
        return self._asking

    async def _ask(self) -> None:
        try:
            self.models = {entry.name: entry for entry in await self.client.index()}
        except ServiceError as error:
            self.models = {}
            detail = error.detail
            if self.client.address not in detail:
                detail = f"{self.client.address}: {detail}."
            if self.client.address not in error.detail or "HTTP/2" in detail:
                detail = f"{detail} Is that Triton's gRPC port?"
            if self.error != detail:
                extra = {"action": "triton_away", "server": self.name}
                logger.warning("server %s: %s", self.name, detail, extra=extra)
            self.error = detail
        else:
            self.error = None

    def check_time(self) -> None:
        """Call it unready while its answer is late: a frozen server keeps its connections."""
        if asyncio.get_running_loop().time() - self._asked_at < _LATE_SECONDS:
            return
        self.error = f"{self.client.address}: no answer for {_LATE_SECONDS:g} s"
        self.models = {
            name: replace(entry, ready=False, reason=self.error)
            for name, entry in self.models.items()
        }

    async def close(self) -> None:
        """Close its channel; who runs on it still is cut off."""
        self.models = {}
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)
        await self.client.__aexit__(None, None, None)


class ServerPool:
    """All servers. Use it inside `async with`; `refresh` keeps it current."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self.store = ServerStore(database)
        self._static = _of_settings(settings)
        self._slots = settings.worker_slots
        self._servers: dict[str, Server] = {}
        self._leaving: list[Server] = []  # forgotten, but something runs on them from here
        self._is_stale = True  # the table may have changed
        # Set by a process that has a worker, which finds out by itself: called with each dead engine
        # that another worker reports.
        self.on_report: Callable[[Server, str, DeadEngine], None] | None = None

    def subscribe(self, listener: Listener) -> None:
        """Hear of changes of the table; before the listener runs."""
        listener.subscribe(SERVERS, lambda _: self.outdate())

    def outdate(self) -> None:
        """Read the table again with the next refresh."""
        self._is_stale = True

    async def __aenter__(self) -> "ServerPool":
        for address in self._static:
            await self._enter(address)
        return self

    async def __aexit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        servers = (*self._servers.values(), *self._leaving)
        await asyncio.gather(*(server.close() for server in servers))

    @property
    def servers(self) -> list[Server]:
        """Every server: those of the settings first, the others by name."""
        return list(self._servers.values())

    @property
    def error(self) -> str | None:
        """Why no model can be asked for; None while some server answers."""
        if not self._servers:
            return "there is no server: TRITON_GRPC_SERVICE names none, and none is registered"
        errors = [server.error for server in self._servers.values()]
        return None if None in errors else errors[0]

    def get(self, name: str) -> Server:
        """The server of that name. Raises NotFoundError."""
        server = self._servers.get(name)
        if server is None:
            raise server_not_found(name)
        return server

    def find(self, name: str) -> Server | None:
        return self._servers.get(name)

    def at(self, grpc: str) -> Server | None:
        """The server at an address, also one that was removed while something runs on it."""
        servers = (*self._servers.values(), *self._leaving)
        return next((server for server in servers if server.address.grpc == grpc), None)

    def serving(self, model: str) -> list[Server]:
        """The servers that may be given results of a model."""
        return [server for server in self._servers.values() if model in server.ready()]

    def placement(self) -> dict[str, list[str]]:
        """Which models may run where: {server: models}."""
        return {server.name: sorted(server.ready()) for server in self._servers.values()}

    def entries(self) -> dict[str, IndexEntry]:
        """What is known of each model: of the servers that have it, the one that tells most.

        One that is ready; else one with the highest version.
        """
        best: dict[str, IndexEntry] = {}
        for server in self._servers.values():
            for entry in server.entries():
                if server.address.is_draining and entry.ready:
                    entry = replace(entry, ready=False, reason="its server is drained")
                known = best.get(entry.name)
                if known is None or _rank(entry) > _rank(known):
                    best[entry.name] = entry
        return best

    def report(self, reports: Sequence[DeadReport]) -> None:
        """Take over what the workers report: a process without one shows what they agree on."""
        for server in self._servers.values():
            own = [report for report in reports if report.server == server.name]
            if self.on_report is None:
                server.dead = {report.model: report.dead for report in own if report.is_agreed}
                continue
            for report in own:
                self.on_report(server, report.model, report.dead)

    async def refresh(self) -> None:
        """Ask every server; one that does not answer soon keeps nobody waiting."""
        if self._is_stale:
            await self._read()
        asked = {one.ask(): one for one in self._servers.values()}
        if asked:
            await asyncio.wait(asked, timeout=_PATIENCE_WITH_THE_LOST)
        late = {
            task: server
            for task, server in asked.items()
            if server.error in (None, _NOT_ASKED) and not task.done()
        }
        if late:
            await asyncio.wait(late, timeout=_PATIENCE)
        for task, server in late.items():
            if not task.done():
                server.check_time()
        for server in [one for one in self._leaving if not one.running.total()]:
            self._leaving.remove(server)
            await server.close()

    async def _read(self) -> None:
        """Take over what the table has; while the database is away, what it had."""
        self._is_stale = False
        try:
            registered = await self.store.all()
        except BaseException as error:  # also when who asked has left
            self._is_stale = True
            if not is_transient(error):
                raise
            return
        static = {address.name for address in self._static}
        wanted = {one.name: one for one in registered if one.name not in static}
        for name in [name for name in self._servers if name not in static]:
            if name not in wanted or wanted[name].grpc != self._servers[name].address.grpc:
                self._leaving.append(self._servers.pop(name))
        for name, address in wanted.items():  # by name
            if name in self._servers:
                self._servers[name].address = address
            elif (server := self._leaving_at(address.grpc)) is not None:
                self._leaving.remove(server)  # what runs there still counts
                server.address = address
                self._servers[name] = server
            else:
                await self._enter(address)
            self._servers[name] = self._servers.pop(name)  # behind those before it

    def _leaving_at(self, grpc: str) -> Server | None:
        return next((one for one in self._leaving if one.address.grpc == grpc), None)

    async def _enter(self, address: ServerAddress) -> None:
        server = Server(address, self._slots)
        await server.client.__aenter__()
        self._servers[address.name] = server


def _of_settings(settings: Settings) -> list[ServerAddress]:
    """The servers that the settings name: `default`, `default-2` and so on."""
    grpc, http, metrics = (
        split_list(text)
        for text in (settings.triton_grpc, settings.triton_http, settings.triton_metrics)
    )
    return [
        ServerAddress(
            STATIC_NAME if place == 0 else f"{STATIC_NAME}-{place + 1}",
            address,
            http[place] if place < len(http) else None,
            metrics[place] if place < len(metrics) else None,
            is_static=True,
        )
        for place, address in enumerate(grpc)
    ]


def _rank(entry: IndexEntry) -> tuple[bool, int]:
    return entry.ready, entry.version or 0
