"""/health/ready: the state of each part, and the remedy for one that is down.

Ready means that results are accepted and kept, which needs the database and its tables. If Triton or
the workers are down, results wait, so the report lists these parts without failing.
"""

import asyncio
import time
from dataclasses import dataclass, field

from app.core import schema_version
from app.core.database import Database, is_transient
from app.core.errors import DatabaseUnavailableError, SchemaMismatchError, ServiceError
from app.core.fair_share import shared_lock
from app.core.program import PROGRAM
from app.inference.model_registry import ModelRegistry
from app.queue.depth import QueueDepth

_TIMEOUT_SECONDS = 3.0  # of the database
_CACHE_TTL_SECONDS = 1.0
OK = "ok"
_UNKNOWN = "unknown"
_NO_WORKER = "none renews its lease"


@dataclass(slots=True, frozen=True)
class _DatabaseState:
    schema: str = _UNKNOWN
    workers: str = _UNKNOWN
    error: ServiceError | None = None
    to_do: list[str] = field(default_factory=list)


class Readiness:
    """Readiness report; however many clients request it, the database is read once a second."""

    def __init__(self, database: Database, registry: ModelRegistry, depth: QueueDepth) -> None:
        self._database = database
        self._registry = registry
        self._depth = depth
        self._lock = asyncio.Lock()
        self._state = _DatabaseState()
        self._expires = 0.0

    async def report(self) -> dict[str, object]:
        """Return each part and the remedies.

        Raises DatabaseUnavailableError or SchemaMismatchError, with the same members.
        """
        async with shared_lock(self._lock):
            if time.monotonic() >= self._expires:
                self._state = await self._read_database()
                self._expires = time.monotonic() + _CACHE_TTL_SECONDS
            state = self._state
        ready, triton = self._registry.ready(), self._registry.triton_error
        to_do = state.to_do[:]
        if triton:
            to_do.append("Start Triton, or correct TRITON_GRPC_SERVICE; results wait meanwhile.")
        elif not ready:
            to_do.append(
                "Load a model: POST /models/{name}/load. Triton's log states why it is not loaded."
            )
        parts: dict[str, object] = {
            "database": OK if state.error is None else state.error.detail,
            "schema": state.schema,
            "triton": triton or OK,
            "models_ready": ready,
            "workers": state.workers,
            "to_do": to_do,
        }
        if state.error is None:
            return parts
        if isinstance(state.error, SchemaMismatchError):
            parts["database"] = OK
        error = type(state.error)(state.error.detail, headers={"Retry-After": "2"}, extra=parts)
        raise error

    async def _read_database(self) -> _DatabaseState:
        try:
            async with asyncio.timeout(_TIMEOUT_SECONDS):
                found = await schema_version.read(self._database)
                reason = schema_version.fault(found)
                if found is None or (reason and found < schema_version.expected()):
                    return _DatabaseState(reason or "", error=SchemaMismatchError(reason or ""))
                workers = await self._depth.workers()
        except Exception as error:
            if not is_transient(error):
                raise
            return _DatabaseState(
                error=DatabaseUnavailableError(f"The database does not answer: {_name(error)}."),
                to_do=[f"Start PostgreSQL, or correct LLM_DATABASE_URL (`{PROGRAM} doctor`)."],
            )
        to_do = [reason] if reason else []  # a newer schema: this process continues
        if not workers["generation"]:
            to_do.append(f"Start a worker: `{PROGRAM} worker`; results wait meanwhile.")
        at_work = OK if workers["generation"] else _NO_WORKER
        return _DatabaseState(OK if reason is None else f"newer: {found}", at_work, None, to_do)


def _name(error: BaseException) -> str:
    cause = error.__cause__ or error
    return f"{type(cause).__name__} {cause}".strip().rstrip(".")
