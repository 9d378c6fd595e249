"""What /health/ready tells: which part is down, and what to do about it.

Ready means: results are accepted and kept. That needs the database and its tables; without Triton or
a worker they wait, so these are told and refuse nobody.
"""

import asyncio
import time
from dataclasses import dataclass, field

from app.core import schema_version
from app.core.database import Database, is_transient
from app.core.errors import DatabaseUnavailableError, SchemaMismatchError, ServiceError
from app.inference.model_registry import ModelRegistry
from app.queue.depth import QueueDepth

_PATIENCE = 3.0  # seconds: who asks waits no longer than about that
_FRESH_SECONDS = 1.0
OK = "ok"
_UNKNOWN = "unknown"
_NO_WORKER = "none renews its lease"


@dataclass(slots=True, frozen=True)
class _Look:
    """At the database."""

    schema: str = _UNKNOWN
    workers: str = _UNKNOWN
    error: ServiceError | None = None
    to_do: list[str] = field(default_factory=list)


class Readiness:
    """Looks at the parts; however many ask, at the database once a second."""

    def __init__(self, database: Database, registry: ModelRegistry, depth: QueueDepth) -> None:
        self._database = database
        self._registry = registry
        self._depth = depth
        self._looking = asyncio.Lock()
        self._look = _Look()
        self._expires = 0.0

    async def report(self) -> dict[str, object]:
        """Each part and what to do.

        Raises DatabaseUnavailableError or SchemaMismatchError, with the same as members.
        """
        async with self._looking:
            if time.monotonic() >= self._expires:
                self._look = await self._look_at_database()
                self._expires = time.monotonic() + _FRESH_SECONDS
            look = self._look
        ready, triton = self._registry.ready(), self._registry.triton_error
        to_do = look.to_do[:]
        if triton:
            to_do.append("Start Triton, or correct TRITON_GRPC_SERVICE; results wait meanwhile.")
        elif not ready:
            to_do.append(
                "Load a model: POST /models/{name}/load. Triton's log tells why it is not."
            )
        parts: dict[str, object] = {
            "database": OK if look.error is None else look.error.detail,
            "schema": look.schema,
            "triton": triton or OK,
            "models_ready": ready,
            "workers": look.workers,
            "to_do": to_do,
        }
        if look.error is None:
            return parts
        if isinstance(look.error, SchemaMismatchError):
            parts["database"] = OK
        error = type(look.error)(look.error.detail, headers={"Retry-After": "2"}, extra=parts)
        raise error

    async def _look_at_database(self) -> _Look:
        try:
            async with asyncio.timeout(_PATIENCE):
                found = await schema_version.read(self._database)
                reason = schema_version.fault(found)
                if found is None or (reason and found < schema_version.expected()):
                    return _Look(reason or "", error=SchemaMismatchError(reason or ""))
                workers = await self._depth.workers()
        except Exception as error:
            if not is_transient(error):
                raise
            return _Look(
                error=DatabaseUnavailableError(f"The database does not answer: {_name(error)}."),
                to_do=["Start PostgreSQL, or correct LLM_DATABASE_URL (`python -m app doctor`)."],
            )
        to_do = [reason] if reason else []  # a newer schema: this process goes on
        if not workers["generation"]:
            to_do.append("Start a worker: `python -m app worker`; results wait meanwhile.")
        at_work = OK if workers["generation"] else _NO_WORKER
        return _Look(OK if reason is None else f"newer: {found}", at_work, None, to_do)


def _name(error: BaseException) -> str:
    cause = error.__cause__ or error
    return f"{type(cause).__name__} {cause}".strip().rstrip(".")
