"""Idempotency keys: a request that is sent again finds the result of the first sending.

A key belongs to a team and names one result until it expires or the result is deleted. It is
taken in the statement that stores the result (`enqueue`), so there is never the one without the
other; whose it is, is looked up before and after.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

import orjson

from app.core.database import Connection, Database, await_standby
from app.core.group_commit import Batcher
from app.core.settings import Settings

_MAX_BATCH = 1000


@dataclass(slots=True, frozen=True)
class NewKey:
    """An idempotency key that a new result takes; while it is another's, nothing is stored."""

    key: str
    request_hash: bytes
    seconds: float  # until it expires


@dataclass(slots=True, frozen=True)
class TakenKey:
    """A key in use: whose it is, and the hash of the request that took it."""

    result_id: UUID
    request_hash: bytes


def hash_request(request: Mapping[str, object]) -> bytes:
    """SHA-256 of a request in a canonical form: the order of its members does not matter."""
    return hashlib.sha256(orjson.dumps(request, option=orjson.OPT_SORT_KEYS)).digest()


def take_keys_sql(has_sources: str) -> str:
    """A CTE that takes the keys of the rows `input`; `keys` has those that are taken.

    The insertion of a key decides: it waits for a concurrent insertion of the same one, so that of
    all batches of all processes one gets it, and of one batch its first row. In order of team and
    key, so that no two batches wait for each other. A result without its sources takes no key. Only
    a later statement can see the owner of a refused key: this one's snapshot is older.
    """
    return f"""keys AS (
  INSERT INTO idempotency_keys AS k (team_id, key, request_hash, result_id, expires_at)
  SELECT DISTINCT ON (i.team_id, i.key) i.team_id, i.key, i.request_hash, i.id,
         now() + make_interval(secs => i.key_seconds)
  FROM input i WHERE i.key IS NOT NULL AND {has_sources}
  ORDER BY i.team_id, i.key, i.id
  ON CONFLICT (team_id, key) DO UPDATE SET request_hash = excluded.request_hash,
    result_id = excluded.result_id, expires_at = excluded.expires_at
    WHERE k.expires_at <= now()
  RETURNING result_id
), """


_FIND = """
SELECT k.team_id, k.key, k.request_hash, k.result_id
FROM unnest($1::text[], $2::text[]) AS i(team_id, key)
-- OFFSET 0: each key is found by itself. A join may read all keys.
CROSS JOIN LATERAL (
  SELECT * FROM idempotency_keys WHERE key = i.key AND team_id = i.team_id OFFSET 0) k
WHERE k.expires_at > now()
"""

_REMOVE_EXPIRED = """
WITH removed AS (
  DELETE FROM idempotency_keys k USING (
    SELECT team_id, key FROM idempotency_keys WHERE expires_at <= now()
    ORDER BY expires_at LIMIT $1 FOR UPDATE SKIP LOCKED) e
  WHERE k.team_id = e.team_id AND k.key = e.key
  RETURNING true
)
SELECT count(*) AS removed FROM removed
"""


class IdempotencyKeys:
    """Look keys up, and remove the expired ones."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self._database = database
        self._seconds = settings.idempotency_seconds
        self._finds: Batcher[tuple[str, str], TakenKey | None] = Batcher(
            database, _find, max_items=_MAX_BATCH, retry_seconds=settings.database_timeout_seconds
        )

    def new(self, key: str, request_hash: bytes) -> NewKey:
        return NewKey(key, request_hash, self._seconds)

    async def find(self, team_id: str, key: str) -> TakenKey | None:
        return await self._finds.submit((team_id, key))

    async def keep(self, team_id: str, key: str, seconds: float) -> None:
        """Let a key live so long from now on, if it has no longer to live."""
        await self._database.fetch(
            """UPDATE idempotency_keys SET expires_at = now() + make_interval(secs => $3)
               WHERE team_id = $1 AND key = $2
                 -- Not at each use: a tenth of the time may be missing.
                 AND expires_at BETWEEN now() AND now() + make_interval(secs => $3 * 0.9)""",
            team_id,
            key,
            seconds,
        )

    async def forget_unless_good(self, team_id: str, key: str, version: int) -> None:
        """Free a key whose result failed, is erased, or is of another version of its model."""
        await self._database.fetch(
            """DELETE FROM idempotency_keys k USING results r
               WHERE k.team_id = $1 AND k.key = $2 AND r.id = k.result_id
                 AND (r.state = 'failed' OR r.erased_at IS NOT NULL
                   OR r.state = 'completed' AND r.model_version IS DISTINCT FROM $3)""",
            team_id,
            key,
            version,
        )

    async def remove_expired(self) -> int:
        total: int = 0
        while True:
            row = await self._database.fetchrow(_REMOVE_EXPIRED, _MAX_BATCH)
            assert row is not None
            total += row["removed"]
            if row["removed"] < _MAX_BATCH:
                return total


async def _find(
    connection: Connection, keys: Sequence[tuple[str, str]], _resent: bool
) -> Sequence[TakenKey | None]:
    rows = await connection.fetch(_FIND, [team for team, _ in keys], [key for _, key in keys])
    found = {
        (row["team_id"], row["key"]): TakenKey(row["result_id"], row["request_hash"])
        for row in rows
    }
    if found:
        await await_standby(connection)  # their ids are returned next
    return [found.get(key) for key in keys]
