"""Models over HTTP: what Triton serves, loading and unloading, and results that wait for a model."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from tritonclient.grpc import service_pb2 as pb

from app.cli.up.triton import EmbeddedTriton
from app.core.settings import Settings
from tests.conftest import Service, make_settings, run_service
from tests.integration.support import (
    CHAT_TEMPLATE,
    assert_problem,
    finish,
    read,
    send,
    until,
    until_running,
    write_model,
)
from tests.postgres import PostgresServer
from tests.triton_streams import call

MESSAGES = [{"role": "user", "content": "hi {{chunks=2}}"}]


@pytest.fixture
async def loaded(service: Service) -> AsyncIterator[Service]:
    """A service whose model is loaded again afterwards, for the tests that follow."""
    yield service
    answer = await service.client.post("/models/scripted/load")
    assert answer.status_code == 200, answer.text


async def model(service: Service) -> dict[str, Any]:
    answer = await service.client.get("/models/scripted")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_models_are_listed_with_what_clients_need(service: Service) -> None:
    answer = await service.client.get("/models/")
    assert answer.status_code == 200
    (listed,) = answer.json()
    assert listed == await model(service)
    assert listed | {"running": 0, "queued": 0, "tokens_per_second": 0} == {
        "name": "scripted", "version": 1, "ready": True, "reason": None, "chat": True,
        "adapters": [], "max_model_len": None, "default_parameters": {}, "queued": 0,
        "running": 0, "tokens_per_second": 0,
    }  # fmt: skip


@pytest.mark.trial
async def test_load_is_counted(service: Service) -> None:
    for n in range(3):
        await send(service, f"slow {n} {{{{chunks=500 delay_ms=20}}}}")

    async def is_counted() -> bool:
        found = await model(service)
        return bool(found["running"] == 3 and found["queued"] == 0)

    await until(is_counted)
    await service.client.post("/results/cancel", params={"model_name": "scripted"})

    async def is_idle() -> bool:
        return bool((await model(service))["running"] == 0)

    await until(is_idle)


async def test_the_queue_is_counted(api: Service) -> None:
    await send(api, "x")
    await send(api, "y")

    async def is_counted() -> bool:
        return bool((await model(api))["queued"] == 2)

    await until(is_counted)


@pytest.mark.trial
async def test_a_model_that_is_not_ready_keeps_its_results_waiting(loaded: Service) -> None:
    unloaded = await loaded.client.post("/models/scripted/unload")
    assert unloaded.status_code == 200
    assert unloaded.json()["ready"] is False
    assert (await model(loaded))["ready"] is False

    accepted = await send(loaded, "patience {{chunks=2}}")
    assert accepted["model_ready"] is False
    assert accepted["model_version"] == 1
    waited = await read(loaded, accepted["id"], wait=1.5)
    assert (waited["state"], waited["model_ready"]) == ("pending", False)

    again = await loaded.client.post("/models/scripted/load")
    assert again.json()["ready"] is True
    result = await read(loaded, accepted["id"], wait=20)
    assert (result["state"], result["model_ready"]) == ("completed", True)
    assert (await attempts(loaded, accepted["id"]))[-1]["counted"]
    lost = [item for item in await attempts(loaded, accepted["id"]) if item["error"]]
    assert not [item for item in lost if item["counted"]]  # the wait cost no attempt


async def attempts(service: Service, result_id: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (
        await service.client.get(f"/results/{result_id}/attempts")
    ).json()
    return found


async def test_a_restarted_service_still_knows_a_model_that_is_not_loaded(
    loaded: Service, settings: Settings
) -> None:
    await loaded.client.post("/models/scripted/unload")
    async with run_service(settings, with_worker=False) as restarted:
        found = await model(restarted)
        assert (found["ready"], found["version"]) == (False, 1)
        assert found["reason"]
        assert (await send(restarted, "x"))["model_ready"] is False


@pytest.mark.trial
async def test_cancelling_reaches_the_engine(loaded: Service, triton: EmbeddedTriton) -> None:
    """An unloading model ends when its last request has: cancelling that one must end it."""
    accepted = await send(loaded, "slow {{chunks=3000 delay_ms=20}}")
    await until_running(loaded, accepted["id"])

    async def state() -> str:
        index = await call(triton, "RepositoryIndex", pb.RepositoryIndexRequest())
        return str(index.models[0].state)

    await loaded.client.post("/models/scripted/unload")
    assert await state() == "UNLOADING"
    answer = await loaded.client.post(f"/results/{accepted['id']}/cancel")
    assert answer.json()["error"]["code"] == "cancelled"

    async def is_unloaded() -> bool:
        return await state() == "UNAVAILABLE"

    await until(is_unloaded)


async def test_triton_away_leaves_its_models_known(
    postgres_server: PostgresServer,
    database_name: str,
    connection: asyncpg.Connection,
) -> None:
    await connection.execute("INSERT INTO models (name, version) VALUES ('gone', 3)")
    nowhere = make_settings(postgres_server, database_name, triton_grpc="127.0.0.1:1")
    async with run_service(nowhere, with_worker=True) as service:
        answer = await service.client.get("/models/gone")
        assert (answer.json()["ready"], answer.json()["version"]) == (False, 3)
        assert "127.0.0.1:1" in answer.json()["reason"]
        ready = await service.client.get("/health/ready")
        assert ready.status_code == 200
        assert "127.0.0.1:1" in ready.json()["triton"]
        accepted = await service.client.post("/results/", json={"model": "gone", "content": "x"})
        assert (accepted.status_code, accepted.json()["model_ready"]) == (202, False)
        for path in ("/models/gone/load", "/models/gone/unload"):
            problem = await service.client.post(path)
            assert_problem(problem, 503, "triton_unavailable")
            assert problem.headers["retry-after"]
        result = await read(service, accepted.json()["id"], wait=1)
        assert (result["state"], result["attempt"]) == ("pending", 0)


# --- chat -------------------------------------------------------------------------------------------


@pytest.fixture
async def chat(
    postgres_server: PostgresServer, database_name: str, triton: EmbeddedTriton, tmp_path: Path
) -> AsyncIterator[Service]:
    """A service whose model has a tokenizer, a length and a chat template."""
    write_model(tmp_path, "scripted", max_model_len=64, template=CHAT_TEMPLATE)
    settings = make_settings(postgres_server, database_name, triton, model_repository=tmp_path)
    async with run_service(settings, with_worker=True) as running:
        yield running


async def test_messages_are_rendered_by_the_models_template(
    chat: Service, connection: asyncpg.Connection
) -> None:
    found = await model(chat)
    assert (found["chat"], found["max_model_len"]) == (True, 64)
    answer = await chat.client.post(
        "/results/", json={"model": "scripted", "messages": MESSAGES}, headers={"prefer": "wait=20"}
    )
    result = answer.json()
    assert result["state"] == "completed"
    prompt = await connection.fetchval("SELECT prompt FROM results")
    assert prompt == "<user> hi {{chunks=2}} <assistant>"
    pieces = [
        d.text
        async for d in chat.services.server_pool.get("default").client.generate(
            "scripted", prompt, {}
        )
    ]
    assert result["result"] == "".join(pieces)
    context = await chat.client.get(f"/contexts/{result['context_id']}")
    assert (context.json()["messages"], context.json()["content"]) == (MESSAGES, None)
    saved = await chat.client.post(f"/models/send/scripted/{result['context_id']}")
    assert (await read(chat, saved.json()["id"], wait=20))["result"] == result["result"]


async def test_max_tokens_default_to_what_the_length_leaves(chat: Service) -> None:
    result = await finish(chat, "one two three four")
    assert result["parameters"]["max_tokens"] == 60
    assert (result["finish_reason"], result["usage"]["completion_tokens"]) == ("length", 60)
    exact = await finish(chat, "one two three four", parameters={"max_tokens": 60})
    assert exact["state"] == "completed"


@pytest.fixture
async def text_only(settings: Settings, tmp_path: Path) -> AsyncIterator[Service]:
    """A service that finds no files of its model."""
    bare = settings.model_copy(update={"model_repository": tmp_path})
    async with run_service(bare, with_worker=True) as running:
        yield running


async def test_messages_without_a_template_are_refused(
    text_only: Service, connection: asyncpg.Connection
) -> None:
    service = text_only
    answer = await service.client.post(
        "/results/", json={"model": "scripted", "messages": MESSAGES}
    )
    problem = assert_problem(answer, 422, "invalid_request", "messages")
    assert "chat template" in problem["detail"]
    saved = await service.client.post("/contexts/", json={"messages": MESSAGES})
    assert saved.status_code == 201
    for request in (
        service.client.post(f"/models/send/scripted/{saved.json()['id']}"),
        service.client.post(
            "/results/", json={"model": "scripted", "context_id": saved.json()["id"]}
        ),
    ):
        assert_problem(await request, 422, "invalid_request", "messages")
    assert await connection.fetchval("SELECT count(*) FROM results") == 0


async def test_a_broken_template_makes_the_model_text_only(
    postgres_server: PostgresServer, database_name: str, triton: EmbeddedTriton, tmp_path: Path
) -> None:
    write_model(tmp_path, "scripted", template="{% for %}")
    settings = make_settings(postgres_server, database_name, triton, model_repository=tmp_path)
    async with run_service(settings, with_worker=True) as running:
        assert (await model(running))["chat"] is False
        assert (await finish(running, "x {{chunks=1}}"))["state"] == "completed"
