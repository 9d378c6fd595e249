"""LoRA adapters as models, by every dialect, with the scripted model: its words depend on the adapter."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import asyncpg
import orjson
import pytest

from app.cli.up.triton import EmbeddedTriton
from app.core.settings import Settings
from tests.conftest import Service, make_settings, run_service
from tests.integration.auth.test_auth import bearer, guarded
from tests.integration.support import (
    assert_anthropic_error,
    assert_openai_error,
    assert_problem,
    read,
    until,
    write_model,
)
from tests.postgres import PostgresServer
from tests.unit.auth.test_jwt import sign

__all__ = ["guarded"]

TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"
PROMPT = "baa {{chunks=3}}"
MESSAGES = [{"role": "user", "content": PROMPT}]
SHEEP, RED_ONLY, UNKNOWN = "scripted:sheep", "scripted:secret", "scripted:cat"
RED = bearer(sign({"team_id": "red", "token_id": "r", "scopes": ["use"]}))
BLUE = bearer(sign({"team_id": "blue", "token_id": "b", "scopes": ["use"]}))


def write_adapters(repository: Path) -> Path:
    """The scripted model with an adapter for all teams, and one for the team red."""
    write_model(repository, "scripted", template=TEMPLATE, max_model_len=100_000)
    version = repository / "scripted" / "1"
    engine = orjson.loads((version / "model.json").read_bytes()) | {"enable_lora": True}
    (version / "model.json").write_bytes(orjson.dumps(engine))
    (version / "multi_lora.json").write_text('{"sheep": "/sheep", "secret": "/secret"}')
    (version / "adapter_teams.json").write_text('{"secret": ["red"]}')
    return repository


@pytest.fixture
async def adapted(
    postgres_server: PostgresServer, database_name: str, triton: EmbeddedTriton, tmp_path: Path
) -> AsyncIterator[Service]:
    repository = write_adapters(tmp_path)
    settings = make_settings(postgres_server, database_name, triton, model_repository=repository)
    async with run_service(settings, with_worker=True) as service:
        yield service


async def post(service: Service, path: str, body: Any, **headers: str) -> Any:
    answer = await service.client.post(path, json=body, headers=headers)
    assert answer.status_code in (200, 202), answer.text
    return answer.json()


async def finish(service: Service, model: str) -> dict[str, Any]:
    body = {"model": model, "content": PROMPT}
    result: dict[str, Any] = await post(service, "/results/", body, Prefer="wait=30")
    assert result["state"] == "completed", result
    return result


LAUNCH = """INSERT INTO launches (id, team_id, name, provider, profile, model, state, spec)
VALUES ($1::uuid, 'red', $1::text, 'local', 'here', 'a/b', $2, $3::text::jsonb)"""


@pytest.mark.trial
async def test_adapters_of_launches(adapted: Service) -> None:
    """They are listed while every launched server of the model has them."""

    async def listed() -> list[str]:
        await adapted.services.registry.refresh()
        (model,) = (await adapted.client.get("/models/")).json()
        names = [one["id"] for one in (await adapted.client.get("/v1/models")).json()["data"]]
        assert names == ["scripted", *(f"scripted:{name}" for name in model["adapters"])]
        return [name for name in model["adapters"] if name != "secret"]

    async def launch(state: str, adapters: dict[str, str]) -> str:
        identifier, spec = str(uuid4()), {"served_name": "scripted", "adapters": adapters}
        await fetch(LAUNCH, identifier, state, orjson.dumps(spec).decode())
        return identifier

    fetch = adapted.services.database.fetch
    await launch("healthy", {"lamb": "/lamb", "goat": "a/goat", "secret": "/s"})
    await launch("starting", {"cow": "/cow"})
    assert await listed() == ["goat", "lamb", "sheep"]
    lamb = await finish(adapted, "scripted:lamb")
    assert (lamb["model_name"], lamb["parameters"]["lora_name"]) == ("scripted", "lamb")
    second = await launch("unhealthy", {"goat": "a/goat"})
    assert await listed() == ["goat", "sheep"]
    await fetch("UPDATE launches SET spec = spec - 'adapters' WHERE id = $1::uuid", second)
    assert await listed() == ["sheep"]
    await fetch("UPDATE launches SET state = 'stopping'")
    assert await listed() == ["sheep"]
    body = {"model": "scripted:lamb", "content": PROMPT}
    refused = await adapted.client.post("/results/", json=body)
    assert_problem(refused, 404, "unknown_model")


async def test_native_results_keep_the_adapter(adapted: Service) -> None:
    base, sheep = await finish(adapted, "scripted"), await finish(adapted, SHEEP)
    assert sheep["model_name"] == "scripted"
    assert sheep["parameters"]["lora_name"] == "sheep"
    assert "lora_name" not in base["parameters"]
    assert sheep["result"] != base["result"]

    retried = await adapted.client.post(f"/results/{sheep['id']}/retry")
    again = await read(adapted, retried.json()["id"], wait=30)
    assert (again["result"], again["parameters"]) == (sheep["result"], sheep["parameters"])

    context = (await adapted.client.post("/contexts/", json={"content": PROMPT})).json()
    sent = await adapted.client.post(f"/models/send/{SHEEP}/{context['id']}")
    assert (await read(adapted, sent.json()["id"], wait=30))["result"] == sheep["result"]

    bulk = await adapted.client.post("/results/", json=[{"model": SHEEP, "content": PROMPT}])
    assert (await read(adapted, bulk.json()[0]["id"], wait=30))["result"] == sheep["result"]
    wrong = {"model": "scripted", "content": PROMPT, "parameters": {"lora_name": "sheep"}}
    refused = await adapted.client.post("/results/", json=wrong)
    assert_problem(refused, 422, "invalid_request", "parameters.lora_name")


async def test_each_dialect_takes_and_returns_its_name(adapted: Service) -> None:
    expected = (await finish(adapted, SHEEP))["result"]
    chat = {"model": SHEEP, "messages": MESSAGES, "max_tokens": 3}
    sent = await finish_chat(adapted)

    completion = await post(adapted, "/v1/completions", {"model": SHEEP, "prompt": PROMPT})
    assert (completion["model"], completion["choices"][0]["text"]) == (SHEEP, expected)
    answer = await post(adapted, "/v1/chat/completions", chat)
    assert (answer["model"], answer["choices"][0]["message"]["content"]) == (SHEEP, sent)
    message = await post(adapted, "/v1/messages", chat)
    assert (message["model"], message["content"][0]["text"]) == (SHEEP, sent)
    response = await post(adapted, "/v1/responses", {"model": SHEEP, "input": PROMPT})
    assert (response["model"], response["output"][0]["content"][0]["text"]) == (SHEEP, sent)
    stored = (await adapted.client.get(f"/v1/responses/{response['id']}")).json()
    assert stored["model"] == SHEEP
    count = {"model": SHEEP, "messages": MESSAGES}
    assert (await post(adapted, "/v1/messages/count_tokens", count))["input_tokens"] == 2

    tgi = {"inputs": PROMPT, "parameters": {"adapter_id": "sheep"}}
    assert (await post(adapted, "/generate", tgi))["generated_text"] == expected
    tgi = {"inputs": PROMPT, "parameters": {}, "model": SHEEP}
    assert (await post(adapted, "/generate", tgi))["generated_text"] == expected
    raw = await adapted.client.post(f"/inference/{SHEEP}", json={"text": PROMPT})
    assert raw.text == expected


async def finish_chat(service: Service) -> str:
    body = {"model": SHEEP, "messages": MESSAGES}
    return str((await post(service, "/results/", body, Prefer="wait=30"))["result"])


async def test_a_batch_takes_its_name(adapted: Service) -> None:
    line = {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"model": SHEEP, "prompt": PROMPT},
    }
    upload = await adapted.client.post(
        "/v1/files", data={"purpose": "batch"}, files={"file": ("b.jsonl", orjson.dumps(line))}
    )
    body = {"input_file_id": upload.json()["id"], "endpoint": "/v1/completions"}
    batch = await post(adapted, "/v1/batches", body | {"completion_window": "24h"})

    async def is_done() -> Any:
        found = (await adapted.client.get(f"/v1/batches/{batch['id']}")).json()
        return found if found["status"] == "completed" else None

    done = await until(is_done)
    output = await adapted.client.get(f"/v1/files/{done['output_file_id']}/content")
    assert output.json()["response"]["body"]["model"] == SHEEP
    expected = (await finish(adapted, SHEEP))["result"]
    assert output.json()["response"]["body"]["choices"][0]["text"] == expected


async def test_the_lists_have_them(adapted: Service) -> None:
    (listed,) = (await adapted.client.get("/models/")).json()
    assert (listed["name"], listed["adapters"]) == ("scripted", ["sheep"])
    models = (await adapted.client.get("/v1/models")).json()["data"]
    assert [(one["id"], one.get("parent")) for one in models] == [
        ("scripted", None),
        (SHEEP, "scripted"),
    ]
    one = await adapted.client.get(f"/v1/models/{SHEEP}")
    assert one.json() == models[1]


async def test_an_unknown_adapter_is_an_unknown_model(adapted: Service) -> None:
    for name in (UNKNOWN, RED_ONLY, "scripted:", "scripted:sheep:sheep", ":sheep"):
        native = await adapted.client.post("/results/", json={"model": name, "content": PROMPT})
        problem = assert_problem(native, 404, "unknown_model")
        assert problem["known_models"] == ["scripted", SHEEP]
        chat = {"model": name, "messages": MESSAGES, "max_tokens": 3}
        answer = await adapted.client.post("/v1/chat/completions", json=chat)
        assert_openai_error(answer, 404, "model_not_found")
        answer = await adapted.client.post("/v1/messages", json=chat)
        assert_anthropic_error(answer, 404, "unknown_model")
        answer = await adapted.client.get(f"/v1/models/{name}")
        assert answer.status_code == 404
    for parameters in ({"adapter_id": "cat"}, {"adapter_id": "secret"}):
        answer = await adapted.client.post(
            "/generate", json={"inputs": PROMPT, "parameters": parameters}
        )
        assert answer.status_code == 404, answer.text
    twice = {"inputs": PROMPT, "model": SHEEP, "parameters": {"adapter_id": "cat"}}
    assert (await adapted.client.post("/generate", json=twice)).status_code == 404
    for action in ("load", "unload"):
        answer = await adapted.client.post(f"/models/{SHEEP}/{action}")
        assert_problem(answer, 404, "unknown_model")


async def test_usage_is_by_adapter(adapted: Service, connection: asyncpg.Connection) -> None:
    await finish(adapted, "scripted")
    for _ in range(2):
        await finish(adapted, SHEEP)

    async def is_counted() -> Any:
        report = (await adapted.client.get("/usage", params={"group_by": "adapter"})).json()
        found = {row["adapter"]: row["results"] for row in report["rows"]}
        return found if sum(found.values()) == 3 else None

    assert await until(is_counted) == {"": 1, "sheep": 2}


async def test_a_teams_adapter_is_not_seen_by_others(guarded: Settings, tmp_path: Path) -> None:
    changed = guarded.model_copy(update={"model_repository": write_adapters(tmp_path)})
    async with run_service(changed, with_worker=True) as service:
        get, send = service.client.get, service.client.post
        red = (await get("/models/", headers=RED)).json()[0]["adapters"]
        blue = (await get("/models/", headers=BLUE)).json()[0]["adapters"]
        assert (red, blue) == (["secret", "sheep"], ["sheep"])
        ids = [one["id"] for one in (await get("/v1/models", headers=BLUE)).json()["data"]]
        assert ids == ["scripted", SHEEP]

        body = {"model": RED_ONLY, "content": PROMPT}
        own = await send("/results/", json=body, headers=RED | {"Prefer": "wait=30"})
        assert own.json()["state"] == "completed", own.text
        assert (await get(f"/v1/models/{RED_ONLY}", headers=RED)).status_code == 200
        secret, unknown = [
            await send("/results/", json=body | {"model": name}, headers=BLUE)
            for name in (RED_ONLY, UNKNOWN)
        ]
        assert_problem(secret, 404, "unknown_model")
        assert secret.text.replace("secret", "cat") == unknown.text
        # A request that is wrong in other ways, too, is refused for its model.
        chat = {"model": RED_ONLY, "messages": MESSAGES, "tools": [{"type": "function"}]}
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"):
            answer = await send(path, json=chat | PATHS[path], headers=BLUE)
            assert answer.status_code == 404, (path, answer.text)
        # A team that has lost an adapter cannot retry with it.
        (tmp_path / "scripted" / "1" / "adapter_teams.json").write_text('{"secret": ["green"]}')
        await service.services.registry.refresh()
        retried = await send(f"/results/{own.json()['id']}/retry", headers=RED)
        assert_problem(retried, 404, "unknown_model")


TOOL = {"name": "t", "parameters": {"type": "object"}}
# Members that are right by the path's schema; the model's template takes no tools.
PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"tools": [{"type": "function", "function": TOOL}]},
    "/v1/completions": {"prompt": [999_999_999], "messages": None, "tools": None},
    "/v1/messages": {"max_tokens": 1, "tools": [{"name": "t", "input_schema": {"type": "object"}}]},
    "/v1/responses": {"input": "x", "messages": None, "tools": [TOOL | {"type": "function"}]},
}
