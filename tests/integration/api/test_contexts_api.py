"""Contexts over HTTP: save, read, list in pages, delete with their results."""

import asyncio

import asyncpg

from tests.conftest import Service
from tests.integration.results.test_results_api import SLOW, walk
from tests.integration.support import (
    assert_problem,
    count_rows,
    finish,
    send,
    until,
    until_running,
)


async def test_a_context_is_kept_as_it_was_sent(api: Service) -> None:
    content = "Ünïcødé 🙂 \r\n\t \u2028 \x7f"
    created = await api.client.post(
        "/contexts/", json={"content": content, "metadata": {"k": {"n": [1, 2.5, None, True]}}}
    )
    assert created.status_code == 201
    context = created.json()
    assert created.headers["location"] == f"/contexts/{context['id']}"
    assert context["content"] == content
    assert context["messages"] is None
    assert context["metadata"] == {"k": {"n": [1, 2.5, None, True]}}
    assert context["created_at"] == context["updated_at"]
    read = await api.client.get(created.headers["location"])
    assert (read.status_code, read.json()) == (200, context)


async def test_messages_are_kept_in_order(api: Service) -> None:
    messages = [{"role": role, "content": role * 3} for role in ("system", "user", "assistant")]
    created = await api.client.post("/contexts/", json={"messages": messages})
    context = created.json()
    assert (context["messages"], context["content"]) == (messages, None)
    assert (await api.client.get(f"/contexts/{context['id']}")).json() == context


async def test_an_empty_list_is_empty(api: Service) -> None:
    for path in ("/contexts/", "/results/"):
        answer = await api.client.get(path)
        assert (answer.status_code, answer.json()) == (200, [])
        assert "link" not in answer.headers


async def test_pages_walk_all_contexts_once(api: Service) -> None:
    ids = []
    for n in range(12):
        created = await api.client.post("/contexts/", json={"content": str(n)})
        ids.append(created.json()["id"])
    assert ids == sorted(ids)
    first = await api.client.get("/contexts/?limit=5")
    await api.client.post("/contexts/", json={"content": "arrived between two pages"})
    rows = first.json() + await walk(api, first.links["next"]["url"])
    assert [row["id"] for row in rows] == ids[::-1]
    assert len(await walk(api, "/contexts/?limit=1")) == 13


async def test_many_are_saved_at_once(api: Service) -> None:
    answers = await asyncio.gather(
        *(api.client.post("/contexts/", json={"content": f"n {n}"}) for n in range(200))
    )
    assert {answer.status_code for answer in answers} == {201}
    assert len({answer.json()["id"] for answer in answers}) == 200
    assert [answer.json()["content"] for answer in answers] == [f"n {n}" for n in range(200)]


async def test_delete_takes_the_ended_results_along(
    service: Service, connection: asyncpg.Connection
) -> None:
    result = await finish(service, "x {{chunks=1}}")
    path = f"/contexts/{result['context_id']}"
    answer = await service.client.delete(path)
    assert (answer.status_code, answer.content) == (204, b"")
    for gone in (path, f"/results/{result['id']}"):
        assert_problem(await service.client.get(gone), 404, "not_found")
    assert_problem(await service.client.delete(path), 404, "not_found")
    assert await count_rows(connection) == (0, 0, 0)


async def test_delete_waits_for_pending_results_unless_forced(
    api: Service, connection: asyncpg.Connection
) -> None:
    accepted = await send(api, "never")
    path = f"/contexts/{accepted['context_id']}"
    problem = assert_problem(await api.client.delete(path), 409, "conflict")
    assert "1 result" in problem["detail"]
    assert await count_rows(connection) == (1, 1, 0)
    answer = await api.client.delete(f"{path}?force=true")
    assert answer.status_code == 204
    assert await count_rows(connection) == (0, 0, 0)


async def test_forced_delete_stops_what_runs(
    service: Service, connection: asyncpg.Connection
) -> None:
    accepted = await send(service, SLOW)
    await until_running(service, accepted["id"])
    answer = await service.client.delete(f"/contexts/{accepted['context_id']}?force=true")
    assert answer.status_code == 204

    async def is_idle() -> bool:
        models = (await service.client.get("/models/scripted")).json()
        return bool(models["running"] == 0)

    await until(is_idle)
    assert await count_rows(connection) == (0, 0, 0)


async def test_a_send_that_races_a_delete_is_stored_whole_or_not(
    api: Service, connection: asyncpg.Connection
) -> None:
    for _ in range(10):
        context = (await api.client.post("/contexts/", json={"content": "x"})).json()["id"]
        sent, deleted = await asyncio.gather(
            api.client.post(f"/models/send/scripted/{context}"),
            api.client.delete(f"/contexts/{context}"),
        )
        assert (sent.status_code, deleted.status_code) in {(202, 409), (404, 204), (202, 204)}
        if deleted.status_code == 204:
            assert_problem(await api.client.get(f"/contexts/{context}"), 404, "not_found")
    orphans = await connection.fetchval(
        "SELECT count(*) FROM results r WHERE NOT EXISTS"
        " (SELECT FROM contexts c WHERE c.id = r.context_id)"
    )
    assert orphans == 0
