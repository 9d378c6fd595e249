"""The outbox of webhooks and the teams' secrets: every statement on them except the insert.

The statement that ends a result inserts its delivery (`terminal_state`). From then on it is pending until a
receiver accepts it (`delivered`) or it is given up (`failed`). A process claims a pending delivery by
moving its `next_attempt_at` beyond the duration of the call, and names that time in its verdict: the
delivery of a dead process is due again by itself, and a delayed process cannot overwrite its successor.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Literal
from uuid import UUID

from app.core.database import Connection, Database
from app.core.errors import NotFoundError
from app.core.group_commit import Batcher
from app.core.ids import HIGHEST_ID, LOWEST_ID
from app.core.listener import WEBHOOKS
from app.core.record_set import RecordSet
from app.core.settings import Settings
from app.webhooks.sender import new_secret

State = Literal["pending", "delivered", "failed"]
Receiver = tuple[str, str]  # a team, and the host and port of its URL

_MAX_BATCH = 200
_LOG_LIMIT = 20


@dataclass(slots=True, frozen=True)
class Due:
    """A delivery claimed by this process until `lease`."""

    result_id: UUID
    team_id: str
    url: str
    receiver: str  # host and port, as the URL has them
    attempts: int  # this one included
    lease: datetime
    is_job: bool = False  # `result_id` is the id of a job


@dataclass(slots=True, frozen=True)
class Delivery:
    """The delivery of a result, or of a job, to its webhook; `log` is JSON text."""

    result_id: UUID  # or the job's
    is_job: bool
    url: str
    state: State
    attempts: int
    next_attempt_at: datetime
    created_at: datetime
    finished_at: datetime | None
    log: str


@dataclass(slots=True, frozen=True)
class Verdict:
    """The state of a delivery after a call; `entry` is the call's log entry as JSON text."""

    due: Due
    state: State
    pause: float  # seconds until the next call, where it stays pending
    entry: str


_COLUMNS = ", ".join(field.name for field in fields(Delivery))
_VERDICTS = RecordSet(
    Verdict,
    ("due",),
    {
        "result_id": ("uuid", lambda verdict: verdict.due.result_id),
        "lease": ("timestamptz", lambda verdict: verdict.due.lease),
    },
)

_CLAIM = """
WITH due AS (
  SELECT result_id FROM webhook_deliveries
  WHERE state = 'pending' AND next_attempt_at <= now() AND team_id <> ALL($3::text[])
    AND (team_id, split_part(url, '/', 3)) NOT IN (SELECT * FROM unnest($4::text[], $5::text[]))
  ORDER BY next_attempt_at LIMIT $1 FOR UPDATE SKIP LOCKED
)
UPDATE webhook_deliveries d
SET attempts = d.attempts + 1, next_attempt_at = now() + make_interval(secs => $2)
FROM due WHERE d.result_id = due.result_id
RETURNING d.result_id, d.team_id, d.url, split_part(d.url, '/', 3) AS receiver, d.attempts,
          d.next_attempt_at AS lease, d.is_job
"""

_SECONDS_UNTIL_DUE = """
SELECT extract(epoch FROM min(next_attempt_at) - now())::float8
FROM webhook_deliveries WHERE state = 'pending'
"""

_CONCLUDE = f"""
UPDATE webhook_deliveries d SET
  state = i.state,
  finished_at = CASE WHEN i.state <> 'pending' THEN now() END,
  next_attempt_at = now() + make_interval(secs => i.pause),
  log = CASE WHEN jsonb_array_length(d.log) >= {_LOG_LIMIT} THEN d.log - 0 ELSE d.log END
    || jsonb_build_array(i.entry::jsonb)
FROM ({_VERDICTS.select(1)}) i
WHERE d.result_id = i.result_id AND d.state = 'pending' AND d.next_attempt_at = i.lease
"""

_REDELIVER = f"""
WITH again AS (
  UPDATE webhook_deliveries
  SET state = 'pending', attempts = 0, next_attempt_at = now(), finished_at = NULL
  WHERE result_id = $1 AND team_id = $2
  RETURNING {_COLUMNS}
)
SELECT again.*, pg_notify('{WEBHOOKS}', '') FROM again
"""

# Rows, not equalities: only an index that begins with the team has this order.
_LIST = f"""
SELECT {_COLUMNS} FROM webhook_deliveries
WHERE (team_id, result_id) >= ($1, $2) AND (team_id, result_id) < ($1, $3) {{and_state}}
ORDER BY team_id DESC, result_id DESC LIMIT $4
"""
_LISTS: dict[State | None, str] = {
    None: _LIST.format(and_state=""),
    "pending": _LIST.format(and_state="AND state = 'pending'"),
    "failed": _LIST.format(and_state="AND state = 'failed'"),
    "delivered": _LIST.format(and_state="AND state = 'delivered'"),
}

_READ_SECRET = """
SELECT secret, rotated_at,
  CASE WHEN previous_expires_at > now() THEN previous_secret END AS previous_secret,
  CASE WHEN previous_expires_at > now() THEN previous_expires_at END AS previous_expires_at
FROM webhook_secrets WHERE team_id = $1
"""

_MAKE_SECRET = """
INSERT INTO webhook_secrets (team_id, secret) VALUES ($1, $2) ON CONFLICT DO NOTHING
"""

# Repeated after a lost response, it finds its own secret and changes nothing.
_ROTATE_SECRET = """
INSERT INTO webhook_secrets AS s (team_id, secret) VALUES ($1, $2)
ON CONFLICT (team_id) DO UPDATE
SET secret = $2, previous_secret = s.secret, rotated_at = now(),
    previous_expires_at = now() + make_interval(secs => $3)
WHERE s.secret <> $2
"""


@dataclass(slots=True, frozen=True)
class TeamSecret:
    """The secrets that sign a team's messages."""

    secret: str
    rotated_at: datetime
    previous_secret: str | None
    previous_expires_at: datetime | None

    @property
    def all(self) -> list[str]:
        return [one for one in (self.secret, self.previous_secret) if one is not None]


class WebhookOutbox:
    def __init__(self, database: Database, settings: Settings) -> None:
        self._database = database
        self._rotation_seconds = settings.webhook_rotation_seconds
        seconds = settings.database_timeout_seconds
        self._verdicts: Batcher[Verdict, None] = Batcher(
            database, _conclude, max_items=_MAX_BATCH, retry_seconds=seconds
        )

    # --- for the deliverer ----------------------------------------------------------------------

    async def claim(
        self,
        count: int,
        lease_seconds: float,
        busy_teams: Sequence[str] = (),
        busy_receivers: Sequence[Receiver] = (),
    ) -> list[Due]:
        """Take due deliveries, none of the busy ones; they are due again after the lease."""
        # No retry: the deliveries of a lost claim are due again by themselves.
        async with self._database.connection() as connection:
            rows = await connection.fetch(
                _CLAIM,
                count,
                lease_seconds,
                busy_teams,
                [team for team, _ in busy_receivers],
                [receiver for _, receiver in busy_receivers],
            )
        return [Due(**row) for row in rows]

    async def seconds_until_due(self) -> float | None:
        """When the next pending delivery is due, negative if it is overdue; None if there is none."""
        row = await self._database.fetchrow(_SECONDS_UNTIL_DUE)
        assert row is not None
        seconds: float | None = row[0]
        return seconds

    async def conclude(self, verdict: Verdict) -> None:
        """Commit a verdict; without effect where the delivery was taken or repeated meanwhile."""
        await self._verdicts.submit(verdict)

    # --- for the team ---------------------------------------------------------------------------

    async def list(
        self,
        team_id: str,
        *,
        state: State | None,
        result_id: UUID | None,
        after: UUID | None,
        limit: int,
    ) -> Sequence[Delivery]:
        low, high = LOWEST_ID, after or HIGHEST_ID
        if result_id is not None:
            low, high = result_id, min(high, UUID(int=min(result_id.int + 1, HIGHEST_ID.int)))
        rows = await self._database.fetch(_LISTS[state], team_id, low, high, limit)
        return [Delivery(**row) for row in rows]

    async def redeliver(self, team_id: str, result_id: UUID) -> Delivery:
        """Make a delivery due at once, with zero attempts. Raises NotFoundError."""
        row = await self._database.fetchrow(_REDELIVER, result_id, team_id)
        if row is None:
            raise NotFoundError(
                f"There is no delivery {result_id}: the result or job has no webhook, has not ended, "
                "or does not exist."
            )
        return Delivery(*(row[field.name] for field in fields(Delivery)))

    async def secret(self, team_id: str) -> TeamSecret:
        row = await self._database.fetchrow(_READ_SECRET, team_id)
        if row is None:
            # The first of concurrent requests makes it; the others read that one.
            await self._database.fetch(_MAKE_SECRET, team_id, new_secret())
            row = await self._database.fetchrow(_READ_SECRET, team_id)
        assert row is not None
        return TeamSecret(**row)

    async def rotate_secret(self, team_id: str) -> TeamSecret:
        """A new secret; the previous one also signs for a while, older ones do not."""
        await self._database.fetch(_ROTATE_SECRET, team_id, new_secret(), self._rotation_seconds)
        return await self.secret(team_id)


async def _conclude(
    connection: Connection, verdicts: Sequence[Verdict], _resent: bool
) -> Sequence[None]:
    await connection.execute(_CONCLUDE, *_VERDICTS.arguments(verdicts))
    return [None] * len(verdicts)
