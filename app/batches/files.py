"""Files of clients and batches: kept in PostgreSQL, in parts, never whole in memory.

A file is visible once its last part is stored. Parts of an aborted upload are removed.
"""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from typing import Literal
from uuid import UUID

from app.core.byte_budget import charged
from app.core.database import Connection, Database, lock_team
from app.core.errors import NotFoundError, StorageFullError
from app.core.ids import HIGHEST_ID, LOWEST_ID, lowest_id, new_id

Order = Literal["asc", "desc"]

PART_BYTES = 1_000_000
_MAX_BATCH = 20  # files that one statement removes, with their parts
_UNFINISHED_TIME = timedelta(days=1)  # longer than any upload takes


@dataclass(slots=True, frozen=True)
class File:
    """A whole file; times and sizes in seconds and bytes."""

    id: UUID
    purpose: str
    filename: str
    size: int
    expires_at: datetime | None


_COLUMNS = ", ".join(field.name for field in fields(File))

_BEGIN = """
INSERT INTO files (id, team_id, purpose, filename) VALUES ($1, $2, '', '') ON CONFLICT DO NOTHING
"""
_APPEND = """
INSERT INTO file_parts (file_id, place, content) VALUES ($1, $2, $3) ON CONFLICT DO NOTHING
"""
_FINISH = """
UPDATE files SET size = $2, purpose = $3, filename = $4,
  expires_at = now() + make_interval(secs => $5)
WHERE id = $1
"""
# The file itself is excluded: it may be stored already, with its response lost.
_STORED_BYTES = """
SELECT coalesce(sum(size), 0)::bigint FROM files
WHERE team_id = $1 AND id <> $2 AND size IS NOT NULL
"""
_VISIBLE = "size IS NOT NULL AND (expires_at IS NULL OR expires_at > now())"
_GET = f"SELECT {_COLUMNS} FROM files WHERE id = $1 AND team_id = $2 AND {_VISIBLE}"
# Rows, not equalities: only an index that begins with the team has this order.
_LIST = f"""
SELECT {_COLUMNS} FROM files
WHERE (team_id, id) > ($1, $2) AND (team_id, id) < ($1, $3)
  AND ($4::text IS NULL OR purpose = $4) AND {_VISIBLE}
ORDER BY team_id {{order}}, id {{order}} LIMIT $5
"""
_LISTS: dict[Order, str] = {"asc": _LIST.format(order="ASC"), "desc": _LIST.format(order="DESC")}
_DELETE = "DELETE FROM files WHERE id = $1 AND team_id = $2 AND size IS NOT NULL RETURNING id"
_DISCARD = "DELETE FROM files WHERE id = $1 AND size IS NULL"
_PIECE = """
SELECT substring(content FROM $3 FOR $4) AS content, octet_length(content) AS size FROM file_parts
WHERE file_id = $1 AND place = $2
"""
_REMOVE_EXPIRED = """
DELETE FROM files WHERE id IN (
  SELECT id FROM files WHERE expires_at <= now() LIMIT $1 FOR UPDATE SKIP LOCKED)
RETURNING id
"""
_REMOVE_UNFINISHED = """
DELETE FROM files WHERE id IN (
  SELECT id FROM files WHERE size IS NULL AND id < $2 LIMIT $1 FOR UPDATE SKIP LOCKED)
RETURNING id
"""


@dataclass(slots=True, frozen=True)
class FileDetails:
    purpose: str
    filename: str
    expires_seconds: int | None = None  # from now; None: it does not expire


class FileWriter:
    """Writes one file part by part; it is invisible before `finish_file`."""

    def __init__(self, database: Database, team_id: str) -> None:
        self.id = new_id()
        self.size = 0
        self._database = database
        self._team_id = team_id
        self._buffer = bytearray()
        self._parts = 0
        self._is_begun = False

    async def write(self, content: bytes) -> None:
        self._buffer += content
        self.size += len(content)
        while len(self._buffer) >= PART_BYTES:
            await self._store(bytes(self._buffer[:PART_BYTES]))
            del self._buffer[:PART_BYTES]

    async def store_rest(self) -> None:
        await self._begin()
        if self._buffer:
            await self._store(bytes(self._buffer))
            self._buffer.clear()

    async def discard(self) -> None:
        """Remove the written parts, unless the file is finished."""
        if self._is_begun:
            await self._database.fetch(_DISCARD, self.id)

    async def _begin(self) -> None:
        if not self._is_begun:
            self._is_begun = True
            await self._database.fetch(_BEGIN, self.id, self._team_id)

    async def _store(self, content: bytes) -> None:
        await self._begin()
        await self._database.fetch(_APPEND, self.id, self._parts, content)
        self._parts += 1


async def finish_file(connection: Connection, writer: FileWriter, details: FileDetails) -> None:
    described = details.purpose, details.filename, details.expires_seconds
    await connection.execute(_FINISH, writer.id, writer.size, *described)


class FileStore:
    """Files of one team at a time; another team's do not exist: NotFoundError."""

    def __init__(self, database: Database, max_bytes: int = 0) -> None:
        """`max_bytes`: of all files of a team; 0 is no bound."""
        self._database = database
        self._max_bytes = max_bytes

    async def check_room(self, team_id: str) -> None:
        """Raises StorageFullError."""
        if self._max_bytes:
            await self._database.run(
                lambda connection: self._check(connection, team_id, UUID(int=0), 1)
            )

    def writer(self, team_id: str) -> FileWriter:
        return FileWriter(self._database, team_id)

    async def finish(self, team_id: str, writer: FileWriter, details: FileDetails) -> File:
        """Commit files of one team one after another. Raises StorageFullError."""
        await writer.store_rest()

        async def work(connection: Connection) -> None:
            async with connection.transaction():
                if self._max_bytes:
                    await lock_team(connection, "files", team_id)
                    await self._check(connection, team_id, writer.id, writer.size)
                await finish_file(connection, writer, details)

        await self._database.run(work)
        return await self.get(team_id, writer.id)

    async def _check(self, connection: Connection, team_id: str, new: UUID, size: int) -> None:
        stored = await connection.fetchval(_STORED_BYTES, team_id, new)
        if stored + size > self._max_bytes:
            raise StorageFullError(
                f"The files of your team have {stored} bytes, of {self._max_bytes} that they may "
                "(LLM_TEAM_MAX_FILE_BYTES). Delete old files, or send a smaller one.",
                extra={"limit": "max_file_bytes", "allowed": self._max_bytes},
            )

    async def get(self, team_id: str, file_id: UUID) -> File:
        row = await self._database.fetchrow(_GET, file_id, team_id)
        if row is None:
            raise file_not_found(file_id)
        return File(**row)

    async def list(
        self, team_id: str, *, purpose: str | None, after: UUID | None, limit: int, order: Order
    ) -> Sequence[File]:
        low = after if after and order == "asc" else LOWEST_ID
        high = after if after and order == "desc" else HIGHEST_ID
        rows = await self._database.fetch(_LISTS[order], team_id, low, high, purpose, limit)
        return [File(**row) for row in rows]

    async def delete(self, team_id: str, file_id: UUID) -> None:
        if await self._database.fetchrow(_DELETE, file_id, team_id) is None:
            raise file_not_found(file_id)

    async def read(
        self, team_id: str, file_id: UUID, piece_bytes: int = PART_BYTES
    ) -> AsyncGenerator[bytes, None]:
        """The content of a file in pieces. Raises NotFoundError, also when it is deleted meanwhile.

        Each piece is within the byte budget until the next one is read: raises MemoryBusyError.
        """
        size = (await self.get(team_id, file_id)).size
        place = offset = read = 0
        while read < size:
            async with charged(piece_bytes):
                row = await self._database.fetchrow(_PIECE, file_id, place, offset + 1, piece_bytes)
                if row is None:
                    raise file_not_found(file_id)
                content: bytes = row["content"]
                yield content
            offset, read = offset + len(content), read + len(content)
            if offset == row["size"]:
                place, offset = place + 1, 0

    async def remove_expired(self) -> None:
        await self._remove(_REMOVE_EXPIRED)
        # By the database's clock: one host whose clock is ahead must not end the uploads of all.
        row = await self._database.fetchrow("SELECT now() AS now")
        assert row is not None
        await self._remove(_REMOVE_UNFINISHED, lowest_id(row["now"] - _UNFINISHED_TIME))

    async def _remove(self, statement: str, *arguments: object) -> None:
        while len(await self._database.fetch(statement, _MAX_BATCH, *arguments)) == _MAX_BATCH:
            pass


def file_not_found(file_id: object) -> NotFoundError:
    return NotFoundError(f"There is no file {file_id}.")
