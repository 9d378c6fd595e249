"""Retry: a new result of the same request, linked to the first; and the list of what may be retried."""

import asyncio
from datetime import datetime
from typing import Any

import asyncpg
import httpx
import pytest

from app.core.ids import created_at
from app.core.settings import Settings
from tests.conftest import Service, run_service
from tests.integration.support import (
    CHAT_TEMPLATE,
    UNKNOWN_ID,
    assert_problem,
    finish,
    read,
    send,
    write_model,
)

REQUEST = """
SELECT team_id, context_id, model_name, model_version, prompt, parameters, priority, metadata
FROM results WHERE id = $1
"""


async def post(service: Service, result_id: str, **headers: str) -> httpx.Response:
    return await service.client.post(f"/results/{result_id}/retry", headers=headers)


async def test_a_retry_asks_the_same_again(
    service: Service, connection: asyncpg.Connection
) -> None:
    first = await finish(
        service, "x {{fail_at=1 chunks=3}}", metadata={"a": 1}, priority=-7, deadline_seconds=600,
        parameters={"max_tokens": 9, "seed": 4, "stop": "never"},
    )  # fmt: skip
    assert (first["state"], first["retry_of"]) == ("failed", None)
    answer = await post(service, first["id"])
    assert (answer.status_code, answer.headers["retry-after"]) == (202, "1")
    accepted = answer.json()
    assert accepted["id"] != first["id"]
    assert answer.headers["location"] == f"/results/{accepted['id']}"
    assert (accepted["state"], accepted["retry_of"]) == ("pending", first["id"])
    for name in ("context_id", "model_name", "parameters", "metadata"):
        assert accepted[name] == first[name]
    rows = [await connection.fetchrow(REQUEST, one["id"]) for one in (first, accepted)]
    assert rows[0] == rows[1]
    second = await read(service, accepted["id"], wait=20)
    assert (second["state"], second["retry_of"]) == ("failed", first["id"])
    assert second["error"] == first["error"]
    assert await read(service, first["id"]) == first
    third = (await post(service, second["id"], prefer="wait=20")).json()
    assert (third["state"], third["retry_of"]) == ("failed", second["id"])
    for row in await connection.fetch("SELECT id, deadline_at FROM results"):
        length = (row["deadline_at"] - created_at(row["id"])).total_seconds()
        assert length == pytest.approx(600, abs=0.2)


async def test_a_completed_result_can_be_retried_too(service: Service) -> None:
    first = await finish(service, "x {{chunks=2}}")
    answer = await post(service, first["id"], prefer="wait=20")
    assert answer.status_code == 200
    assert answer.json()["result"] == first["result"]


async def test_a_retry_of_messages_keeps_the_rendered_prompt(
    settings: Settings, connection: asyncpg.Connection, tmp_path: Any
) -> None:
    write_model(tmp_path, "scripted", max_model_len=64, template=CHAT_TEMPLATE)
    chat = settings.model_copy(update={"model_repository": tmp_path})
    async with run_service(chat, with_worker=True) as service:
        messages = [{"role": "user", "content": "hi {{chunks=2}}"}]
        sent = await service.client.post(
            "/results/", json={"model": "scripted", "messages": messages},
            headers={"prefer": "wait=20"},
        )  # fmt: skip
        again = await post(service, sent.json()["id"], prefer="wait=20")
        assert again.json()["result"] == sent.json()["result"]
    prompts = await connection.fetch("SELECT DISTINCT prompt FROM results")
    assert [row["prompt"] for row in prompts] == ["<user> hi {{chunks=2}} <assistant>"]


async def test_a_pending_result_is_not_retried(api: Service) -> None:
    accepted = await send(api, "x")
    assert_problem(await post(api, accepted["id"]), 409, "conflict")
    await api.client.post(f"/results/{accepted['id']}/cancel")
    assert (await post(api, accepted["id"])).status_code == 202


@pytest.mark.parametrize("result_id", [UNKNOWN_ID, "1", "abc", "%00"])
async def test_what_is_no_result(api: Service, result_id: str) -> None:
    assert_problem(await post(api, result_id), 404, "not_found")


async def test_another_teams_result_is_not_there(
    api: Service, connection: asyncpg.Connection
) -> None:
    accepted = await send(api, "x")
    await api.client.post(f"/results/{accepted['id']}/cancel")
    await connection.execute("UPDATE results SET team_id = 'other'")
    assert_problem(await post(api, accepted["id"]), 404, "not_found")


async def test_a_model_that_nobody_knows_any_more(
    api: Service, connection: asyncpg.Connection
) -> None:
    accepted = await send(api, "x")
    await api.client.post(f"/results/{accepted['id']}/cancel")
    await connection.execute("UPDATE results SET model_name = 'gone'")
    problem = assert_problem(await post(api, accepted["id"]), 404, "unknown_model")
    assert problem["known_models"] == ["scripted"]


async def test_a_full_queue_takes_no_retry(api: Service) -> None:
    first = await send(api, "x")
    await api.client.post(f"/results/{first['id']}/cancel")
    await send(api, "y")
    full = api.services.settings.model_copy(update={"max_queued": 1})
    async with run_service(full, with_worker=False) as service:
        answer = await post(service, first["id"])
        assert_problem(answer, 429, "queue_full")
        assert int(answer.headers["retry-after"]) > 0


async def test_a_retry_with_a_key_is_one_result(
    api: Service, connection: asyncpg.Connection
) -> None:
    first, other = await send(api, "x"), await send(api, "y")
    for one in (first, other):
        await api.client.post(f"/results/{one['id']}/cancel")
    key = {"idempotency-key": "k"}
    answers = await asyncio.gather(*(post(api, first["id"], **key) for _ in range(20)))
    assert {answer.status_code for answer in answers} == {202}
    (retried,) = {answer.json()["id"] for answer in answers}
    problem = assert_problem(await post(api, other["id"], **key), 409, "idempotency_conflict")
    assert problem["result_id"] == retried
    body = {"model": "scripted", "content": "x"}
    sent = await api.client.post("/results/", json=body, headers=key)
    assert_problem(sent, 409, "idempotency_conflict")
    await api.client.delete(f"/results/{first['id']}")
    assert (await post(api, first["id"], **key)).json()["id"] == retried
    assert await connection.fetchval("SELECT count(*) FROM results") == 2


async def test_the_dead_letters_and_their_retry(service: Service) -> None:
    """Failed results that may succeed are listed; a retry names its origin."""
    await finish(service, "fine {{chunks=1}}")
    await finish(service, "no {{refuse}}")
    failed = [await finish(service, f"{n} {{{{fail_at=1 chunks=2}}}}") for n in range(3)]
    query = {"state": "failed", "retryable": "true"}
    letters = (await service.client.get("/results/", params=query)).json()
    assert [row["id"] for row in letters] == [result["id"] for result in failed[::-1]]
    assert {row["retry_of"] for row in letters} == {None}
    retried = [(await post(service, row["id"], prefer="wait=20")).json() for row in letters]
    assert [result["retry_of"] for result in retried] == [row["id"] for row in letters]
    letters = (await service.client.get("/results/", params=query)).json()
    assert [row["retry_of"] for row in letters[:3]] == [r["retry_of"] for r in retried[::-1]]
    assert len(letters) == 6


async def test_the_attempts_of_a_retry_are_its_own(service: Service) -> None:
    first = await finish(service, "x {{fail_at=1 chunks=3}}")
    second = (await post(service, first["id"], prefer="wait=20")).json()
    histories = [
        (await service.client.get(f"/results/{one['id']}/attempts")).json()
        for one in (first, second)
    ]
    assert [len(history) for history in histories] == [1, 1]
    for (entry,), result in zip(histories, (first, second), strict=True):
        assert entry["attempt"] == 1
        assert entry["error"].items() <= result["error"].items()
        times = [result["started_at"], entry["started_at"], entry["ended_at"]]
        moments = [datetime.fromisoformat(time) for time in times]
        assert moments == sorted(moments)
