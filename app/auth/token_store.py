"""API keys and revoked JWTs in the database. A revocation notifies all processes (`listener.TOKENS`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

from app.auth.api_keys import NewKey, new_key
from app.auth.principal import Principal, Scope
from app.core.database import Connection, Database
from app.core.errors import NotFoundError
from app.core.group_commit import Batcher
from app.core.ids import new_id
from app.core.listener import TOKENS
from app.core.settings import Settings

_MAX_BATCH = 500

_CREATE = """
INSERT INTO api_keys (id, team_id, name, prefix, key_hash, scopes, max_priority, expires_at)
VALUES ($1, $2, $3, $4, $5, $6, $7, now() + $8::interval)
ON CONFLICT (id) DO NOTHING
"""

# The database's clock decides how long a key is valid.
_FIND = """
SELECT id, team_id, prefix, key_hash, scopes, max_priority, revoked_at IS NOT NULL AS is_revoked,
       extract(epoch FROM expires_at - now())::float8 AS seconds_left
FROM api_keys WHERE prefix = ANY($1::text[])
"""

_COLUMNS = """
  id, team_id, name, prefix, scopes, max_priority, created_at, expires_at, last_used_at, revoked_at
"""

_LIST = f"""
SELECT {_COLUMNS} FROM api_keys
WHERE $1::text IS NULL OR team_id = $1 ORDER BY team_id, id
"""

_LIST_REVOKED = """
SELECT team_id, token_id, revoked_at FROM revoked_tokens
WHERE $1::text IS NULL OR team_id = $1 ORDER BY team_id, token_id
"""

_REVOKE = f"""
WITH revoked AS (
  UPDATE api_keys SET revoked_at = coalesce(revoked_at, now()) WHERE id = $1 OR prefix = $2
  RETURNING {_COLUMNS}
), notified AS (
  SELECT pg_notify('{TOKENS}', '') FROM revoked
)
SELECT revoked.* FROM revoked, notified
"""

_REVOKE_TOKEN = f"""
WITH revoked AS (
  INSERT INTO revoked_tokens (team_id, token_id) VALUES ($1, $2) ON CONFLICT DO NOTHING
)
SELECT pg_notify('{TOKENS}', '')
"""

_REVOKED_AMONG = """
SELECT team_id, token_id FROM revoked_tokens
JOIN unnest($1::text[], $2::text[]) AS i(team_id, token_id) USING (team_id, token_id)
"""

# At most once a minute per key, for all processes together.
_MARK_USED = """
UPDATE api_keys SET last_used_at = now()
WHERE id = ANY($1::uuid[])
  AND (last_used_at IS NULL OR last_used_at < now() - interval '1 minute')
"""


@dataclass(slots=True, frozen=True)
class KeyVerification:
    """The stored facts that a key is verified by; `seconds_left` is None if it does not expire."""

    id: UUID
    hash: bytes
    principal: Principal
    is_revoked: bool
    seconds_left: float | None


@dataclass(slots=True, frozen=True)
class ApiKey:
    id: UUID
    team_id: str
    name: str
    prefix: str
    scopes: Sequence[Scope]
    max_priority: int
    created_at: datetime
    expires_at: datetime | None
    last_used_at: datetime | None
    revoked_at: datetime | None


@dataclass(slots=True, frozen=True)
class RevokedToken:
    team_id: str
    token_id: str
    revoked_at: datetime


class TokenStore:
    """Create, find, list and revoke keys; revoke JWTs. Concurrent lookups share one statement."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self._database = database
        self._keys: Batcher[str, KeyVerification | None] = Batcher(
            database,
            _find_keys,
            max_items=_MAX_BATCH,
            retry_seconds=settings.database_timeout_seconds,
        )
        self._revoked: Batcher[tuple[str, str], bool] = Batcher(
            database,
            _find_revoked,
            max_items=_MAX_BATCH,
            retry_seconds=settings.database_timeout_seconds,
        )

    # --- for requests ---------------------------------------------------------------------------

    async def find(self, prefix: str) -> KeyVerification | None:
        """The key with this prefix; also a revoked or expired one."""
        return await self._keys.submit(prefix)

    async def is_revoked(self, team_id: str, token_id: str) -> bool:
        return await self._revoked.submit((team_id, token_id))

    async def mark_used(self, ids: Sequence[UUID]) -> None:
        await self._database.fetch(_MARK_USED, sorted(ids))

    # --- for operators --------------------------------------------------------------------------

    async def create(
        self,
        team_id: str,
        *,
        name: str = "",
        scopes: Sequence[Scope] = ("use",),
        lifetime: timedelta | None = None,
        max_priority: int = 0,
    ) -> NewKey:
        key = new_key()
        await self._database.fetch(
            _CREATE, new_id(), team_id, name, key.prefix, key.hash, scopes, max_priority, lifetime
        )
        return key

    async def list(self, team_id: str | None = None) -> Sequence[ApiKey]:
        return [ApiKey(**row) for row in await self._database.fetch(_LIST, team_id)]

    async def list_revoked(self, team_id: str | None = None) -> Sequence[RevokedToken]:
        return [RevokedToken(**row) for row in await self._database.fetch(_LIST_REVOKED, team_id)]

    async def revoke(self, key_id: UUID | None, prefix: str | None = None) -> ApiKey:
        """Revoke a key, named by its id or its prefix. Raises NotFoundError."""
        row = await self._database.fetchrow(_REVOKE, key_id, prefix)
        if row is None:
            raise NotFoundError(f"There is no API key {prefix or key_id}.")
        return ApiKey(**row)

    async def revoke_token(self, team_id: str, token_id: str) -> None:
        """Revoke every JWT with these claims, including one that is still unused."""
        await self._database.fetch(_REVOKE_TOKEN, team_id, token_id)


async def _find_keys(
    connection: Connection, prefixes: Sequence[str], _resent: bool
) -> Sequence[KeyVerification | None]:
    rows = await connection.fetch(_FIND, list(set(prefixes)))
    found = {
        row["prefix"]: KeyVerification(
            row["id"],
            row["key_hash"],
            Principal(row["team_id"], frozenset(row["scopes"]), row["max_priority"], row["prefix"]),
            row["is_revoked"],
            row["seconds_left"],
        )
        for row in rows
    }
    return [found.get(prefix) for prefix in prefixes]


async def _find_revoked(
    connection: Connection, tokens: Sequence[tuple[str, str]], _resent: bool
) -> Sequence[bool]:
    teams, ids = [team for team, _ in tokens], [token for _, token in tokens]
    rows = await connection.fetch(_REVOKED_AMONG, teams, ids)
    revoked = {(row["team_id"], row["token_id"]) for row in rows}
    return [token in revoked for token in tokens]
