"""A process sends a plain context that it has seen without reading its text again."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import httpx
import pytest

from app.cli.up.triton import EmbeddedTriton
from app.queue.team_limits import ANY_MODEL
from app.results.plain_contexts import PlainContexts, TextSize
from tests.conftest import Service, make_settings, run_service
from tests.integration.support import assert_problem, write_model
from tests.postgres import PostgresServer

TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"
LENGTH = 64
pytestmark = pytest.mark.usefixtures("reads")


@pytest.fixture
async def api(
    postgres_server: PostgresServer, database_name: str, triton: EmbeddedTriton, tmp_path: Path
) -> AsyncIterator[Service]:
    """A service whose model has a template and a length: sends depend on the context's text."""
    write_model(tmp_path, "scripted", max_model_len=LENGTH, template=TEMPLATE)
    settings = make_settings(postgres_server, database_name, triton, model_repository=tmp_path)
    async with run_service(settings, with_worker=False) as running:
        yield running


@pytest.fixture
def reads(api: Service, monkeypatch: pytest.MonkeyPatch) -> list[UUID]:
    """The contexts that the process reads."""
    contexts = api.services.contexts
    found: list[UUID] = []
    read = contexts.get_charged

    async def get_charged(team_id: str, context_id: UUID) -> Any:
        found.append(context_id)
        return await read(team_id, context_id)

    monkeypatch.setattr(contexts, "get_charged", get_charged)
    return found


async def save(api: Service, **members: object) -> str:
    saved = await api.client.post("/contexts/", json=members)
    return str(saved.json()["id"])


async def send(api: Service, context_id: str, max_tokens: int | None = None) -> httpx.Response:
    return await api.client.post(
        f"/models/send/scripted/{context_id}", json={"parameters": {"max_tokens": max_tokens}}
    )


async def test_a_saved_text_is_not_read_again(
    api: Service, reads: list[UUID], connection: asyncpg.Connection
) -> None:
    context_id = await save(api, content="grüße")
    assert [(await send(api, context_id, 8)).status_code for _ in range(2)] == [202, 202]
    assert not reads
    rows = await connection.fetch("SELECT context_id, parameters FROM results")
    assert [str(row["context_id"]) for row in rows] == [context_id] * 2


async def test_a_text_of_another_process_is_read_once(api: Service, reads: list[UUID]) -> None:
    context_id = await save(api, content="a text")
    api.services.contexts.plain = PlainContexts()
    for _ in range(2):
        assert (await send(api, context_id, 8)).status_code == 202
    assert reads == [UUID(context_id)]


async def test_messages_are_rendered_each_time(
    api: Service, reads: list[UUID], connection: asyncpg.Connection
) -> None:
    context_id = await save(api, messages=[{"role": "user", "content": "hello"}])
    for _ in range(2):
        assert (await send(api, context_id, 8)).status_code == 202
    assert len(reads) == 2
    prompts = await connection.fetch("SELECT prompt FROM results")
    assert [row["prompt"] for row in prompts] == ["hello "] * 2


async def test_a_text_that_may_not_fit_is_counted(api: Service, reads: list[UUID]) -> None:
    """Its tokens decide, whether the process has seen it or not."""
    context_id = await save(api, content=f"one two three {'x' * LENGTH}")
    assert (await send(api, context_id, LENGTH - 4)).status_code == 202
    refused = await send(api, context_id, LENGTH - 3)
    assert_problem(refused, 422, "invalid_request")
    assert "at most 60 are left" in refused.text
    assert len(reads) == 2


async def test_a_token_rate_counts_the_text(api: Service, reads: list[UUID]) -> None:
    await api.services.limits.set("default", ANY_MODEL, {"tokens_per_minute": 10})
    await api.services.limits.refresh()
    context_id = await save(api, content="one two three four five")
    assert (await send(api, context_id, 2)).status_code == 202
    assert_problem(await send(api, context_id, 2), 429, "limit_reached")
    assert len(reads) == 2


@pytest.mark.parametrize(
    ("change", "status", "code"),
    [
        ("DELETE FROM contexts", 404, "not_found"),
        ("UPDATE contexts SET content = '', erased_at = now()", 410, "erased"),
        ("UPDATE contexts SET team_id = 'other'", 404, "not_found"),
    ],
)
async def test_a_text_that_is_gone_is_not_sent(
    api: Service, connection: asyncpg.Connection, change: str, status: int, code: str
) -> None:
    """Even though the process has seen it: the statement that stores the result decides."""
    context_id = await save(api, content="a text")
    await connection.execute(change)
    assert_problem(await send(api, context_id), status, code)
    assert await connection.fetchval("SELECT count(*) FROM results") == 0


def test_each_team_has_contexts_of_its_own() -> None:
    contexts, identifier = PlainContexts(), uuid4()
    contexts.remember("a", identifier, TextSize(1, 2))
    assert contexts.size("a", identifier) == TextSize(1, 2)
    assert contexts.size("b", identifier) is None


def test_the_one_used_last_stays() -> None:
    contexts, first, second, third = PlainContexts(2), uuid4(), uuid4(), uuid4()
    for identifier in (first, second):
        contexts.remember("a", identifier, TextSize(1, 1))
    contexts.size("a", first)
    contexts.remember("a", third, TextSize(1, 1))
    assert [contexts.size("a", one) is not None for one in (first, second, third)] == [
        *(True, False, True),
    ]
