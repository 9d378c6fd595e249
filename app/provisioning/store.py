"""The table `launches`: every statement about it.

A follower claims launches that are due, each under an exclusive lease, and writes its finding by one
guarded statement that names that lease. A request to stop only marks a launch: the follower with the
lease continues, and the next check finds the mark. So a job that is being submitted at that moment
is recorded, and then ended.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, fields
from datetime import datetime
from typing import Any, Literal
from uuid import UUID

import asyncpg
import orjson

from app.core.database import Connection, Database
from app.core.errors import ConflictError, NotFoundError
from app.core.ids import HIGHEST_ID, LOWEST_ID, new_id
from app.core.listener import LAUNCHES
from app.provisioning.profiles import Provider
from app.provisioning.spec import LaunchSpec

State = Literal[
    "submitted", "pending", "starting", "healthy", "unhealthy", "stopping", "stopped", "timeout",
    "failed",
]  # fmt: skip
EndState = Literal["stopped", "timeout", "failed"]
STOPPED_ON_REQUEST = "stopped on request"


@dataclass(slots=True, frozen=True)
class Launch:
    """A row of the table, without `log`, which may be long."""

    id: UUID
    name: str
    provider: Provider
    profile: str
    model: str
    spec_json: str
    state: State
    reason: str
    end_state: EndState | None
    job_id: str | None
    node: str | None
    machine: str | None
    ports: tuple[int, ...] | None
    address: dict[str, str] | None
    requests: int
    exit_code: int | None
    submitted_at: datetime | None
    started_at: datetime | None
    healthy_at: datetime | None
    last_used_at: datetime | None
    stopping_at: datetime | None
    ended_at: datetime | None
    secret: str | None = field(repr=False)

    @property
    def spec(self) -> LaunchSpec:
        """The request. Raises ValidationError if a version with other rules has stored it."""
        return LaunchSpec.model_validate_json(self.spec_json)


@dataclass(slots=True, frozen=True)
class ClaimedLaunch(Launch):
    """A launch that this process has claimed until `lease`; `now`: by the database's clock."""

    lease: datetime
    now: datetime


_COLUMNS = ", ".join(f"launches.{one.name}" for one in fields(Launch)).replace(
    "launches.spec_json", "launches.spec AS spec_json"
)

_CREATE = f"""
WITH made AS (
  INSERT INTO launches (id, team_id, name, provider, profile, model, spec)
  SELECT $1::uuid, $2::varchar, $3::varchar, $4::varchar, $5::varchar, $6::varchar, $7::jsonb
  WHERE NOT EXISTS (SELECT FROM servers WHERE name = $3::varchar)
  ON CONFLICT DO NOTHING RETURNING {_COLUMNS}
)
SELECT made.*, pg_notify('{LAUNCHES}', '') FROM made
"""

# The follower of a tunnel is replaced only when it is late.
_DUE_AT = """
  greatest(next_check_at, lease_expires_at,
           CASE WHEN follower_id IS NULL OR follower_id = $3 THEN next_check_at
                ELSE next_check_at + make_interval(secs => $4) END)
"""
_FOLLOWED = """
  ended_at IS NULL AND profile = ANY($1::text[]) AND (machine IS NULL OR machine = $2)
"""

_CLAIM = f"""
WITH due AS (
  SELECT id FROM launches WHERE {_FOLLOWED} AND next_check_at <= now() AND {_DUE_AT} <= now()
  ORDER BY next_check_at LIMIT $5 FOR UPDATE SKIP LOCKED
)
UPDATE launches SET lease_expires_at = now() + make_interval(secs => $6)
FROM due WHERE launches.id = due.id
RETURNING {_COLUMNS}, launches.lease_expires_at AS lease, now() AS now
"""

_SECONDS_UNTIL_DUE = f"""
SELECT extract(epoch FROM min({_DUE_AT}) - now())::float8 FROM launches WHERE {_FOLLOWED}
"""

# `step` has the columns' names and types. A stopping launch changes its state only to an end, and
# its reason stays.
_ADVANCE = """
UPDATE launches SET
  state = CASE WHEN launches.state = 'stopping' AND NOT $4::boolean THEN launches.state ELSE step.state END,
  reason = CASE WHEN launches.state = 'stopping' THEN launches.reason ELSE left(step.reason, 2000) END,
  end_state = coalesce(launches.end_state, step.end_state),
  job_id = coalesce(step.job_id, launches.job_id),
  node = coalesce(step.node, launches.node),
  machine = coalesce(launches.machine, step.machine),
  secret = coalesce(launches.secret, step.secret),
  ports = coalesce(step.ports, launches.ports),
  address = coalesce(step.address, launches.address),
  requests = coalesce(step.requests, launches.requests),
  -- An unchanged log is not written again.
  log = CASE WHEN launches.log = step.log THEN launches.log ELSE coalesce(step.log, launches.log) END,
  exit_code = coalesce(step.exit_code, launches.exit_code),
  submitted_at = CASE WHEN step.job_id IS NULL THEN launches.submitted_at
                      ELSE coalesce(launches.submitted_at, now()) END,
  started_at = CASE WHEN step.state IN ('starting', 'healthy', 'unhealthy')
                    THEN coalesce(launches.started_at, now()) ELSE launches.started_at END,
  healthy_at = CASE WHEN step.state = 'healthy'
                    THEN coalesce(launches.healthy_at, now()) ELSE launches.healthy_at END,
  last_used_at = CASE WHEN $5::boolean THEN now() ELSE launches.last_used_at END,
  stopping_at = CASE WHEN step.state = 'stopping'
                     THEN coalesce(launches.stopping_at, now()) ELSE launches.stopping_at END,
  ended_at = CASE WHEN $4::boolean THEN now() END,
  follower_id = step.follower_id,
  lease_expires_at = NULL,
  next_check_at = now() + make_interval(
    secs => CASE WHEN launches.state = $6::varchar THEN $7::float8 ELSE 0 END)
FROM jsonb_populate_record(NULL::launches, $3::jsonb) AS step
WHERE launches.id = $1 AND launches.lease_expires_at = $2 AND launches.ended_at IS NULL
"""

_STOP = f"""
WITH asked AS (
  UPDATE launches SET state = 'stopping', end_state = 'stopped', reason = $3,
    stopping_at = now(), next_check_at = now()
  WHERE id = $1 AND team_id = $2 AND ended_at IS NULL AND state <> 'stopping' RETURNING 1
)
SELECT pg_notify('{LAUNCHES}', '') FROM asked
"""

_LIST = f"""
SELECT {_COLUMNS} FROM launches
WHERE (team_id, id) >= ($1, $2) AND (team_id, id) < ($1, $3) AND ($5::text IS NULL OR state = $5)
ORDER BY team_id DESC, id DESC LIMIT $4
"""


@dataclass(slots=True, frozen=True)
class Step:
    """Finding of one check; None keeps the stored value. `pause`: seconds to the next check."""

    state: State
    pause: float
    reason: str = ""
    end_state: EndState | None = None
    job_id: str | None = None
    node: str | None = None
    machine: str | None = None
    ports: tuple[int, ...] | None = None
    address: dict[str, str] | None = None
    requests: int | None = None
    log: str | None = None
    exit_code: int | None = None
    used: bool = False
    follower_id: UUID | None = None
    secret: str | None = field(default=None, repr=False)

    @property
    def is_end(self) -> bool:
        return self.state in ("stopped", "timeout", "failed")


@dataclass(slots=True, frozen=True)
class Follower:
    """A process that follows launches of these profiles, and local ones of its machine.

    It takes over the launch of another process's tunnel after a delay of `takeover_seconds`.
    """

    profiles: Sequence[str]
    machine: str
    id: UUID
    takeover_seconds: float


class LaunchStore:
    def __init__(self, database: Database) -> None:
        self._database = database

    # --- for the team ---------------------------------------------------------------------------

    async def create(self, team_id: str, provider: Provider, spec: LaunchSpec) -> Launch:
        """Store a launch; a follower does the rest. Raises ConflictError if its name is taken."""
        identifier = new_id()

        async def insert(connection: Connection) -> asyncpg.Record | None:
            found = await connection.fetchrow(
                _CREATE, identifier, team_id, spec.name, provider, spec.profile, spec.model,
                spec.to_json(),
            )  # fmt: skip
            # When it is repeated after a lost response, the statement finds its own row.
            return found or await connection.fetchrow(
                f"SELECT {_COLUMNS} FROM launches WHERE id = $1", identifier
            )

        row = await self._database.run(insert)
        if row is None:
            raise ConflictError(
                f"The name {spec.name!r} is taken by a launch that has not ended, or by a server. "
                "Choose another one, or stop that one first."
            )
        return Launch(**_members(row))

    async def list(
        self, team_id: str, *, state: State | None, after: UUID | None, limit: int
    ) -> Sequence[Launch]:
        rows = await self._database.fetch(
            _LIST, team_id, LOWEST_ID, after or HIGHEST_ID, limit, state
        )
        return [Launch(**_members(row)) for row in rows]

    async def get(self, team_id: str, launch_id: UUID) -> Launch:
        row = await self._database.fetchrow(
            f"SELECT {_COLUMNS} FROM launches WHERE id = $1 AND team_id = $2", launch_id, team_id
        )
        return Launch(**_members(_found(row, launch_id)))

    async def log(self, team_id: str, launch_id: UUID) -> str:
        row = await self._database.fetchrow(
            "SELECT log FROM launches WHERE id = $1 AND team_id = $2", launch_id, team_id
        )
        text: str = _found(row, launch_id)["log"]
        return text

    async def stop(self, team_id: str, launch_id: UUID) -> Launch:
        await self._database.fetch(_STOP, launch_id, team_id, STOPPED_ON_REQUEST)
        return await self.get(team_id, launch_id)

    async def delete(self, team_id: str, launch_id: UUID) -> None:
        row = await self._database.fetchrow(
            "DELETE FROM launches WHERE id = $1 AND team_id = $2 AND ended_at IS NOT NULL "
            "RETURNING id",
            launch_id,
            team_id,
        )
        if row is None:
            launch = await self.get(team_id, launch_id)
            raise ConflictError(
                f"The launch is {launch.state}: stop it first (POST /launches/{launch_id}/stop)."
            )

    # --- for its follower -----------------------------------------------------------------------

    async def claim(
        self, follower: Follower, count: int, lease_seconds: float
    ) -> Sequence[ClaimedLaunch]:
        """Claim launches that are due; no other follower claims them before the lease is over."""
        async with self._database.connection() as connection:
            rows = await connection.fetch(_CLAIM, *astuple(follower), count, lease_seconds)
        return [ClaimedLaunch(**_members(row), lease=row["lease"], now=row["now"]) for row in rows]

    async def seconds_until_due(self, follower: Follower) -> float | None:
        """Seconds until the next launch is due, negative if it is overdue; None if none is open."""
        row = await self._database.fetchrow(_SECONDS_UNTIL_DUE, *astuple(follower))
        assert row is not None
        seconds: float | None = row[0]
        return seconds

    async def advance(self, launch: ClaimedLaunch, step: Step) -> None:
        """Commit a finding; no effect after the lease is lost."""
        await self._database.fetch(
            _ADVANCE, launch.id, launch.lease, orjson.dumps(step).decode(), step.is_end, step.used,
            launch.state, step.pause,
        )  # fmt: skip


def _found(row: asyncpg.Record | None, launch_id: UUID) -> asyncpg.Record:
    if row is None:
        raise NotFoundError(f"There is no launch {launch_id}.")
    return row


def _members(row: asyncpg.Record) -> dict[str, Any]:
    return {one.name: row[one.name] for one in fields(Launch)} | {
        "ports": tuple(orjson.loads(row["ports"])) if row["ports"] else None,
        "address": orjson.loads(row["address"]) if row["address"] else None,
    }
