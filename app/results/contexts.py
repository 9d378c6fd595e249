"""Contexts: saved prompts, plain text or chat messages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any
from uuid import UUID

import asyncpg
import orjson

from app.core.byte_budget import read_within
from app.core.database import Connection, Database, await_standby
from app.core.errors import ConflictError, ErasedError, NotFoundError
from app.core.fair_share import in_turns
from app.core.group_commit import Batcher
from app.core.ids import new_id
from app.core.settings import Settings
from app.inference.images import to_member
from app.queue.enqueue import CONTEXTS, NewContext, context_bytes
from app.queue.job_queue import JobQueue
from app.results.plain_contexts import PlainContexts, TextSize
from app.results.requests import ContextCreate, Message
from app.results.sizes import (
    LONG_BYTES,
    PageSizes,
    SizedPage,
    json_bytes,
    loaded_bytes,
    read_page,
    text_bytes,
    unless_long,
)
from app.results.usage import ledger

_MAX_BATCH = 1000

_INSERT = f"""
INSERT INTO contexts ({", ".join(CONTEXTS.types)}) {CONTEXTS.select(1)} ON CONFLICT (id) DO NOTHING
"""

# As in `ResultStore`: a long text is fetched separately.
_SIZE = f"{text_bytes('content')} + {json_bytes('messages')}"
_SIZED = f"id, {_SIZE} AS size"
_SHORT_ONLY = ", ".join(
    [
        unless_long("content", text_bytes("content")),
        unless_long("messages", json_bytes("messages")),
    ]
)
_BY_IDS = f"""
SELECT {_SHORT_ONLY}, {_SIZED}, team_id, metadata, erased_at
FROM contexts WHERE id = ANY($1::uuid[])
"""
_BY_ID = "SELECT id, content, messages, metadata, erased_at FROM contexts WHERE id = $1"

_SIZES = f"""
SELECT {_SIZED} FROM contexts
WHERE team_id = $1 AND id < coalesce($2, 'ffffffff-ffff-ffff-ffff-ffffffffffff'::uuid)
ORDER BY id DESC LIMIT $3
"""
_LISTED = """
SELECT id, content, messages, metadata, erased_at FROM contexts
WHERE id = ANY($1::uuid[]) AND team_id = $2 ORDER BY id DESC
"""

_LOCK = "SELECT 1 FROM contexts WHERE id = $1 AND team_id = $2 FOR UPDATE"
_COUNT_PENDING = "SELECT count(*) FROM results WHERE context_id = $1 AND state = 'pending'"
# All at once, in the order of ids, as every other statement that locks results.
_LOCK_RESULTS = """
SELECT id, state = 'pending' AS is_pending FROM results WHERE context_id = $1 ORDER BY id FOR UPDATE
"""
_DELETE_CHUNKS = "DELETE FROM result_chunks WHERE result_id = ANY($1::uuid[])"


@dataclass(slots=True, frozen=True)
class Context:
    id: UUID
    content: str | None
    messages: list[dict[str, Any]] | None
    metadata: dict[str, Any]
    erased_at: datetime | None = None  # when its text was erased


class ContextStore:
    """Contexts of one team at a time; another team's do not exist: NotFoundError."""

    def __init__(self, database: Database, queue: JobQueue, settings: Settings) -> None:
        self.plain = PlainContexts()
        self._database = database
        self._queue = queue
        seconds = settings.database_timeout_seconds
        self._inserts: Batcher[NewContext, None] = Batcher(
            database,
            _insert,
            max_items=_MAX_BATCH,
            retry_seconds=seconds,
            size=lambda contexts: sum(map(context_bytes, contexts)),
        )
        self._reads: Batcher[UUID, asyncpg.Record | None] = Batcher(
            database, _read, max_items=_MAX_BATCH, retry_seconds=seconds
        )

    async def create(self, new: NewContext) -> Context:
        await self._inserts.submit(new)
        row = await self._reads.submit(new.id)
        if row is None:  # deleted already
            raise context_not_found(new.id)
        # Its texts are in memory: they are not read again.
        saved = {**row, "content": new.content, "messages": new.messages}
        self._remember(new.team_id, saved)
        return _to_context(saved)

    async def get(self, team_id: str, context_id: UUID) -> Context:
        context, _ = await self.get_charged(team_id, context_id)
        return context

    async def get_charged(self, team_id: str, context_id: UUID) -> tuple[Context, int]:
        """A context, and the charge for its text if it is long. Raises MemoryBusyError."""
        row, charge = await self._reads.submit(context_id), 0
        if row is not None and row["team_id"] != team_id:
            row = None
        elif row is not None and row["size"] <= LONG_BYTES:
            self._remember(team_id, row)
        elif row is not None:
            row, charge = await read_within(
                row["size"], partial(self._database.fetchrow, _BY_ID, context_id), loaded_bytes
            )
        if row is None:
            raise context_not_found(context_id)
        return _to_context(row), charge

    def _remember(self, team_id: str, row: Mapping[str, Any] | asyncpg.Record) -> None:
        if row["content"] is not None and row["erased_at"] is None:
            size = TextSize(characters=len(row["content"]), bytes=row["size"])
            self.plain.remember(team_id, row["id"], size)

    async def list(self, team_id: str, after: UUID | None, limit: int) -> SizedPage[Context]:
        sizes = PageSizes.of(await self._database.fetch(_SIZES, team_id, after, limit), limit)
        page = await read_page(sizes, lambda ids: self._database.fetch(_LISTED, ids, team_id))
        listed = [_to_context(row) async for row in in_turns(page.rows)]
        return SizedPage(listed, page.following)

    async def delete(self, team_id: str, context_id: UUID, *, force: bool) -> None:
        """Delete a context with its results. Raises ConflictError if one is pending."""

        async def work(connection: Connection) -> list[UUID]:
            async with connection.transaction():
                # The lock keeps new results of this context out until the transaction ends.
                if not await connection.fetchval(_LOCK, context_id, team_id):
                    raise context_not_found(context_id)
                if not force and (count := await connection.fetchval(_COUNT_PENDING, context_id)):
                    raise ConflictError(
                        f"{count} results of this context are pending. Wait, cancel them, "
                        "or add ?force=true."
                    )
                # These locks keep their workers from storing more text.
                locked = await connection.fetch(_LOCK_RESULTS, context_id)
                ids = [row["id"] for row in locked if row["is_pending"]]
                ended = [row["id"] for row in locked if not row["is_pending"]]
                await ledger.settle(connection, ended)
                await ledger.add_deleted(connection, ids)
                await connection.execute(_DELETE_CHUNKS, ids)
                await connection.execute("DELETE FROM contexts WHERE id = $1", context_id)
            return ids

        await self._queue.notify_stopped(await self._database.run(work))


def to_new_context(
    team_id: str, create: ContextCreate, messages: list[dict[str, Any]] | None
) -> NewContext:
    """A context to store; `messages` have the images of their URLs."""
    metadata = orjson.dumps(create.metadata).decode()
    stored = orjson.dumps(messages).decode() if messages is not None else None
    return NewContext(new_id(), team_id, create.content, stored, metadata)


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    return [
        {"role": message.role, "content": message.content} | to_member(message.images)
        for message in messages
    ]


def erased_context(context: Context) -> ErasedError:
    assert context.erased_at is not None
    return ErasedError(
        f"The text of context {context.id} was erased at {context.erased_at:%Y-%m-%dT%H:%M:%SZ}: it "
        "was sent with `store` false, or prompts are not kept for longer."
    )


def context_not_found(context_id: UUID) -> NotFoundError:
    return NotFoundError(f"There is no context {context_id}.")


async def _insert(
    connection: Connection, contexts: Sequence[NewContext], resent: bool
) -> Sequence[None]:
    await connection.execute(_INSERT, *CONTEXTS.arguments(contexts))
    if resent:
        await await_standby(connection)
    return [None] * len(contexts)


async def _read(
    connection: Connection, ids: Sequence[UUID], _resent: bool
) -> Sequence[asyncpg.Record | None]:
    rows = {row["id"]: row for row in await connection.fetch(_BY_IDS, ids)}
    return [rows.get(identifier) for identifier in ids]


def _to_context(row: Mapping[str, Any] | asyncpg.Record) -> Context:
    messages = None if row["messages"] is None else orjson.loads(row["messages"])
    metadata = orjson.loads(row["metadata"])
    return Context(row["id"], row["content"], messages, metadata, row["erased_at"])
