"""The Triton servers that are registered, as every process finds them: the table `servers`.

Each change is told to all processes at once (`listener.SERVERS`). Those that the settings name stand
in no table: `fleet` puts both together.
"""

import re
from dataclasses import dataclass
from typing import Any

from app.core.database import Database
from app.core.errors import ConflictError, FieldError, InvalidRequestError, NotFoundError
from app.core.listener import SERVERS

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
STATIC_NAME = "default"  # of the first server that the settings name; `default-2` and so on
_STATIC_NAMES = re.compile(rf"{STATIC_NAME}(-[0-9]+)?")
# A name or an IPv4 address, or an IPv6 address in brackets; and a port.
_ADDRESS = re.compile(r"([A-Za-z0-9](?:[A-Za-z0-9.-]{0,252})|\[[0-9A-Fa-f:.]{2,45}\]):([0-9]{1,5})")
MAX_SLOTS = 10_000

_TELL = f"SELECT pg_notify('{SERVERS}', '')"

_ADD = f"""
WITH added AS (
  INSERT INTO servers (name, grpc, http, metrics, slots) VALUES ($1, $2, $3, $4, $5)
  ON CONFLICT DO NOTHING RETURNING *
), told AS ({_TELL} FROM added)
SELECT added.* FROM added, told
"""

_LIKE = "SELECT * FROM servers WHERE name = $1 OR grpc = $2 ORDER BY name = $1 DESC LIMIT 1"

_DRAIN = f"""
WITH changed AS (
  UPDATE servers SET is_draining = $2 WHERE name = $1 RETURNING *
), told AS ({_TELL} FROM changed)
SELECT changed.* FROM changed, told
"""

_REMOVE = f"""
WITH removed AS (
  DELETE FROM servers WHERE name = $1 RETURNING name
), told AS ({_TELL} FROM removed)
SELECT removed.name FROM removed, told
"""

# What runs on each, as the workers told with their last heartbeat.
_RUNNING = """
SELECT s.key AS name, sum(s.value::int) AS running
FROM workers w, jsonb_each_text(w.servers) AS s
WHERE w.dead_at IS NULL AND w.lease_expires_at > now() GROUP BY 1
"""


@dataclass(slots=True, frozen=True)
class ServerAddress:
    """A Triton server as it was declared: addresses are `host:port`.

    `slots` is the most results that a worker runs on it at a time; None: LLM_WORKER_SLOTS.
    """

    name: str
    grpc: str
    http: str | None = None
    metrics: str | None = None
    slots: int | None = None
    is_draining: bool = False
    is_static: bool = False  # named by the settings


class ServerStore:
    """Registers, drains and removes servers."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def all(self) -> list[ServerAddress]:
        """Every registered server, by name."""
        rows = await self._database.fetch("SELECT * FROM servers ORDER BY name")
        return [_to_address(row) for row in rows]

    async def add(self, server: ServerAddress) -> ServerAddress:
        """Register a server; the same again changes nothing.

        Raises InvalidRequestError, and ConflictError when another one has its name.
        """
        check(server)
        row = await self._database.fetchrow(
            _ADD, server.name, server.grpc, server.http, server.metrics, server.slots
        )
        row = row or await self._database.fetchrow(_LIKE, server.name, server.grpc)
        if row is None:
            raise ConflictError(f"Server {server.name!r} was removed at this moment. Try again.")
        stored = _to_address(row)
        if stored.name != server.name:
            raise ConflictError(f"{server.grpc} is registered already, as {stored.name!r}.")
        wanted = (server.grpc, server.http, server.metrics, server.slots)
        if (stored.grpc, stored.http, stored.metrics, stored.slots) != wanted:
            raise ConflictError(
                f"There is a server {server.name!r} already, at {stored.grpc}. Remove it first, or "
                "choose another name."
            )
        return stored

    async def drain(self, name: str, *, is_draining: bool) -> ServerAddress:
        """Give a server nothing more to do, or again. Raises NotFoundError."""
        row = await self._database.fetchrow(_DRAIN, name, is_draining)
        if row is None:
            raise server_not_found(name)
        return _to_address(row)

    async def remove(self, name: str) -> None:
        """Forget a server; what runs on it ends there. Raises NotFoundError."""
        if await self._database.fetchrow(_REMOVE, name) is None:
            raise server_not_found(name)

    async def running(self) -> dict[str, int]:
        """How many results run on each server, all workers together, some seconds ago."""
        return {row["name"]: row["running"] for row in await self._database.fetch(_RUNNING)}


def check(server: ServerAddress) -> None:
    """Raises InvalidRequestError that names each wrong field."""
    errors = []
    if NAME.fullmatch(server.name) is None:
        errors.append(FieldError("name", f"must match {NAME.pattern}"))
    elif is_static_name(server.name):
        errors.append(FieldError("name", "is kept for the servers that TRITON_GRPC_SERVICE names"))
    for field in ("grpc", "http", "metrics"):
        address = getattr(server, field)
        if address is not None and not is_address(address):
            errors.append(FieldError(field, "must be `host:port`"))
    if server.slots is not None and not 1 <= server.slots <= MAX_SLOTS:
        errors.append(FieldError("slots", f"must be 1 to {MAX_SLOTS:,}"))
    if errors:
        raise InvalidRequestError(
            "; ".join(f"{error.field}: {error.message}" for error in errors) + ".", errors
        )


def is_static_name(name: str) -> bool:
    """Whether a name is kept for the servers that the settings name."""
    return _STATIC_NAMES.fullmatch(name) is not None


def is_address(text: str) -> bool:
    """Whether it is `host:port`."""
    match = _ADDRESS.fullmatch(text)
    return match is not None and 1 <= int(match[2]) <= 65_535


def server_not_found(name: str) -> NotFoundError:
    return NotFoundError(
        f"There is no registered server {name[:64]!r}. GET /servers, or `python -m app server list`, "
        "tells those there are."
    )


def _to_address(row: Any) -> ServerAddress:
    return ServerAddress(
        row["name"], row["grpc"], row["http"], row["metrics"], row["slots"], row["is_draining"]
    )
