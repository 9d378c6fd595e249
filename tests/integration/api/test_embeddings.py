"""Embeddings by OpenAI's dialect and the native API, with a scripted pooling model."""

import array
import asyncio
import base64
import json
import math
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from openai.types import Batch
from tritonclient.grpc import service_pb2 as pb

from app.cli.up.triton import EmbeddedTriton
from app.core.settings import Settings
from llm_api_client import AsyncClient, Result
from tests.conftest import SCRIPTED, Service, make_settings, run_service, run_triton
from tests.integration.auth.test_auth import bearer, guarded
from tests.integration.support import (
    assert_openai_error,
    assert_problem,
    openai_client,
    read,
    serve,
    until,
)
from tests.pooling_models import pooling_entries
from tests.postgres import PostgresServer
from tests.triton_streams import ask, check_cancellations
from tests.unit.auth.test_jwt import sign

__all__ = ["guarded"]

PATH = "/v1/embeddings"
TEXT = "one two three"
EMBED: dict[str, Any] = {"embedding": {}}


@pytest.fixture(scope="module")
def pooling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedTriton]:
    """Triton with an embeddings model, a cross encoder and a model that generates."""
    entries = pooling_entries(tmp_path_factory.mktemp("models")) | SCRIPTED
    with run_triton(EmbeddedTriton, tmp_path_factory.mktemp("triton"), entries) as server:
        yield server


@pytest.fixture
def settings(
    postgres_server: PostgresServer, database_name: str, pooling: EmbeddedTriton
) -> Settings:
    repository = pooling.environment["LLM_MODEL_REPOSITORY"]
    return make_settings(postgres_server, database_name, pooling, model_repository=repository)


@pytest.fixture
async def service(settings: Settings) -> AsyncIterator[Service]:
    async with run_service(settings, with_worker=True) as running:
        yield running


async def embed(service: Service, text: Any = TEXT, **members: Any) -> dict[str, Any]:
    answer = await service.client.post(PATH, json={"model": "pooling", "input": text} | members)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


async def send(service: Service, **members: Any) -> dict[str, Any]:
    """Send natively; the result once it is terminal."""
    body = {"model": "pooling", "content": TEXT} | EMBED | members
    sent = await service.client.post("/results/", json=body)
    assert sent.status_code == 202, sent.text
    return await read(service, sent.json()["id"], wait=30)


async def test_a_text_has_its_vector(service: Service) -> None:
    answer = await embed(service)
    (item,) = answer["data"]
    assert (item["object"], item["index"], len(item["embedding"])) == ("embedding", 0, 8)
    assert math.isclose(math.hypot(*item["embedding"]), 1, rel_tol=1e-6)
    assert answer["usage"] == {"prompt_tokens": 3, "total_tokens": 3}
    assert (answer["object"], answer["model"]) == ("list", "pooling")
    short = (await embed(service, dimensions=4, normalize=False))["data"][0]["embedding"]
    assert len(short) == 4
    assert not math.isclose(math.hypot(*short), 1, rel_tol=1e-3)


async def test_base64_is_float32_little_endian(settings: Settings) -> None:
    async with serve(settings, with_worker=True) as service:
        await _check_base64(service)


async def _check_base64(service: Service) -> None:
    numbers = (await embed(service))["data"][0]["embedding"]
    encoded = (await embed(service, encoding_format="base64"))["data"][0]["embedding"]
    assert array.array("f", base64.b64decode(encoded)).tolist() == numbers
    # The official client asks for base64 by itself, and decodes it.
    async with openai_client(service) as client:
        answer = await client.embeddings.create(model="pooling", input=[TEXT, "x"])
    assert answer.data[0].embedding == pytest.approx(numbers, abs=0)
    assert [one.index for one in answer.data] == [0, 1]


async def test_many_texts_keep_their_order(service: Service) -> None:
    texts = [f"text {number}" for number in range(200)]
    answer = await embed(service, texts)
    again = {one: (await embed(service, one))["data"][0]["embedding"] for one in texts[::50]}
    for place, text in enumerate(texts):
        assert answer["data"][place]["index"] == place
        if text in again:
            assert answer["data"][place]["embedding"] == again[text]
    assert len({tuple(one["embedding"]) for one in answer["data"]}) == 200
    assert answer["usage"]["prompt_tokens"] == 400


async def test_each_text_is_a_result(service: Service, connection: asyncpg.Connection) -> None:
    answer = await service.client.post(PATH, json={"model": "pooling", "input": [TEXT, "x"]})
    first, second = answer.headers["X-Result-Id"].split(", ")
    result = await read(service, first)
    assert (result["kind"], result["state"]) == ("embedding", "completed")
    assert result["result"] == {"embedding": answer.json()["data"][0]["embedding"]}
    assert result["usage"] == {"prompt_tokens": 3, "completion_tokens": 0}
    assert result["finish_reason"] == "stop"
    assert result["parameters"] == {"task": "embed"}
    assert (await read(service, second))["result"] == {
        "embedding": answer.json()["data"][1]["embedding"]
    }
    context = (await service.client.get(f"/contexts/{result['context_id']}")).json()
    assert context["content"] == TEXT
    stored = await connection.fetchval("SELECT vector FROM results ORDER BY id LIMIT 1")
    assert array.array("f", stored).tolist() == result["result"]["embedding"]


async def test_natively_sent_listed_exported_and_retried(service: Service) -> None:
    result = await send(service, embedding={"dimensions": 3}, metadata={"row": 1})
    vector = result["result"]["embedding"]
    assert len(vector) == 3
    (short,) = (await service.client.get("/results/")).json()
    assert short["result"] is None
    (full,) = (await service.client.get("/results/", params={"full": True})).json()
    assert full["result"] == {"embedding": vector}
    (line,) = (await service.client.get("/results/export")).text.splitlines()
    assert json.loads(line)["result"] == {"embedding": vector}
    assert json.loads(line)["content"] == TEXT
    retried = (await service.client.post(f"/results/{result['id']}/retry")).json()
    assert retried["kind"] == "embedding"
    again = await read(service, retried["id"], wait=30)
    assert again["result"] == {"embedding": vector}
    saved = await service.client.post(
        f"/models/send/pooling/{result['context_id']}", json={"embedding": {"dimensions": 3}}
    )
    assert (await read(service, saved.json()["id"], wait=30))["result"] == {"embedding": vector}


async def test_a_list_a_job_and_a_key(service: Service) -> None:
    job = (await service.client.post("/jobs", json={"name": "vectors"})).json()
    row = {"model": "pooling", "content": TEXT, "embedding": {}, "job_id": job["id"]}
    sent = await service.client.post(
        "/results/", json=[row | {"job_key": key, "content": key} for key in ("a", "b")]
    )
    ids = [one["id"] for one in sent.json()]
    results = [await read(service, one, wait=30) for one in ids]

    async def ended() -> list[dict[str, Any]] | None:
        page = (await service.client.get(f"/jobs/{job['id']}/results")).json()
        return page if len(page) == 2 else None

    rows: list[dict[str, Any]] = await until(ended)
    found = {one["key"]: one["result"]["result"] for one in rows}
    assert found == {"a": results[0]["result"], "b": results[1]["result"]}
    headers = {"Idempotency-Key": "k"}
    body = {"model": "pooling", "input": [TEXT, "x"]}
    first = await service.client.post(PATH, json=body, headers=headers)
    again = await service.client.post(PATH, json=body, headers=headers)
    assert again.headers["Idempotent-Replayed"] == "true"
    assert again.json() == first.json()
    other = await service.client.post(PATH, json=body | {"dimensions": 3}, headers=headers)
    assert other.status_code == 409


async def test_the_python_client_sends_lists_of_texts(settings: Settings) -> None:
    async with serve(settings, with_worker=True) as service:
        async with AsyncClient(str(service.client.base_url)) as client:
            sent = await client.send_many(["x", TEXT], model="pooling", embedding={})
            results = [await client.wait(one) for one in sent if isinstance(one, Result)]
        assert [one.kind for one in results] == ["embedding"] * 2
        assert [one.result for one in results] == [
            {"embedding": one["embedding"]} for one in (await embed(service, ["x", TEXT]))["data"]
        ]


async def test_a_batch_of_embeddings(settings: Settings) -> None:
    bodies = [{"model": "pooling", "input": ["x", "y"]}, {"model": "scripted", "input": "x"}]
    lines = [
        {"custom_id": str(place), "method": "POST", "url": PATH, "body": body}
        for place, body in enumerate(bodies)
    ]
    content = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    async with serve(settings, with_worker=True) as service, openai_client(service) as client:
        file = await client.files.create(file=("in.jsonl", content), purpose="batch")
        batch = await client.batches.create(
            input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h"
        )

        async def ended() -> Batch | None:
            found = await client.batches.retrieve(batch.id)
            return found if found.status == "completed" else None

        done: Batch = await until(ended, 60)
        assert done.output_file_id
        assert done.error_file_id
        (line,) = (await client.files.content(done.output_file_id)).content.splitlines()
        answer = json.loads(line)["response"]["body"]
        assert answer["data"] == (await embed(service, ["x", "y"]))["data"]
        (line,) = (await client.files.content(done.error_file_id)).content.splitlines()
        assert json.loads(line)["response"]["status_code"] == 400


async def started(service: Service, result_id: str) -> bool:
    return (await read(service, result_id))["started_at"] is not None


async def test_a_pending_one_is_cancelled(service: Service) -> None:
    body = {"model": "pooling", "content": "{{delay_ms=60000}}", "embedding": {}}
    sent = (await service.client.post("/results/", json=body)).json()
    await until(lambda: started(service, sent["id"]))
    assert (await service.client.post(f"/results/{sent['id']}/cancel")).is_success
    result = await read(service, sent["id"], wait=30)
    assert (result["state"], result["error"]["code"]) == ("failed", "cancelled")
    assert result["result"] is None


async def test_a_cancellation_may_overtake_its_request(pooling: EmbeddedTriton) -> None:
    asked = {"input": "{{delay_ms=60000}}", "parameters": {"task": "embed"}}

    def ask_long(request_id: str) -> pb.ModelInferRequest:
        return ask("pooling", "", request_id=request_id, pooling_request=json.dumps(asked))

    await check_cancellations(pooling, "pooling", ask_long)


async def test_a_client_that_leaves_cancels_its_texts(
    settings: Settings, connection: asyncpg.Connection
) -> None:
    body = {"model": "pooling", "input": ["{{delay_ms=60000}}"] * 2}
    # By a socket: the end of a call in this process could end the API's request in mid-insert.
    async with serve(settings, with_worker=True) as service:
        task = asyncio.create_task(service.client.post(PATH, json=body))
        running = "SELECT count(*) = 2 FROM results WHERE worker_id IS NOT NULL"
        await until(lambda: connection.fetchval(running))
        task.cancel()
        ended = "SELECT count(*) = 2 FROM results WHERE error_code = 'cancelled'"
        await until(lambda: connection.fetchval(ended))
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize(
    ("text", "code"),
    [("{{refuse}}", "invalid_request"), ("{{fail}}", "model_error"), ("{{nan}}", "model_error")],
)
async def test_failures_are_those_of_any_result(service: Service, text: str, code: str) -> None:
    result = await send(service, content=text)
    assert (result["state"], result["error"]["code"], result["result"]) == ("failed", code, None)
    answer = await service.client.post(PATH, json={"model": "pooling", "input": [TEXT, text]})
    assert answer.json()["error"]["code"] == code
    assert answer.status_code == (400 if code == "invalid_request" else 502)


@pytest.mark.trial
async def test_a_lost_attempt_runs_again(service: Service) -> None:
    result = await send(service, content="{{lost}}")
    assert result["error"]["code"] == "engine_crashed"
    assert result["attempt"] >= 3


async def test_texts_and_vectors_are_erased(
    service: Service, connection: asyncpg.Connection
) -> None:
    answer = await embed(service, [TEXT, "x"], store=False)
    assert len(answer["data"]) == 2
    erased = "SELECT count(*) = 2 FROM results WHERE erased_at IS NOT NULL"
    await until(lambda: connection.fetchval(erased))
    left = "SELECT count(*) FROM results WHERE num_nonnulls(vector, output, prompt) > 0"
    assert await connection.fetchval(left) == 0
    assert await connection.fetchval("SELECT count(*) FROM contexts WHERE content <> ''") == 0
    (row,) = (await service.client.get("/results/", params={"limit": 1, "full": True})).json()
    assert (row["kind"], row["result"], row["state"]) == ("embedding", None, "completed")


async def test_vectors_are_a_teams_own(guarded: Settings) -> None:
    red, blue = (bearer(sign({"team_id": one, "token_id": one})) for one in ("red", "blue"))
    body = {"model": "pooling", "input": TEXT}
    async with run_service(guarded, with_worker=True) as service:
        answer = await service.client.post(PATH, json=body, headers=red)
        path = f"/results/{answer.headers['X-Result-Id']}"
        assert (await service.client.get(path, headers=red)).json()["result"]["embedding"]
        assert_problem(await service.client.get(path, headers=blue), 404, "not_found")
        for one in ("/results/", "/contexts/"):
            assert (await service.client.get(one, headers=blue)).json() == []
        same = {"Idempotency-Key": "same"}
        ids = {
            (await service.client.post(PATH, json=body, headers=team | same)).headers["X-Result-Id"]
            for team in (red, blue)
        }
        assert len(ids) == 2
        for url in (PATH, "/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score", "/embed"):
            assert (await service.client.post(url, json={})).status_code == 401


async def test_a_model_is_asked_for_what_it_computes(service: Service) -> None:
    """Refused by name, before anything is stored, in the error shape of each dialect."""
    chat = {"model": "pooling", "messages": [{"role": "user", "content": "x"}]}
    for path, body in (
        ("/v1/chat/completions", chat),
        ("/v1/completions", {"model": "pooling", "prompt": "x"}),
        ("/v1/responses", {"model": "pooling", "input": "x"}),
        (PATH, {"model": "scripted", "input": "x"}),
        (PATH, {"model": "ranking", "input": "x"}),
    ):
        error = assert_openai_error(await service.client.post(path, json=body), 400, param="model")
        assert "embeddings" in error["message"], path
    answer = await service.client.post("/v1/messages", json=chat | {"max_tokens": 1})
    assert (answer.status_code, "embeddings" in answer.text) == (400, True)
    answer = await service.client.post("/generate", json={"inputs": "x", "model": "pooling"})
    assert (answer.status_code, answer.json()["error_type"]) == (422, "validation")
    tasks: dict[str, dict[str, Any]] = {"pooling": {}, "scripted": EMBED, "ranking": EMBED}
    for model, members in tasks.items():
        sent = await service.client.post(
            "/results/", json={"model": model, "content": "x"} | members
        )
        assert_problem(sent, 422, "invalid_request", "model")
    assert (await service.client.get("/results/")).json() == []


async def test_the_engine_refuses_where_the_files_are_not_known(
    settings: Settings, tmp_path: Path
) -> None:
    elsewhere = settings.model_copy(update={"model_repository": tmp_path})
    async with run_service(elsewhere, with_worker=True) as service:
        assert len((await embed(service))["data"]) == 1
        wrong = {"model": "scripted", "input": "x"}
        error = assert_openai_error(await service.client.post(PATH, json=wrong), 400)
        assert "embeddings" in error["message"]
        wrong = {"model": "pooling", "prompt": "x"}
        assert_openai_error(await service.client.post("/v1/completions", json=wrong), 400)


@pytest.mark.parametrize(
    ("members", "param"),
    [
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": ["x", ""]}, "input"),
        ({"input": ["x"] * 1001}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": [1, "x"]}, "input"),
        ({"input": [[-1]]}, "input"),
        ({"input": {"text": "x"}}, "input"),
        ({"input": "a\x00b"}, None),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": 10**9}, "dimensions"),
        ({"dimensions": True}, "dimensions"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"priority": 101}, "priority"),
        ({"messages": [{"role": "user", "content": "x"}]}, "messages"),
        ({"model": "nobody"}, None),
    ],
)
async def test_wrong_requests(service: Service, members: dict[str, Any], param: str | None) -> None:
    body = {"model": "pooling", "input": "x"} | members
    answer = await service.client.post(PATH, json=body)
    error = assert_openai_error(answer, 404 if "model" in members else 400, param=param)
    assert error["message"]
    assert (await service.client.get("/results/")).json() == []


@pytest.mark.parametrize(
    "members",
    [
        {"embedding": {"dimensions": "4"}},
        {"embedding": {"size": 4}},
        {"embedding": {}, "score": {}},
        {"embedding": {}, "parameters": {"temperature": 0}},
        {"embedding": {}, "attribute": "corpus"},
        {"embedding": True},
        {"score": {}},
    ],
)
async def test_wrong_native_requests(service: Service, members: dict[str, Any]) -> None:
    body = {"model": "pooling", "content": "x"} | members
    assert_problem(await service.client.post("/results/", json=body), 422, "invalid_request")
