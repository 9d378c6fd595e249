"""The registered Triton servers: the table `servers`.

Each change notifies all processes (`listener.SERVERS`). The servers of the settings are not in the table:
`server_pool` joins both.
"""

import re
from dataclasses import dataclass, field

from app.core.database import Database
from app.core.errors import ConflictError, FieldError, InvalidRequestError, NotFoundError
from app.core.listener import SERVERS
from app.core.program import PROGRAM
from app.core.settings.fields import TRITON_SECRET

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
STATIC_NAME = "default"  # of the first server of the settings; the next is `default-2`
_STATIC_NAMES = re.compile(rf"{STATIC_NAME}(-[0-9]+)?")
# A name or an IPv4 address, or an IPv6 address in brackets; and a port.
_ADDRESS = re.compile(r"([A-Za-z0-9](?:[A-Za-z0-9.-]{0,252})|\[[0-9A-Fa-f:.]{2,45}\]):([0-9]{1,5})")
MAX_SLOTS = 10_000

_NOTIFY = f"SELECT pg_notify('{SERVERS}', '')"

_COLUMNS = "name, grpc, http, metrics, slots, is_draining, secret"

_ALL = f"SELECT {_COLUMNS} FROM servers ORDER BY name"

_ADD = f"""
WITH added AS (
  INSERT INTO servers (name, grpc, http, metrics, slots, secret) VALUES ($1, $2, $3, $4, $5, $6)
  ON CONFLICT DO NOTHING RETURNING {_COLUMNS}
), notified AS ({_NOTIFY} FROM added)
SELECT added.* FROM added, notified
"""

_SIMILAR = f"""
SELECT {_COLUMNS} FROM servers WHERE name = $1 OR grpc = $2 ORDER BY name = $1 DESC LIMIT 1
"""

_DRAIN = f"""
WITH changed AS (
  UPDATE servers SET is_draining = $2 WHERE name = $1 RETURNING {_COLUMNS}
), notified AS ({_NOTIFY} FROM changed)
SELECT changed.* FROM changed, notified
"""

_REMOVE = f"""
WITH removed AS (
  DELETE FROM servers WHERE name = $1 RETURNING name
), notified AS ({_NOTIFY} FROM removed)
SELECT removed.name FROM removed, notified
"""

# Running results by server, as of the workers' last heartbeats.
_RUNNING = """
SELECT s.key AS name, sum(s.value::int) AS running
FROM workers w, jsonb_each_text(w.servers) AS s
WHERE w.dead_at IS NULL AND w.lease_expires_at > now() GROUP BY 1
"""


@dataclass(slots=True, frozen=True)
class ServerAddress:
    """A Triton server's declaration: addresses are `host:port`.

    `slots` is the maximum number of results that a worker runs on it; None: LLM_WORKER_SLOTS.
    `secret` is in the header of every request to it; no response and no log shows it.
    """

    name: str
    grpc: str
    http: str | None = None
    metrics: str | None = None
    slots: int | None = None
    is_draining: bool = False
    is_static: bool = False  # named by the settings
    secret: str | None = field(default=None, repr=False)


class ServerStore:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def all(self) -> list[ServerAddress]:
        return [ServerAddress(**row) for row in await self._database.fetch(_ALL)]

    async def add(self, server: ServerAddress) -> ServerAddress:
        """Register a server; a repetition changes nothing.

        Raises InvalidRequestError, and ConflictError if its name or address is in use.
        """
        check(server)
        wanted = (server.grpc, server.http, server.metrics, server.slots, server.secret)
        row = await self._database.fetchrow(_ADD, server.name, *wanted)
        row = row or await self._database.fetchrow(_SIMILAR, server.name, server.grpc)
        if row is None:
            raise ConflictError(f"Server {server.name!r} was removed at this moment. Try again.")
        stored = ServerAddress(**row)
        if stored.name != server.name:
            raise ConflictError(f"{server.grpc} is registered already, as {stored.name!r}.")
        if (stored.grpc, stored.http, stored.metrics, stored.slots, stored.secret) != wanted:
            raise ConflictError(
                f"There is a server {server.name!r} already, at {stored.grpc}. Remove it first, or "
                "choose another name."
            )
        return stored

    async def drain(self, name: str, *, is_draining: bool) -> ServerAddress:
        """Stop or resume giving results to a server. Raises NotFoundError."""
        row = await self._database.fetchrow(_DRAIN, name, is_draining)
        if row is None:
            raise server_not_found(name)
        return ServerAddress(**row)

    async def remove(self, name: str) -> None:
        if await self._database.fetchrow(_REMOVE, name) is None:
            raise server_not_found(name)

    async def running(self) -> dict[str, int]:
        """Running results by server, of all workers, as of some seconds ago."""
        return {row["name"]: row["running"] for row in await self._database.fetch(_RUNNING)}


def check(server: ServerAddress) -> None:
    errors = []
    if NAME.fullmatch(server.name) is None:
        errors.append(FieldError("name", f"must match {NAME.pattern}"))
    elif is_static_name(server.name):
        errors.append(FieldError("name", "is kept for the servers that TRITON_GRPC_SERVICE names"))
    for protocol in ("grpc", "http", "metrics"):
        address = getattr(server, protocol)
        if address is not None and not is_address(address):
            errors.append(FieldError(protocol, "must be `host:port`"))
    if server.slots is not None and not 1 <= server.slots <= MAX_SLOTS:
        errors.append(FieldError("slots", f"must be 1 to {MAX_SLOTS:,}"))
    if server.secret is not None and TRITON_SECRET.fullmatch(server.secret) is None:
        errors.append(FieldError("secret", f"must match {TRITON_SECRET.pattern}"))
    if errors:
        raise InvalidRequestError(
            "; ".join(f"{error.field}: {error.message}" for error in errors) + ".", errors
        )


def is_static_name(name: str) -> bool:
    return _STATIC_NAMES.fullmatch(name) is not None


def is_address(text: str) -> bool:
    match = _ADDRESS.fullmatch(text)
    return match is not None and 1 <= int(match[2]) <= 65_535


def server_not_found(name: str) -> NotFoundError:
    return NotFoundError(
        f"There is no registered server {name[:64]!r}. GET /servers and `{PROGRAM} server list` "
        "list the servers."
    )
