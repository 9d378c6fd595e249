"""GET /results/export: whole, in order, by filters, in pieces, and visibly broken where it breaks."""

import asyncpg
import httpx
import orjson
import pytest

from app.core.database import Database
from app.core.errors import DatabaseUnavailableError
from app.core.ids import new_id
from app.core.settings import Settings
from app.results import export
from app.results.pages import ResultFilter
from tests.conftest import Service
from tests.integration.auth.test_auth import guarded
from tests.integration.queue.test_teams import BLUE, MARK, RED, Rows, both, red
from tests.integration.support import assert_problem, finish, serve

__all__ = ["both", "guarded", "red"]

FILL = """
INSERT INTO results (id, context_id, model_name, parameters, deadline_at, state, finished_at, output)
SELECT id, $2, 'm', '{}', now(), 'completed', now(), repeat('x', $3) FROM unnest($1::uuid[]) AS i(id)
"""


async def fill(connection: asyncpg.Connection, count: int, characters: int = 10) -> list[str]:
    """Completed results of one context; their ids, the newest first."""
    context_id, ids = new_id(), [new_id() for _ in range(count)]
    await connection.execute("INSERT INTO contexts (id, content) VALUES ($1, 'p')", context_id)
    await connection.execute(FILL, ids, context_id, characters)
    return [str(identifier) for identifier in reversed(ids)]


def lines(answer: httpx.Response) -> list[dict[str, object]]:
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [orjson.loads(line) for line in answer.content.splitlines()]


async def test_results_are_exported_with_their_prompts(
    service: Service, connection: asyncpg.Connection
) -> None:
    plain = await finish(service, "one\ntwo {{chunks=3}}")
    failed = await finish(service, "x", deadline_seconds=0.001, metadata={"a": [1]})
    messages = [{"role": "user", "content": "hello"}]
    await connection.execute(
        "UPDATE contexts SET content = NULL, messages = $1 WHERE id = $2",
        orjson.dumps(messages).decode(),
        failed["context_id"],
    )
    answer = await service.client.get("/results/export")
    assert answer.headers["content-disposition"].startswith('attachment; filename="results-')
    assert answer.content.endswith(b"}\n")
    newest, oldest = lines(answer)
    assert newest == failed | {"content": None, "messages": messages}
    assert oldest == plain | {"content": "one\ntwo {{chunks=3}}", "messages": None}


async def test_filters_and_limits_are_the_lists(
    api: Service, connection: asyncpg.Connection
) -> None:
    ids = await fill(connection, 1203)
    client = api.client
    assert [line["id"] for line in lines(await client.get("/results/export"))] == ids
    for query in (
        "limit=1",
        "limit=500",
        "limit=501",
        "limit=1200&model_name=m",
        f"after={ids[700]}",
    ):
        listed = lines(await client.get(f"/results/export?{query}"))
        begin = 701 if "after" in query else 0
        end = int(query.split("&")[0].removeprefix("limit=")) if "limit" in query else None
        assert [line["id"] for line in listed] == ids[begin:end], query
    for query in ("state=failed", "model_name=other", f"context_id={new_id()}", "error_code=x",
                  "state=completed&retryable=true", "created_before=2001-01-01T00:00:00Z"):  # fmt: skip
        assert lines(await client.get(f"/results/export?{query}")) == []
    for query, field in (("limit=0", "limit"), ("after=x", "after"), ("state=x", "state")):
        assert_problem(
            await client.get(f"/results/export?{query}"), 422, "invalid_request", f"query.{field}"
        )


async def test_long_texts_come_a_few_at_a_time(
    api: Service, connection: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = await fill(connection, 30, 100_000)
    monkeypatch.setattr(export, "_PIECE_BYTES", 250_000)
    read = api.services.export.read("default", ResultFilter(), after=None, limit=None)
    pieces = [[str(one.row.id) for one in rows] async for rows in read]
    assert [len(piece) for piece in pieces] == [2] * 15
    assert [identifier for piece in pieces for identifier in piece] == ids


async def test_what_is_gone_meanwhile_is_left_out(
    api: Service, connection: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = await fill(connection, 5)
    monkeypatch.setattr(export, "_PAGE", 2)
    read = api.services.export.read("default", ResultFilter(), after=None, limit=None)
    seen = []
    async for rows in read:
        seen += [str(one.row.id) for one in rows]
        await connection.execute("DELETE FROM results WHERE id = $1", ids[3])
    assert seen == [*ids[:3], ids[4]]


async def test_an_export_that_breaks_has_no_end(
    settings: Settings, connection: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client sees that the body is not whole; before the first line it receives a problem."""
    await fill(connection, 10)
    monkeypatch.setattr(export, "_PAGE", 4)
    fetch, calls = Database.fetch, 0

    async def break_off(self: Database, query: str, *arguments: object) -> list[asyncpg.Record]:
        nonlocal calls
        if "octet_length" in query:
            calls += 1
            if calls > whole:
                raise DatabaseUnavailableError("Unreachable.")
        return await fetch(self, query, *arguments)

    monkeypatch.setattr(Database, "fetch", break_off)
    async with serve(settings) as service:
        whole = 2
        async with service.client.stream("GET", "/results/export") as answer:
            pieces = answer.aiter_lines()
            received = [await anext(pieces) for _ in range(8)]
            with pytest.raises(httpx.RemoteProtocolError, match="incomplete"):
                await anext(pieces)
        assert len(received) == 8
        whole, calls = 0, 0
        assert_problem(await service.client.get("/results/export"), 503, "database_unavailable")


async def test_texts_that_are_erased_are_not_exported(
    api: Service, connection: asyncpg.Connection
) -> None:
    await fill(connection, 1)
    await connection.execute("UPDATE results SET erased_at = now(), output = NULL")
    await connection.execute("UPDATE contexts SET erased_at = now(), content = ''")
    (line,) = lines(await api.client.get("/results/export"))
    assert (line["content"], line["messages"], line["result"]) == (None, None, None)


async def test_a_team_exports_its_own(both: Service, red: Rows) -> None:
    assert (await both.client.get("/results/export", headers=BLUE)).content == b""
    assert MARK in (await both.client.get("/results/export", headers=RED)).text
