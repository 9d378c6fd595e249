"""The models of the service: those that the Triton servers serve, and all they have served before.

A model that was ready once stays known. Requests for unknown models are refused; requests for known
models that are not ready wait within their deadline.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime

import asyncpg

from app.core.database import Database, is_transient
from app.core.errors import (
    ModelNotReadyError,
    TritonUnavailableError,
    UnknownModelError,
    invalid_field,
)
from app.core.fair_share import shared_lock
from app.core.queue_names import INDEX_QUEUES
from app.core.settings import Settings
from app.inference.adapters import AdapterFiles, Adapters, full_name
from app.inference.pooling import Task
from app.inference.prompts import PromptFormat, PromptFormats
from app.inference.server_pool import DeadEngine, DeadReport, Server, ServerPool
from app.inference.triton_client import IndexEntry

_MISS_REFRESH_SECONDS = 0.5
_REMEMBER = """
WITH seen AS (
  INSERT INTO models (name, version)
  SELECT * FROM unnest($1::text[], $2::int[]) ORDER BY 1
  ON CONFLICT (name) DO UPDATE SET version = excluded.version
  WHERE models.version IS DISTINCT FROM excluded.version
  RETURNING name, version, first_seen_at)
SELECT name, version, first_seen_at FROM models
UNION SELECT name, version, first_seen_at FROM seen
"""
# Each heartbeat of a worker lists the queues that it serves.
_SERVED = """
SELECT DISTINCT name FROM workers w, jsonb_object_keys(w.load) AS k(name)
WHERE w.dead_at IS NULL AND w.lease_expires_at > now() AND starts_with(name, $1)
"""
# The workers that run the model agree once each of them has probed the engine.
_DEAD = """
SELECT s.key AS server, m.key AS model, min(s.value ->> 'since') AS since,
  min(s.value ->> 'reason') AS reason, count(*) = (
    SELECT count(*) FROM workers o
    WHERE o.dead_at IS NULL AND o.lease_expires_at > now() AND o.load ? m.key) AS is_agreed
FROM workers w, jsonb_each(w.load) AS m, jsonb_each(m.value -> 'dead') AS s
WHERE w.dead_at IS NULL AND w.lease_expires_at > now()
GROUP BY s.key, m.key
"""
# An adapter that one of a model's servers lacks would fail there.
_LAUNCHED_ADAPTERS = """
WITH up AS (
  SELECT spec ->> 'served_name' AS model, coalesce(spec -> 'adapters', '{}') AS adapters
  FROM launches WHERE ended_at IS NULL AND state IN ('healthy', 'unhealthy'))
SELECT up.model, k.name FROM up, jsonb_object_keys(up.adapters) AS k(name)
GROUP BY 1, 2 HAVING count(*) = (SELECT count(*) FROM up AS one WHERE one.model = up.model)
"""
NO_ADAPTERS = Adapters()
# The model names that TGI's clients send by default: text_generation, huggingface_hub.
_PLACEHOLDERS = {"tgi", "dummy"}


@dataclass(slots=True, frozen=True)
class Model:
    """A model as this process knows it. `format` is None if its files are not available.

    `adapter` is the LoRA adapter that a request names with it, as `model:adapter`.
    """

    name: str
    version: int | None
    ready: bool
    reason: str
    format: PromptFormat | None
    first_seen_at: datetime | None = None
    adapters: Adapters = NO_ADAPTERS
    adapter: str | None = None

    @property
    def full_name(self) -> str:
        """The name that requests use; `name` is that of the queue."""
        return full_name(self.name, self.adapter)

    def names_of(self, team_id: str | None) -> list[str]:
        """The names under which a team may use the model: its own, and one for each adapter."""
        return [self.name, *(full_name(self.name, one) for one in self.adapters.of_team(team_id))]

    @property
    def max_model_len(self) -> int | None:
        return self.format.max_model_len if self.format else None

    @property
    def task(self) -> Task | None:
        """The task of a pooling model; None if it generates text, or its files are not available."""
        return self.format.task if self.format else None

    @property
    def has_chat(self) -> bool:
        return self.format is not None and self.format.has_chat

    async def tokens_left(self, prompt: str) -> int | None:
        """The maximum number of tokens after a prompt; None if its length or the model's is unknown."""
        if self.format is None or self.max_model_len is None:
            return None
        tokens = await self.format.count_tokens(prompt)
        return None if tokens is None else self.max_model_len - tokens


class ModelRegistry:
    def __init__(self, database: Database, pool: ServerPool, settings: Settings) -> None:
        self._database = database
        self._pool = pool
        self._period = settings.triton_refresh_seconds
        self._default = settings.default_model
        self._formats = PromptFormats(*settings.model_repositories())
        self._adapters = AdapterFiles(*settings.model_repositories())
        self._models: dict[str, Model] = {}
        self._stored: dict[str, int | None] = {}
        self._served: set[str] = set()  # queues of indexes
        self._launched_adapters: frozenset[tuple[str, str]] = frozenset()
        self._seen_at: dict[str, datetime] = {}
        self._placement: dict[str, list[str]] = {}  # models by server
        self._refreshing = asyncio.Lock()
        self._refreshed_at = float("-inf")
        self._on_change: list[Callable[[], None]] = []

    @property
    def triton_error(self) -> str | None:
        return self._pool.error

    def on_change(self, handler: Callable[[], None]) -> None:
        self._on_change.append(handler)

    def all(self) -> list[Model]:
        return [self._models[name] for name in sorted(self._models)]

    def ready(self) -> list[str]:
        return [model.name for model in self._models.values() if model.ready]

    @property
    def can_generate(self) -> bool:
        """True if a model that generates text is ready, and its engine not known as dead."""
        return any(model.ready and model.task is None for model in self._models.values())

    def is_ready(self, name: str) -> bool:
        """Return True if a model is ready, or a worker serves the index's queue of this name."""
        model = self._models.get(name)
        return name in self._served if model is None else model.ready

    def serving(self, queue: str) -> Model:
        ready = self.is_ready(queue)
        return Model(queue, None, ready, "" if ready else "no attribution worker is up", None)

    def format_of(self, name: str) -> PromptFormat | None:
        """The format of a model that may be gone; None if this process does not have its files."""
        model = self._models.get(name)
        return model.format if model is not None else None

    async def find(self, name: str, team_id: str | None = None) -> Model:
        """The model with this name, or with the adapter of `model:adapter` if the team may use it.

        Raises UnknownModelError with the list of known ones.
        """
        model = self._find(name, team_id)
        if model is None:
            await self.refresh(_MISS_REFRESH_SECONDS)  # it may have been loaded a moment ago
            model = self._find(name, team_id)
        if model is None:
            raise _unknown(name, [one for known in self.all() for one in known.names_of(team_id)])
        return model

    def _find(self, name: str, team_id: str | None) -> Model | None:
        if (model := self._models.get(name)) is not None:
            return model
        base, _, adapter = name.rpartition(":")
        model = self._models.get(base)
        if model is None or not model.adapters.allows(adapter, team_id):
            return None
        return replace(model, adapter=adapter)

    async def default(self, team_id: str | None = None) -> Model:
        """The model of a request that names none.

        Raises InvalidRequestError if several are ready, ModelNotReadyError if none is ready, and
        UnknownModelError if the setting names an unknown model.
        """
        if self._default is not None:
            return await self.find(self._default, team_id)
        ready = sorted(self.ready())
        if len(ready) == 1:
            return await self.find(ready[0])
        if ready:
            names = ", ".join(ready)
            raise invalid_field(
                "model", f"must be given: {names} are ready, and LLM_DEFAULT_MODEL names none"
            )
        raise ModelNotReadyError(
            "No model is ready, and LLM_DEFAULT_MODEL names none. Try again later.",
            headers={"Retry-After": "5"},
        )

    async def choose(
        self, name: str | None, team_id: str | None = None, *, adapter: str | None = None
    ) -> Model:
        """The model with this name; the default one for None or a placeholder.

        `adapter` names one of its adapters, unless the name does.

        Raises the errors of `find` and `default`.
        """
        if name is None or (name in _PLACEHOLDERS and name not in self._models):
            model = await self.default(team_id)
        else:
            model = await self.find(name, team_id)
        if adapter is None or adapter == model.adapter:
            return model
        return await self.find(full_name(model.full_name, adapter), team_id)

    async def load(self, name: str) -> None:
        """Load a model on each server whose repository has it, known or new.

        Raises UnknownModelError with the list of existing models, TritonError with Triton's reason.
        """
        servers = await self._having(name)
        if not servers:
            raise _unknown(name, sorted(self._pool.entries()))
        for server in servers:
            entry = server.models.get(name)  # None: removed in the meantime
            if entry is not None and not entry.ready:
                await server.client.load(name)
        await self.refresh()

    async def unload(self, name: str) -> None:
        await self.find(name)  # without a team: no adapter
        for server in await self._having(name):
            if name in server.models:
                await server.client.unload(name)
        await self.refresh()

    async def _having(self, name: str) -> list[Server]:
        """The servers whose repository has a model. Raises TritonUnavailableError if none answers."""
        await self.refresh()
        if self._pool.error is not None:
            raise TritonUnavailableError(self._pool.error, headers={"Retry-After": "5"})
        return [server for server in self._pool.servers if name in server.models]

    async def run(self) -> None:
        while True:
            await self.refresh()
            await asyncio.sleep(self._period)

    async def outdate(self) -> None:
        self._pool.outdate()
        await self.refresh()

    async def refresh(self, seconds: float = 0.0) -> None:
        """Query all servers, unless the last refresh is younger than `seconds`.

        The models of an unreachable server stay known and are not ready.
        """
        async with shared_lock(self._refreshing):
            if asyncio.get_running_loop().time() - self._refreshed_at < seconds:
                return
            before = self._readiness()
            await self._pool.refresh()
            await self._read_dead()
            entries = list(self._pool.entries().values())
            await self._remember([entry for entry in entries if entry.ready])
            await self._read_launched()
            self._models = await self._merge(entries)
            await self._read_served()
            self._placement = self._pool.placement()
            self._refreshed_at = asyncio.get_running_loop().time()
        if before != self._readiness():
            for handler in self._on_change:
                handler()

    def _readiness(self) -> object:
        return self._placement, {model.name: model.ready for model in self._models.values()}

    async def _merge(self, entries: list[IndexEntry]) -> dict[str, Model]:
        by_name = {entry.name: entry for entry in entries}
        models = {}
        names = {entry.name for entry in entries if entry.ready} | set(self._stored)
        adapters = await self._adapters.read(names)
        for name, launched in self._launched_adapters:
            adapters[name] = adapters.get(name, NO_ADAPTERS).with_name(launched)
        for name in names:
            version, reason = self._stored.get(name), self.triton_error or "not in the repository"
            entry = by_name.get(name)
            if entry is not None:
                reason = entry.reason or "not loaded"
                version = entry.version if entry.ready else version
            is_ready = entry is not None and entry.ready
            form, seen_at = await self._formats.get(name), self._seen_at.get(name)
            models[name] = Model(
                name, version, is_ready, reason, form, seen_at, adapters.get(name, NO_ADAPTERS)
            )
        return models

    async def _remember(self, ready: list[IndexEntry]) -> None:
        new = {entry.name: entry.version for entry in ready}
        if self._stored and new.items() <= self._stored.items():
            return
        rows = await self._fetch(_REMEMBER, list(new), list(new.values()))
        if rows is not None:
            self._stored = {row["name"]: row["version"] for row in rows} | new
            self._seen_at = {row["name"]: row["first_seen_at"] for row in rows}

    async def _read_dead(self) -> None:
        rows = await self._fetch(_DEAD)
        if rows is not None:
            self._pool.report([_to_report(row) for row in rows])

    async def _read_launched(self) -> None:
        rows = await self._fetch(_LAUNCHED_ADAPTERS)
        if rows is not None:
            self._launched_adapters = frozenset((row["model"], row["name"]) for row in rows)

    async def _read_served(self) -> None:
        rows = await self._fetch(_SERVED, INDEX_QUEUES)
        if rows is not None:
            self._served = {row["name"] for row in rows}

    async def _fetch(self, query: str, *arguments: object) -> list[asyncpg.Record] | None:
        """Fetch rows; None while the database is unavailable."""
        try:
            return await self._database.fetch(query, *arguments)
        except Exception as error:
            if not is_transient(error):
                raise
            return None


def _to_report(row: asyncpg.Record) -> DeadReport:
    dead = DeadEngine(datetime.fromisoformat(row["since"]), row["reason"])
    return DeadReport(row["server"], row["model"], dead, row["is_agreed"])


def _unknown(name: str, known: list[str]) -> UnknownModelError:
    return UnknownModelError(
        f"There is no model {name[:64]!r}. Known models: {', '.join(known) or 'none yet'}.",
        extra={"known_models": known},
    )
