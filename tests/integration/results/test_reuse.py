"""Exact reuse over HTTP: equal and unequal requests, every kind of send, and the usage."""

from typing import Any

import asyncpg
import httpx
import pytest

from tests.conftest import Service
from tests.integration.support import assert_problem, finish, read, until

GREEDY = {"max_tokens": 8, "temperature": 0}
CONTENT = "x {{chunks=2}}"


def body(**members: Any) -> dict[str, Any]:
    asked = {"model": "scripted", "content": CONTENT, "parameters": GREEDY, "reuse": True}
    return asked | members


async def post(service: Service, **members: Any) -> httpx.Response:
    return await service.client.post("/results/", json=body(**members))


async def source_of(service: Service, **members: Any) -> dict[str, Any]:
    asked = body(**members)
    return await finish(service, asked.pop("content"), **asked)


async def test_an_equal_request_has_the_answer_in_the_response(service: Service) -> None:
    source = await source_of(service)
    assert "reused" not in source
    answer = await post(service, metadata={"a": 1}, priority=-1)
    assert answer.status_code == 200
    reused = answer.json()
    assert (reused["reused"], reused["reused_from"]) == (True, source["id"])
    assert reused["id"] != source["id"]
    assert answer.headers["location"] == f"/results/{reused['id']}"
    assert (reused["state"], reused["metadata"]) == ("completed", {"a": 1})
    for name in ("result", "finish_reason", "usage", "parameters", "model_version"):
        assert reused[name] == source[name]
    assert await read(service, reused["id"]) == reused
    waited = await service.client.post("/results/", json=body(), headers={"Prefer": "wait=20"})
    assert waited.json()["reused_from"] == source["id"]


@pytest.mark.parametrize(
    "members",
    [
        {"content": "y {{chunks=2}}"},
        {"parameters": GREEDY | {"max_tokens": 9}},
        {"parameters": GREEDY | {"seed": 1}},
        {"parameters": GREEDY | {"temperature": 1e-9, "seed": 1}},
        {"parameters": GREEDY | {"logit_bias": {"1": 1}}},
        {"reuse": False},
        {"messages": [{"role": "user", "content": CONTENT}], "content": None},
    ],
)
async def test_an_unequal_request_runs(service: Service, members: dict[str, Any]) -> None:
    await source_of(service)
    answer = await post(service, **members)
    assert answer.status_code == 202
    assert "reused" not in await read(service, answer.json()["id"], wait=20)


async def test_sampled_requests_run_each_time_and_seeded_ones_once(service: Service) -> None:
    sampled, seeded = {"max_tokens": 8}, {"max_tokens": 8, "seed": 3}
    await source_of(service, parameters=sampled)
    first = await source_of(service, parameters=seeded)
    assert (await post(service, parameters=sampled)).status_code == 202
    again = await post(service, parameters=seeded)
    assert again.json()["reused_from"] == first["id"]


async def test_a_deleted_source_answers_nothing(service: Service) -> None:
    source = await source_of(service)
    copy = (await post(service)).json()
    assert (await service.client.delete(f"/results/{source['id']}")).status_code == 204
    answer = await post(service)
    assert answer.status_code == 202  # the copy is no source
    assert await read(service, copy["id"]) == copy


async def test_stored_prompts_lists_and_rows_of_jobs(service: Service) -> None:
    source = await source_of(service)
    context = await service.client.post("/contexts/", json={"content": CONTENT})
    options = {"parameters": GREEDY, "reuse": True}
    path = f"/models/send/scripted/{context.json()['id']}"
    sent = (await service.client.post(path, json=options)).json()
    job = (await service.client.post("/jobs", json={})).json()
    row = {"job_id": job["id"], "job_key": "k"}
    other = body(content="z {{chunks=1}}")
    listed = await service.client.post("/results/", json=[body(), other, body(**row)])
    first, second, third = listed.json()
    assert [one.get("reused_from") for one in (sent, first, second, third)] == [
        source["id"], source["id"], None, source["id"],
    ]  # fmt: skip
    again = (await service.client.post("/results/", json=[body(**row)])).json()
    assert [one["id"] for one in again] == [third["id"]]
    assert (await read(service, second["id"], wait=20))["state"] == "completed"

    async def is_counted() -> bool:
        found = (await service.client.get(f"/jobs/{job['id']}")).json()
        return bool(found["counts"]["completed"] == 1)

    await until(is_counted)


async def test_an_idempotency_key_finds_the_reused_result(service: Service) -> None:
    await source_of(service)
    headers = {"Idempotency-Key": "a"}
    first = await service.client.post("/results/", json=body(), headers=headers)
    second = await service.client.post("/results/", json=body(), headers=headers)
    assert (first.status_code, second.status_code) == (200, 200)
    assert second.json() == first.json()
    assert second.headers["idempotent-replayed"] == "true"
    other = await service.client.post("/results/", json=body(reuse=False), headers=headers)
    assert_problem(other, 409, "idempotency_conflict")


async def test_choices_of_openais_completions(service: Service) -> None:
    asked = {"model": "scripted", "prompt": CONTENT, "n": 2, "seed": 5, "max_tokens": 8}
    first = await service.client.post("/v1/completions", json=asked | {"reuse": True})
    assert "x-reused-from" not in first.headers
    second = await service.client.post("/v1/completions", json=asked | {"reuse": True})
    assert second.headers["x-reused-from"] == first.headers["x-result-id"]
    assert second.headers["x-result-id"] != first.headers["x-result-id"]
    assert second.json()["choices"] == first.json()["choices"]
    plain = await service.client.post("/v1/completions", json=asked)
    assert "x-reused-from" not in plain.headers
    streamed = await service.client.post(
        "/v1/completions", json=asked | {"reuse": True, "stream": True}
    )
    assert streamed.text.endswith("data: [DONE]\n\n")
    (last, _) = streamed.headers["x-result-id"].split(",")
    assert (await read(service, last.strip()))["reused"] is True


async def test_tokens_are_counted_once(service: Service, connection: asyncpg.Connection) -> None:
    source = await source_of(service)
    for _ in range(3):
        assert (await post(service)).status_code == 200

    async def entries() -> Any:
        row = await connection.fetchrow(
            """SELECT coalesce(sum(results), 0)::int AS results,
                 coalesce(sum(prompt_tokens), 0)::int AS prompt,
                 coalesce(sum(completion_tokens), 0)::int AS completion
               FROM (SELECT results, prompt_tokens, completion_tokens FROM usage_days
                     UNION ALL SELECT results, prompt_tokens, completion_tokens FROM usage_entries) u"""
        )
        assert row is not None
        return row if row["results"] == 4 else None

    found = await until(entries)
    assert found["prompt"] == source["usage"]["prompt_tokens"]
    assert found["completion"] == source["usage"]["completion_tokens"]
    tokens = await connection.fetchval("SELECT sum(completion_tokens)::int FROM minute_stats")
    assert tokens == source["usage"]["completion_tokens"]
