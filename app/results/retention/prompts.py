"""Erasing prompts whose retention is over, and contexts without results."""

import itertools
from collections.abc import Collection, Sequence
from datetime import datetime
from uuid import UUID

import asyncpg

from app.core.database import Connection
from app.results.retention import sql as sql

MAX_ROWS = 200  # of a transaction


def is_due(row: asyncpg.Record, cutoff: datetime) -> bool:
    return row["finished_at"] is not None and row["finished_at"] <= cutoff


async def ids_of(
    connection: Connection, statement: str, ids: Collection[UUID], *arguments: object
) -> set[UUID]:
    if not ids:
        return set()
    return {row["id"] for row in await connection.fetch(statement, list(ids), *arguments)}


async def erase_page(
    connection: Connection,
    *,
    team_id: str,
    page: Sequence[asyncpg.Record],
    now: datetime,
    prompts: datetime,
    may_mark: bool,
) -> bool:
    """Erase the due prompts of a page; True if the whole page is settled."""
    contexts = {row["context_id"] for row in page if is_due(row, prompts)}
    due = await ids_of(connection, sql.DUE_PROMPTS, contexts, prompts)
    locked = await ids_of(connection, sql.LOCK, due)
    await _erase(connection, locked, now, prompts)
    done = list(
        itertools.takewhile(
            lambda row: is_due(row, prompts) and row["context_id"] not in due - locked, page
        )
    )
    if may_mark and done:
        await connection.execute(sql.SET_MARK, team_id, done[-1]["id"])
    return len(done) == len(page)


async def _erase(
    connection: Connection, locked: Collection[UUID], now: datetime, prompts: datetime
) -> None:
    erased = await ids_of(connection, sql.ERASE_CONTEXTS, locked, prompts, now)
    results = await ids_of(connection, sql.ERASE_PROMPTS, erased)
    await ids_of(connection, sql.LOCK_WORDS, results)
    await ids_of(connection, sql.ERASE_WORDS, results)


async def judge_unused(
    connection: Connection, team_id: str, now: datetime, prompts: datetime
) -> bool:
    """Delete contexts without results, erase others' due prompts; True if more may be left."""
    rows = await connection.fetch(sql.UNUSED, team_id, prompts, MAX_ROWS)
    ids = {row["id"] for row in rows}
    left = ids - await ids_of(connection, sql.DELETE_CONTEXTS, ids)
    await _erase(connection, left, now, prompts)
    if left:
        await connection.execute(sql.FORGET_UNUSED, list(left))
    return len(rows) == MAX_ROWS
