"""Pages of several filters: the same results as by a search row by row, for each combination."""

import itertools
import random
from datetime import datetime
from typing import Any
from uuid import UUID

import asyncpg
import orjson
import pytest

from app.core.database import Database
from app.core.ids import created_at, new_id
from app.core.settings import Settings
from app.queue.job_queue import JobQueue
from app.results import intersection
from app.results.export import ResultExport
from app.results.pages import ResultFilter
from app.results.store import ResultStore
from tests.conftest import connect

ROWS, LIMIT = 600, 7
COLUMNS = ["id", "team_id", "context_id", "model_name", "parameters", "deadline_at", "state", "finished_at",
           "output", "error_code", "error_message", "error_retryable", "metadata"]  # fmt: skip
CHOICES: dict[str, list[Any]] = {
    "state": [None, "pending", "completed", "failed"],
    "model_name": [None, "busy", "rare", "absent"],
    "error_code": [None, "model_error", "cancelled"],
    "retryable": [None, True, False],
    "metadata": [None, {"run": "busy"}, {"run": "rare", "n": "3"}],
}
# One of each pair that could be taken for another.
METADATA = [
    '{"run": "busy", "n": 3}', '{"run": "busy", "n": "3"}', '{"run": "rare", "n": 3}', "{}",
    '{"run": ["rare"], "n": 3}', '{"run": null, "n": 3}', '{"n": "rare", "run": "3"}',
]  # fmt: skip


async def fill(connection: asyncpg.Connection, contexts: list[UUID]) -> list[dict[str, Any]]:
    """Rows of two teams, newest first, with every value rare or frequent beside every other."""
    chance = random.Random(7)  # noqa: S311 - the same rows each time
    for team, context in zip(("default", "default", "blue"), contexts, strict=True):
        await connection.execute(
            "INSERT INTO contexts (id, team_id, content) VALUES ($1, $2, 'a prompt')", context, team
        )
    now: datetime = await connection.fetchval("SELECT now()")
    rows = []
    for _ in range(ROWS):
        team = chance.choices(["default", "blue"], [5, 1])[0]
        context = contexts[2] if team == "blue" else chance.choices(contexts[:2], [9, 1])[0]
        state = chance.choices(["completed", "failed", "pending"], [4, 3, 1])[0]
        code = (
            chance.choices(["model_error", "cancelled"], [8, 1])[0] if state == "failed" else None
        )
        rows.append(dict(zip(COLUMNS, (
            new_id(), team, context, chance.choices(["busy", "rare"], [12, 1])[0], "{}", now, state,
            None if state == "pending" else now, "text" if state == "completed" else None, code,
            "why" if code else None, chance.random() < 0.8 if code else None,
            chance.choices(METADATA, [8, 1, 2, 3, 1, 1, 1])[0],
        ), strict=True)))  # fmt: skip
    await connection.copy_records_to_table(
        "results", columns=COLUMNS, records=[tuple(row.values()) for row in rows]
    )
    return sorted(rows, key=lambda row: row["id"], reverse=True)


def has_pairs(row: dict[str, Any], pairs: dict[str, str]) -> bool:
    found = orjson.loads(row["metadata"])
    return all(str(found[key]) == value for key, value in pairs.items() if key in found) and (
        pairs.keys() <= found.keys()
    )


def expected(rows: list[dict[str, Any]], narrowed: ResultFilter) -> list[UUID]:
    wanted = {
        "team_id": "default", "state": narrowed.state, "model_name": narrowed.model_name,
        "context_id": narrowed.context_id, "error_code": narrowed.error_code,
        "error_retryable": narrowed.retryable,
    }  # fmt: skip
    return [
        row["id"]
        for row in rows
        if all(value is None or row[name] == value for name, value in wanted.items())
        and has_pairs(row, dict(narrowed.metadata or {}))
        and (not narrowed.created_after or created_at(row["id"]) >= narrowed.created_after)
        and (not narrowed.created_before or created_at(row["id"]) < narrowed.created_before)
    ]


@pytest.mark.trial
async def test_pages_and_exports_of_any_filters_are_the_rows_that_match_all(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intersection, "_FIRST_ROWS", 3)  # many pieces, of both walks
    monkeypatch.setattr(intersection, "_MOST_ROWS", 40)
    connection, contexts = await connect(settings), [new_id() for _ in range(3)]
    rows = await fill(connection, contexts)
    await connection.close()
    windows = [(None, None), (created_at(rows[400]["id"]), created_at(rows[100]["id"]))]
    found = 0
    async with Database(settings, "test") as database:
        store = ResultStore(database, JobQueue(database, settings), settings)
        export = ResultExport(database, settings)
        for *chosen, context, (early, late) in itertools.product(
            *CHOICES.values(), [None, *contexts], windows
        ):
            members = dict(zip(CHOICES, chosen, strict=True)) | {"context_id": context}
            narrowed = ResultFilter(**members, created_after=early, created_before=late)
            wanted, after = expected(rows, narrowed), None
            ids: list[UUID] = []
            while True:
                page = await store.list("default", narrowed, after=after, limit=LIMIT, full=True)
                ids += [one.row.id for one in page.rows]
                if (after := page.following) is None or len(ids) > len(wanted):
                    break
            assert ids == wanted, narrowed
            pieces = export.read("default", narrowed, after=None, limit=None)
            assert [one.row.id async for piece in pieces for one in piece] == wanted, narrowed
            found += bool(wanted)
    assert found > 100, "most filters find something"
