"""Stream tickets: credentials for a browser's EventSource, which cannot send headers.

A ticket opens one stream of one result, once, within a minute. Only its hash is stored.
"""

import hashlib
import secrets
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from app.core.database import Database
from app.core.errors import BadTicketError
from app.core.settings import Settings

_BYTES = 32
_MAX_BATCH = 1000

_ISSUE = """
INSERT INTO stream_tickets (ticket_hash, team_id, result_id, expires_at)
VALUES ($1, $2, $3, now() + make_interval(secs => $4))
ON CONFLICT (ticket_hash) DO UPDATE SET expires_at = stream_tickets.expires_at
RETURNING expires_at
"""

_REDEEM = """
DELETE FROM stream_tickets WHERE ticket_hash = $1 AND result_id = $2
RETURNING CASE WHEN expires_at > now() THEN team_id END AS team_id
"""

_REMOVE_EXPIRED = """
DELETE FROM stream_tickets WHERE ticket_hash IN (
  SELECT ticket_hash FROM stream_tickets WHERE expires_at < now()
  LIMIT $1 FOR UPDATE SKIP LOCKED)
RETURNING true
"""


@dataclass(slots=True, frozen=True)
class Ticket:
    """A ticket as returned, once, to the client that requested it."""

    text: str
    expires_at: datetime


class StreamTicketStore:
    """Issues and redeems tickets; any process redeems the tickets of all."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self._database = database
        self._seconds = settings.ticket_seconds

    async def issue(self, team_id: str, result_id: UUID) -> Ticket:
        """A new ticket for one result. The caller has checked that it belongs to the team."""
        text = secrets.token_urlsafe(_BYTES)
        row = await self._database.fetchrow(_ISSUE, _hash(text), team_id, result_id, self._seconds)
        assert row is not None
        return Ticket(text, row["expires_at"])

    async def redeem(self, text: str, result_id: UUID) -> str:
        """The team of a ticket, which is void afterwards. Raises BadTicketError."""
        row = await self._database.fetchrow(_REDEEM, _hash(text), result_id)
        if row is None or row["team_id"] is None:
            raise BadTicketError(
                "The ticket is unknown, used, expired or of another result. Ask for a new one: "
                f"POST /results/{result_id}/stream-ticket."
            )
        return str(row["team_id"])

    async def remove_expired(self) -> None:
        while len(await self._database.fetch(_REMOVE_EXPIRED, _MAX_BATCH)) == _MAX_BATCH:
            pass


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
