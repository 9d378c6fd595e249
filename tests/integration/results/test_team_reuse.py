"""A team's setting for exact reuse: every dialect, opting out, and what runs as before."""

from typing import Any

import asyncpg
import httpx
import pytest

from app.core.settings import Settings
from app.queue.team_limits import ANY_MODEL
from tests.conftest import Service, run_service
from tests.integration.auth.test_auth import bearer, guarded
from tests.integration.support import finish, read, until
from tests.unit.auth.test_jwt import sign

__all__ = ["guarded"]

GREEDY = {"max_tokens": 8, "temperature": 0}
CONTENT = "x {{chunks=2}}"
CHAT = {"model": "scripted", "messages": [{"role": "user", "content": CONTENT}]}
# Requests of each dialect that an equal one may answer.
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": "scripted", "prompt": CONTENT} | GREEDY,
    "/v1/chat/completions": CHAT | GREEDY,
    "/v1/responses": {
        "model": "scripted", "input": CONTENT, "temperature": 0, "max_output_tokens": 16,
    },
    "/v1/messages": CHAT | GREEDY,
    "/generate": {"inputs": CONTENT, "parameters": {"max_new_tokens": 8}},
    "/": {"inputs": CONTENT, "parameters": {"max_new_tokens": 8, "do_sample": True, "seed": 4}},
}  # fmt: skip


def body(**members: Any) -> dict[str, Any]:
    return {"model": "scripted", "content": CONTENT, "parameters": GREEDY} | members


async def set_reuse(
    service: Service, *, reuse: bool, team: str = "default", model: str = ANY_MODEL
) -> None:
    """Set a team's reuse, and wait until the service has read it."""
    limits = service.services.limits
    await limits.set(team, model, {"reuse": reuse})
    name = "scripted" if model == ANY_MODEL else model

    async def is_known() -> bool:
        return limits.of(team, name).reuse == reuse

    await until(is_known)


async def post(service: Service, path: str = "/results/", **members: Any) -> httpx.Response:
    return await service.client.post(path, json=body(**members))


async def source_of(service: Service, **members: Any) -> dict[str, Any]:
    sent = body(**members)
    return await finish(service, sent.pop("content"), **sent)


async def test_requests_without_reuse_follow_the_teams_setting(service: Service) -> None:
    before = await source_of(service)
    assert (await post(service)).status_code == 202
    await set_reuse(service, reuse=True)
    source = await source_of(service)
    assert "reused" not in source  # what ran before the setting answers nothing
    again = await post(service)
    assert again.status_code == 200
    assert (again.json()["reused"], again.json()["reused_from"]) == (True, source["id"])
    assert again.json()["result"] == before["result"]
    # It is equal to a request with `reuse`.
    assert (await post(service, reuse=True)).json()["reused_from"] == source["id"]
    refused = await post(service, reuse=False)
    assert refused.status_code == 202
    assert "reused" not in await read(service, refused.json()["id"], wait=20)
    await set_reuse(service, reuse=False)
    assert (await post(service)).status_code == 202


async def test_what_is_not_eligible_runs_as_before(
    service: Service, connection: asyncpg.Connection
) -> None:
    await set_reuse(service, reuse=True)
    for members in ({"parameters": {"max_tokens": 8}}, {"reuse": False}):
        for _ in range(2):
            sent = await post(service, **members)
            assert sent.status_code == 202
            assert "reused" not in await read(service, sent.json()["id"], wait=20)
    for _ in range(2):  # a seed of the service's choice
        answer = await service.client.post(
            "/generate", json={"inputs": CONTENT, "parameters": {"do_sample": True, "max_new_tokens": 8}}
        )  # fmt: skip
        assert "x-reused-from" not in answer.headers
    digests = "SELECT count(*) FROM results WHERE reuse_digest IS NOT NULL"
    assert await connection.fetchval(digests) == 0
    source = await source_of(service)
    retried = await service.client.post(f"/results/{source['id']}/retry")
    assert retried.status_code == 202
    assert "reused" not in await read(service, retried.json()["id"], wait=20)


async def test_a_models_setting_goes_before_the_teams(service: Service) -> None:
    await set_reuse(service, reuse=True)
    await set_reuse(service, reuse=False, model="scripted")
    await source_of(service)
    assert (await post(service)).status_code == 202
    assert await service.services.limits.remove("default", "scripted")

    async def is_known() -> bool:
        return service.services.limits.of("default", "scripted").reuse

    await until(is_known)
    source = await source_of(service)
    assert (await post(service)).json()["reused_from"] == source["id"]


async def test_stored_prompts_lists_and_rows_of_jobs(service: Service) -> None:
    await set_reuse(service, reuse=True)
    source = await source_of(service)
    context = await service.client.post("/contexts/", json={"content": CONTENT})
    path = f"/models/send/scripted/{context.json()['id']}"
    sent = await service.client.post(path, json={"parameters": GREEDY})
    assert sent.json()["reused_from"] == source["id"]
    sampled = await service.client.post(path, json={"parameters": {"max_tokens": 8}})
    assert sampled.status_code == 202
    job = (await service.client.post("/jobs", json={})).json()
    rows = [body(job_id=job["id"], job_key="a"), body(job_id=job["id"], job_key="b", reuse=False)]
    listed = (await service.client.post("/results/", json=[body(), *rows])).json()
    assert [one.get("reused_from") for one in listed] == [source["id"], source["id"], None]


@pytest.mark.parametrize("path", REQUESTS)
async def test_a_dialect_reuses_by_the_teams_setting(chatting: Service, path: str) -> None:
    async def send(**members: Any) -> str | None:
        """The id of the source; None if it ran."""
        answer = await chatting.client.post(path, json=REQUESTS[path] | members)
        assert answer.status_code == 200, answer.text
        reused: str | None = answer.headers.get("x-reused-from")
        ids.append(answer.headers["x-result-id"])
        return reused

    ids: list[str] = []
    assert [await send() for _ in range(2)] == [None, None]
    await set_reuse(chatting, reuse=True)
    assert await send() is None
    source = ids[-1]
    assert await send() == source
    assert await send(reuse=False) is None
    assert await send(reuse=True) == source
    if path in ("/generate", "/"):
        for header, expected in (("false", None), ("true", source)):
            chatting.client.headers["X-Reuse"] = header
            assert await send() == expected


async def test_another_teams_results_answer_nothing(guarded: Settings) -> None:
    red, blue = (bearer(sign({"team_id": one, "token_id": one})) for one in ("red", "blue"))
    async with run_service(guarded, with_worker=True) as service:

        async def send(team: dict[str, str]) -> dict[str, Any]:
            headers = team | {"Prefer": "wait=20"}
            answer = await service.client.post("/results/", json=body(), headers=headers)
            found: dict[str, Any] = answer.json()
            assert found["state"] == "completed"
            return found

        await set_reuse(service, reuse=True, team="red")
        source = await send(red)
        assert (await send(red))["reused_from"] == source["id"]
        for _ in range(2):  # blue's own setting is off
            assert "reused" not in await send(blue)
        await set_reuse(service, reuse=True, team="blue")
        own = await send(blue)
        assert "reused" not in own
        assert (await send(blue))["reused_from"] == own["id"]


async def test_a_key_of_an_older_version_finds_its_result(service: Service) -> None:
    """`reuse: false` was the default: such a request had the hash of one without it."""
    headers = {"Idempotency-Key": "a"}
    first = await service.client.post("/results/", json=body(), headers=headers)
    second = await service.client.post("/results/", json=body(reuse=False), headers=headers)
    assert second.json()["id"] == first.json()["id"]
    await set_reuse(service, reuse=True)
    third = await service.client.post("/results/", json=body(), headers=headers)
    assert third.json()["id"] == first.json()["id"]
