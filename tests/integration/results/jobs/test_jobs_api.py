"""Jobs over HTTP: creation, rows under their keys, counts, order of ends, close, and what is refused."""

import asyncio

import asyncpg
import pytest

from app.core.settings import Settings
from tests.conftest import Service, run_service
from tests.integration.results.jobs.support import (
    act,
    ended_rows,
    new_job,
    read_job,
    row,
    send_rows,
    until_ended,
    until_placed,
)
from tests.integration.support import UNKNOWN_ID, assert_problem, until

NO_ROWS = {"rows": 0, "pending": 0, "completed": 0, "failed": 0}


async def test_a_job_runs_its_rows_and_ends(service: Service) -> None:
    job = await new_job(service, name="n", key="k", total=3, metadata={"a": 1})
    assert (job["state"], job["counts"], job["total"]) == ("open", NO_ROWS, 3)
    assert (job["name"], job["key"], job["priority"], job["metadata"]) == ("n", "k", -1, {"a": 1})
    contents = {"a": "{{chunks=2}}", "b": "{{chunks=3}}", "c": "{{fail_at=1}}"}
    sent = await send_rows(service, [row(job, key, text) for key, text in contents.items()])
    assert [one["state"] for one in sent] == ["pending"] * 3
    assert (await read_job(service, job))["counts"]["rows"] == 3  # exact, at once
    closed = await act(service, job, "close")
    assert closed["closed_at"] is not None
    ended = await until_ended(service, job)
    assert ended["counts"] == {"rows": 3, "pending": 0, "completed": 2, "failed": 1}
    assert ended["errors"] == {"model_error": 1}
    assert ended["usage"]["completion_tokens"] >= 5
    assert ended["closed_at"] <= ended["ended_at"]
    rows = await ended_rows(service, job)
    assert [one["place"] for one in rows] == sorted({one["place"] for one in rows})
    assert {one["key"]: one["result_id"] for one in rows} == {
        key: result["id"] for key, result in zip(contents, sent, strict=True)
    }
    for one in rows:
        read = (await service.client.get(f"/results/{one['result_id']}")).json()
        assert one["result"] == read
        assert one["state"] == read["state"]
    failed = await ended_rows(service, job, state="failed")
    assert [one["key"] for one in failed] == ["c"]
    assert len(await ended_rows(service, job, state="completed")) == 2


async def test_a_key_returns_its_result_as_long_as_the_job_lives(
    service: Service, connection: asyncpg.Connection
) -> None:
    job = await new_job(service)
    (first,) = await send_rows(service, [row(job, "a")])
    (again,) = await send_rows(service, [row(job, "a")])
    assert again["id"] == first["id"]
    alone = await service.client.post("/results/", json=row(job, "a"))
    assert (alone.json()["id"], alone.headers["idempotent-replayed"]) == (first["id"], "true")
    # A day later, when the job has ended.
    await act(service, job, "close")
    await until_ended(service, job)
    await service.services.keys.remove_expired()
    assert await connection.fetchval("SELECT count(*) FROM idempotency_keys") == 0
    (late,) = await send_rows(service, [row(job, "a")])
    assert (late["id"], late["state"]) == (first["id"], "completed")
    (other,) = await send_rows(service, [row(job, "a", "another prompt")])
    assert (other["status"], other["code"], other["result_id"]) == (
        409,
        "idempotency_conflict",
        first["id"],
    )
    assert (await read_job(service, job))["counts"]["rows"] == 1


async def test_keys_are_the_jobs_own(api: Service) -> None:
    first, second = await new_job(api), await new_job(api)
    rows = [row(first, "a"), row(second, "a"), row(first, "a"), row(first, "b")]
    plain = {"model": "scripted", "content": "x", "idempotency_key": "a"}
    sent = await send_rows(api, [*rows, plain])
    ids = [one["id"] for one in sent]
    assert len(set(ids)) == 4
    assert ids[0] == ids[2]
    assert (await read_job(api, first))["counts"]["rows"] == 2
    assert (await read_job(api, second))["counts"]["pending"] == 1


async def test_the_same_rows_at_once_are_stored_once(api: Service) -> None:
    job = await new_job(api)
    rows = [row(job, f"k{place}") for place in range(50)]
    answers = await asyncio.gather(*(send_rows(api, rows) for _ in range(8)))
    ids = {tuple(one["id"] for one in answer) for answer in answers}
    assert len(ids) == 1
    assert (await read_job(api, job))["counts"]["rows"] == 50
    listed = (await api.client.get("/results/", params={"limit": 1000})).json()
    assert {one["id"] for one in listed} == set(ids.pop())


async def test_a_closed_job_takes_no_new_rows(api: Service) -> None:
    job = await new_job(api)
    (first,) = await send_rows(api, [row(job, "a")])
    closed = await act(api, job, "close")
    assert (closed["state"], closed["counts"]["pending"]) == ("closed", 1)
    assert (await act(api, job, "close"))["closed_at"] == closed["closed_at"]
    known, refused = await send_rows(api, [row(job, "a"), row(job, "b")])
    assert known["id"] == first["id"]
    assert (refused["status"], refused["code"]) == (409, "job_closed")
    assert_problem(await api.client.post("/results/", json=row(job, "b")), 409, "job_closed")
    assert (await read_job(api, job))["counts"]["rows"] == 1
    contexts = (await api.client.get("/contexts/")).json()
    assert len(contexts) == 1  # of refused rows, nothing is stored


async def test_a_closed_job_refuses_rows_beyond_a_limit_for_good(settings: Settings) -> None:
    """A client that would wait for the queue to empty would wait for nothing."""
    limited = settings.model_copy(update={"team_max_queued": 3})
    async with run_service(limited, with_worker=False) as api:
        job, still_open = await new_job(api), await new_job(api)
        await send_rows(api, [row(job, "a"), row(job, "b")])
        await act(api, job, "close")
        rows = [row(job, key) for key in ("a", "b", "c", "d", "e")]
        sent = await send_rows(api, rows)
        assert [one.get("code") for one in sent] == [None, None, *["job_closed"] * 3]
        assert_problem(
            await api.client.post(
                "/results/", json=[row(job, "c"), row(still_open, "a"), row(still_open, "b")]
            ),
            429,
            "limit_reached",
        )
        assert (await read_job(api, still_open))["counts"]["rows"] == 0


async def test_a_job_without_rows_ends_once_it_is_closed(api: Service) -> None:
    job, closed = await new_job(api), await new_job(api)
    await act(api, closed, "close")
    await until_ended(api, closed)  # by the keeper, which has looked at the other one, too
    assert (await read_job(api, job))["state"] == "open"
    await act(api, job, "close")
    assert (await until_ended(api, job))["counts"] == NO_ROWS


async def test_the_same_key_gives_the_same_job(api: Service) -> None:
    first = await new_job(api, key="k", name="first")
    for name in ("first", "other"):
        answer = await api.client.post("/jobs", json={"key": "k", "name": name})
        assert (answer.status_code, answer.headers["idempotent-replayed"]) == (200, "true")
        assert answer.json() == first
    answers = await asyncio.gather(
        *(api.client.post("/jobs", json={"key": "at once"}) for _ in range(10))
    )
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert sorted(answer.status_code for answer in answers) == [200] * 9 + [201]
    assert len({(await new_job(api))["id"] for _ in range(2)}) == 2


async def test_rows_have_the_options_of_their_job(
    api: Service, connection: asyncpg.Connection
) -> None:
    job = await new_job(api, priority=-9, deadline_seconds=500)
    sent = await send_rows(
        api,
        [row(job, "a"), row(job, "b", priority=-3, deadline_seconds=50), row(job, "c", priority=0)],
    )
    rows = await connection.fetch(
        "SELECT id, priority, deadline_seconds FROM results ORDER BY deadline_seconds, priority"
    )
    assert [(row["priority"], row["deadline_seconds"]) for row in rows] == [
        (-3, 50),
        (-9, 500),
        (0, 500),
    ]
    assert len(sent) == 3
    context = (await api.client.post("/contexts/", json={"content": "saved"})).json()
    path = f"/models/send/scripted/{context['id']}"
    place = {"job_id": job["id"], "job_key": "d"}
    one = (await api.client.post(path, json=place)).json()
    assert (await api.client.post(path, json=place)).json()["id"] == one["id"]
    priority = await connection.fetchval("SELECT priority FROM results WHERE id = $1", one["id"])
    assert priority == -9


@pytest.mark.parametrize(
    ("members", "field"),
    [
        ({"job_id": UNKNOWN_ID}, "body"),
        ({"job_key": "a"}, "body"),
        ({"job_id": UNKNOWN_ID, "job_key": ""}, "job_key"),
        ({"job_id": UNKNOWN_ID, "job_key": "x" * 256}, "job_key"),
        ({"job_id": UNKNOWN_ID, "job_key": "a\nb"}, "job_key"),
        ({"job_id": "x", "job_key": "a"}, "job_id"),
        ({"job_id": UNKNOWN_ID, "job_key": "a", "idempotency_key": "b"}, "body"),
    ],
)
async def test_a_row_is_named_whole(api: Service, members: dict[str, str], field: str) -> None:
    request = {"model": "scripted", "content": "x"} | members
    assert_problem(await api.client.post("/results/", json=request), 422, "invalid_request", field)
    (refused,) = await send_rows(api, [request])
    assert refused["code"] == "invalid_request"


async def test_a_row_takes_no_idempotency_key(api: Service) -> None:
    job = await new_job(api)
    answer = await api.client.post(
        "/results/", json=row(job, "a"), headers={"Idempotency-Key": "b"}
    )
    assert_problem(answer, 422, "invalid_request", "Idempotency-Key")


@pytest.mark.parametrize(
    ("members", "field"),
    [
        ({"name": "x" * 256}, "name"),
        ({"key": ""}, "key"),
        ({"total": -1}, "total"),
        ({"priority": 1}, "priority"),
        ({"priority": -101}, "priority"),
        ({"deadline_seconds": 0}, "deadline_seconds"),
        ({"deadline_seconds": 1e9}, "deadline_seconds"),
        ({"webhook_url": "ftp://x"}, "webhook_url"),
        ({"metadata": {"a": "x" * 20_000}}, "metadata"),
        ({"other": 1}, "other"),
    ],
)
async def test_options_of_a_job_are_bounded(
    api: Service, members: dict[str, object], field: str
) -> None:
    assert_problem(await api.client.post("/jobs", json=members), 422, "invalid_request", field)


async def test_unknown_jobs(api: Service) -> None:
    for method, path in (
        ("GET", ""), ("GET", "/results"), ("POST", "/close"), ("POST", "/cancel"), ("POST", "/retry"),
        ("POST", "/open"), ("DELETE", ""),
    ):  # fmt: skip
        for identifier in (UNKNOWN_ID, "nonsense"):
            answer = await api.client.request(method, f"/jobs/{identifier}{path}")
            assert_problem(answer, 404, "not_found")
    (refused,) = await send_rows(api, [row({"id": UNKNOWN_ID}, "a")])
    assert (refused["status"], refused["code"]) == (404, "not_found")


async def test_jobs_are_listed_newest_first(api: Service) -> None:
    jobs = [await new_job(api, name=str(place)) for place in range(4)]
    await act(api, jobs[1], "close")
    await until_ended(api, jobs[1])
    await send_rows(api, [row(jobs[2], "a")])
    await act(api, jobs[2], "close")

    async def names(**query: str | int) -> list[str]:
        answer = await api.client.get("/jobs", params=query)
        assert answer.status_code == 200, answer.text
        return [one["name"] for one in answer.json()]

    assert await names() == ["3", "2", "1", "0"]
    assert await names(limit=2) == ["3", "2"]
    assert await names(limit=2, after=jobs[2]["id"]) == ["1", "0"]
    assert await names(state="open") == ["3", "0"]
    assert await names(state="closed") == ["2"]
    assert await names(state="ended") == ["1"]
    page = await api.client.get("/jobs", params={"limit": 3})
    assert f"after={jobs[1]['id']}" in page.headers["link"]


async def test_results_come_in_pages_and_each_once(service: Service) -> None:
    job = await new_job(service)
    await send_rows(
        service, [row(job, str(place), f"{place} {{{{chunks=1}}}}") for place in range(30)]
    )
    rows = await until_placed(service, job, 30)
    for limit in (1, 7, 30):
        assert await ended_rows(service, job, limit=limit) == rows
    assert await ended_rows(service, job, after=rows[10]["place"]) == rows[11:]
    keys = await ended_rows(service, job, full=False, limit=9)
    assert keys == [{k: v for k, v in one.items() if k != "result"} for one in rows]
    assert_problem(
        await service.client.get(f"/jobs/{job['id']}/results?after=-1"), 422, "invalid_request"
    )


async def test_a_row_outlives_its_result(service: Service) -> None:
    job = await new_job(service)
    kept, gone = await send_rows(service, [row(job, "kept"), row(job, "gone")])
    await until_placed(service, job, 2)
    assert (await service.client.delete(f"/results/{gone['id']}")).status_code == 204
    rows = {one["key"]: one for one in await ended_rows(service, job)}
    assert rows["gone"]["result"] is None
    assert (rows["gone"]["state"], rows["gone"]["result_id"]) == ("completed", gone["id"])
    assert rows["kept"]["result"]["id"] == kept["id"]
    again, deleted = await send_rows(service, [row(job, "kept"), row(job, "gone")])
    assert again["id"] == kept["id"]
    assert (deleted["status"], deleted["code"]) == (410, "result_deleted")
    assert (deleted["result_id"], deleted["job_key"]) == (gone["id"], "gone")


async def test_a_pending_row_whose_result_is_deleted_has_ended(api: Service) -> None:
    job = await new_job(api)
    result, context = await send_rows(api, [row(job, "result"), row(job, "context")])
    path = f"/results/{result['id']}?force=true"
    assert (await api.client.delete(path)).status_code == 204
    path = f"/contexts/{context['context_id']}?force=true"
    assert (await api.client.delete(path)).status_code == 204
    await act(api, job, "close")
    ended = await until_ended(api, job)
    assert (ended["counts"]["failed"], ended["errors"]) == (2, {"deleted": 2})
    rows = await ended_rows(api, job)
    assert [(one["state"], one["result"]) for one in rows] == [("failed", None)] * 2
    retried = await act(api, job, "retry")
    assert retried["retried"] == 0
    assert {one["error"]["code"] for one in retried["refused"]} == {"result_deleted"}


async def test_a_team_has_a_bound_of_open_jobs(settings: Settings) -> None:
    bounded = settings.model_copy(update={"team_max_jobs": 2, "max_job_rows": 3})
    async with run_service(bounded, with_worker=False) as api:
        first = await new_job(api, key="k")
        job = await new_job(api)
        refused = await api.client.post("/jobs", json={})
        assert assert_problem(refused, 429, "limit_reached")["limit"] == "max_jobs"
        assert refused.headers["retry-after"] == "10"
        assert (await api.client.post("/jobs", json={"key": "k"})).json()["id"] == first["id"]
        await act(api, first, "close")
        await until_ended(api, first)
        await new_job(api)
        await send_rows(api, [row(job, str(place)) for place in range(3)])

        async def is_counted() -> bool:
            progress = await api.services.database.fetchrow(
                "SELECT rows FROM job_progress WHERE job_id = $1", job["id"]
            )
            return progress is not None and progress["rows"] == 3

        await until(is_counted)
        (over,) = await send_rows(api, [row(job, "over")])
        assert "retry-after" not in over
        assert (over["code"], over["limit"]) == ("limit_reached", "max_job_rows")
