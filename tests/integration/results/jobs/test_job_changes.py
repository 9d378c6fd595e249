"""Cancellation, retry and deletion of jobs: bounded, repeatable, and of one team."""

import asyncio

import asyncpg
import pytest

from app.core.settings import Settings
from app.results.jobs import progress
from app.results.jobs.progress import JobKeeper
from tests.conftest import Service, run_service
from tests.integration.auth.test_auth import bearer, guarded
from tests.integration.results.jobs.support import (
    act,
    ended_rows,
    new_job,
    read_job,
    row,
    send_rows,
    until_ended,
)
from tests.integration.support import assert_problem, until, until_running
from tests.unit.auth.test_jwt import sign

__all__ = ["guarded"]


@pytest.mark.trial
async def test_a_cancelled_job_ends_its_rows(service: Service) -> None:
    job, other = await new_job(service), await new_job(service)
    slow = "{{chunks=200 delay_ms=100}}"
    (running,) = await send_rows(service, [row(job, "running", slow)])
    await until_running(service, running["id"])
    done = await send_rows(service, [row(job, "done")])
    assert (await service.client.get(f"/results/{done[0]['id']}?wait=20")).json()["result"]
    beside = await send_rows(service, [row(other, "beside", slow)])
    cancelled = await act(service, job, "cancel")
    assert cancelled["cancel_requested_at"] is not None
    assert cancelled["closed_at"] is not None
    ended = await until_ended(service, job)
    assert ended["counts"] == {"rows": 2, "pending": 0, "completed": 1, "failed": 1}
    assert ended["errors"] == {"cancelled": 1}
    again = await act(service, job, "cancel")
    assert (again["state"], again["ended_at"]) == ("ended", ended["ended_at"])
    assert (await read_job(service, other))["counts"]["pending"] == 1
    (refused,) = await send_rows(service, [row(job, "late")])
    assert refused["code"] == "job_closed"
    await service.client.post(f"/results/{beside[0]['id']}/cancel")


async def test_a_closed_job_takes_rows_once_it_is_opened_again(
    settings: Settings, connection: asyncpg.Connection
) -> None:
    """Closed or ended; not a cancelled one, and not beyond the bound of open jobs."""
    bounded = settings.model_copy(update={"team_max_jobs": 1})
    async with run_service(bounded, with_worker=False) as api:
        job = await new_job(api)
        for key in ("a", "b"):
            await act(api, job, "close")
            if key == "b":
                await until_ended(api, job)
            await connection.execute("UPDATE job_progress SET changed_at = '2020-01-01'")
            opened = await act(api, job, "open")
            times = opened["closed_at"], opened["ended_at"]
            assert (opened["state"], times) == ("open", (None, None))
            assert await act(api, job, "open") == opened
            # Retention counts from its opening.
            assert await connection.fetchval("SELECT changed_at > '2021-01-01' FROM job_progress")
            (sent,) = await send_rows(api, [row(job, key)])
            path = f"/results/{sent['id']}/cancel"
            assert (await api.client.post(path)).status_code == 200
        await act(api, job, "close")
        ended = await until_ended(api, job)
        assert ended["counts"] == {"rows": 2, "pending": 0, "completed": 0, "failed": 2}
        other = await new_job(api)
        refused = await api.client.post(f"/jobs/{job['id']}/open")
        assert assert_problem(refused, 429, "limit_reached")["limit"] == "max_jobs"
        await act(api, other, "cancel")
        assert_problem(await api.client.post(f"/jobs/{other['id']}/open"), 409, "conflict")
        await act(api, other, "retry")
        assert (await act(api, other, "open"))["state"] == "open"


@pytest.mark.trial
async def test_a_large_job_is_cancelled_beside_others(
    api: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_ROWS_OF_EACH", 7)
    jobs = [await new_job(api) for _ in range(3)]
    for job in jobs:
        await send_rows(api, [row(job, str(place)) for place in range(300)])
    for job in jobs[:2]:
        answer = await api.client.post(f"/jobs/{job['id']}/cancel")
        assert (answer.status_code, answer.json()["counts"]["pending"]) == (202, 300)
    for job in jobs[:2]:
        ended = await until_ended(api, job)
        assert ended["errors"] == {"cancelled": 300}
        assert len(await ended_rows(api, job, full=False)) == 300
    assert (await read_job(api, jobs[2]))["counts"]["pending"] == 300


async def test_failed_rows_are_sent_again(service: Service) -> None:
    job = await new_job(service)
    contents = {"a": "{{chunks=1}}", "b": "{{fail_at=1}}", "c": "{{fail_at=1 chunks=2}}"}
    first = await send_rows(service, [row(job, key, text) for key, text in contents.items()])
    await act(service, job, "close")
    ended = await until_ended(service, job)
    before = await ended_rows(service, job)
    retried = await act(service, job, "retry")
    assert (retried["retried"], retried["refused"], retried["following"]) == (2, [], None)
    assert (await read_job(service, job))["counts"]["rows"] == 3
    again = await until_ended(service, job)
    assert again["counts"] == ended["counts"]
    rows = await ended_rows(service, job, after=before[-1]["place"])
    assert {one["key"] for one in rows} == {"b", "c"}
    by_key = dict(zip(contents, first, strict=True))
    for one in rows:
        assert one["result"]["retry_of"] == by_key[one["key"]]["id"]
    # The key has its newest result; a batch that is repeated finds those rows alone.
    (known,) = await send_rows(service, [row(job, "b", contents["b"])])
    assert known["id"] == next(one["result_id"] for one in rows if one["key"] == "b")
    assert len(await ended_rows(service, job)) == 3


async def test_a_retry_that_is_repeated_after_its_rows_have_failed_again(service: Service) -> None:
    """As after a lost response: with `until`, the repetition finds nothing."""
    job = await new_job(service)
    await send_rows(service, [row(job, "a", "{{chunks=2 fail_at=1}}")])
    await act(service, job, "close")
    ended = await until_ended(service, job)
    last = ended["last_place"]
    assert last == 1
    assert (await act(service, job, "retry", until=last))["retried"] == 1
    again = await until_ended(service, job)
    assert again["last_place"] == 2
    assert (await act(service, job, "retry", until=last))["retried"] == 0
    assert (await act(service, job, "retry", until=again["last_place"]))["retried"] == 1


@pytest.mark.trial
async def test_retries_come_in_batches_and_by_code(api: Service) -> None:
    job = await new_job(api)
    await send_rows(api, [row(job, str(place)) for place in range(25)])
    await act(api, job, "cancel")
    await until_ended(api, job)
    assert (await act(api, job, "retry", error_code="model_error"))["retried"] == 0
    retried, after = [], 0
    while True:
        batch = await act(api, job, "retry", limit=10, after=after)
        retried.append(batch["retried"])
        if batch["following"] is None:
            break
        after = batch["following"]
    assert retried == [10, 10, 5]
    counts = (await read_job(api, job))["counts"]
    assert counts == {"rows": 25, "pending": 25, "completed": 0, "failed": 0}
    assert (await read_job(api, job))["state"] == "closed"
    assert await ended_rows(api, job) == []
    # Cancelled again, they end again.
    await act(api, job, "cancel")
    assert (await until_ended(api, job))["errors"] == {"cancelled": 25}
    assert len(await ended_rows(api, job)) == 25


async def test_a_batch_that_is_sent_twice_at_once_retries_no_row_twice(
    api: Service, connection: asyncpg.Connection
) -> None:
    job = await new_job(api)
    await send_rows(api, [row(job, str(place)) for place in range(40)])
    await act(api, job, "cancel")
    await until_ended(api, job)
    batches = await asyncio.gather(*(act(api, job, "retry") for _ in range(5)))
    assert sum(batch["retried"] for batch in batches) == 40
    assert await connection.fetchval("SELECT count(*) FROM results") == 80
    counts = (await read_job(api, job))["counts"]
    assert (counts["rows"], counts["pending"]) == (40, 40)


async def test_no_retry_during_a_cancellation(
    api: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def cancel_none(*_: object) -> bool:
        return False

    monkeypatch.setattr(JobKeeper, "_cancel_some", cancel_none)
    job = await new_job(api)
    await send_rows(api, [row(job, "a")])
    await act(api, job, "cancel")
    answer = await api.client.post(f"/jobs/{job['id']}/retry")
    assert_problem(answer, 409, "conflict")
    monkeypatch.undo()
    await until_ended(api, job)
    assert (await act(api, job, "retry"))["retried"] == 1


async def test_a_retry_that_waits_for_another_one_and_its_cancellation_is_refused(
    api: Service, connection: asyncpg.Connection
) -> None:
    job = await new_job(api)
    await send_rows(api, [row(job, "a")])
    await act(api, job, "cancel")
    await until_ended(api, job)
    async with connection.transaction():
        await connection.execute("SELECT FROM jobs WHERE id = $1 FOR UPDATE", job["id"])
        retry = asyncio.create_task(api.client.post(f"/jobs/{job['id']}/retry"))
        blocked = """SELECT pid FROM pg_stat_activity
          WHERE datname = current_database() AND wait_event_type = 'Lock'"""
        await until(lambda: api.services.database.fetch(blocked))
        assert not retry.done()
        # The row runs again, and is cancelled again.
        await connection.execute(
            "UPDATE job_rows SET place = NULL, ended_as = NULL WHERE job_id = $1", job["id"]
        )
    assert_problem(await retry, 409, "conflict")


@pytest.mark.parametrize(
    ("body", "field"),
    [({"limit": 0}, "limit"), ({"limit": 201}, "limit"), ({"after": -1}, "after"), ({"x": 1}, "x")],
)
async def test_a_retry_is_bounded(api: Service, body: dict[str, int], field: str) -> None:
    job = await new_job(api)
    answer = await api.client.post(f"/jobs/{job['id']}/retry", json=body)
    assert_problem(answer, 422, "invalid_request", field)


async def test_a_job_is_deleted_once_it_has_ended(
    api: Service, connection: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_MAX_REMOVED", 10)
    job = await new_job(api, key="k")
    sent = await send_rows(api, [row(job, str(place)) for place in range(25)])
    assert_problem(await api.client.delete(f"/jobs/{job['id']}"), 409, "conflict")
    await act(api, job, "cancel")
    await until_ended(api, job)
    assert (await api.client.delete(f"/jobs/{job['id']}")).status_code == 204
    assert_problem(await api.client.get(f"/jobs/{job['id']}"), 404, "not_found")
    (refused,) = await send_rows(api, [row(job, "0")])
    assert refused["code"] == "not_found"
    assert (await new_job(api, key="k"))["id"] != job["id"]
    assert (await api.client.get(f"/results/{sent[0]['id']}")).status_code == 200

    async def is_removed() -> bool:
        count = await connection.fetchval("SELECT count(*) FROM job_rows")
        return bool(count == 0) and not await connection.fetchval(
            "SELECT count(*) FROM jobs WHERE deleted_at IS NOT NULL"
        )

    await until(is_removed)


async def test_results_of_a_removed_job_still_end(
    api: Service, connection: asyncpg.Connection
) -> None:
    """Its results may run when it is removed, by hand or by a retention of a few seconds."""
    job = await new_job(api)
    (sent,) = await send_rows(api, [row(job, "a")])
    await connection.execute("DELETE FROM job_rows")
    await connection.execute("DELETE FROM jobs")
    cancelled = await api.client.post(f"/results/{sent['id']}/cancel")
    assert cancelled.json()["state"] == "failed"

    async def is_dismissed() -> bool:
        return bool(await connection.fetchval("SELECT count(*) = 0 FROM job_events"))

    await until(is_dismissed)


async def test_teams_have_jobs_of_their_own(guarded: Settings) -> None:
    red, blue = (bearer(sign({"team_id": team, "token_id": "t"})) for team in ("red", "blue"))
    async with run_service(guarded, with_worker=False) as api:
        job = await new_job(api, red, key="k", name="secret")
        (sent,) = await send_rows(api, [row(job, "a")], red)
        (known,) = await send_rows(api, [row(job, "a")], red)
        assert known["id"] == sent["id"]
        # The process knows the job by now: another team is refused all the same.
        for key in ("a", "b"):
            (refused,) = await send_rows(api, [row(job, key)], blue)
            assert (refused["status"], refused["code"]) == (404, "not_found")
            assert job["name"] not in str(refused)
        for method, path in (
            ("GET", ""), ("GET", "/results"), ("POST", "/close"), ("POST", "/cancel"),
            ("POST", "/open"), ("POST", "/retry"), ("DELETE", ""),
        ):  # fmt: skip
            answer = await api.client.request(method, f"/jobs/{job['id']}{path}", headers=blue)
            assert_problem(answer, 404, "not_found")
        assert (await api.client.get("/jobs", headers=blue)).json() == []
        assert (await new_job(api, blue, key="k"))["id"] != job["id"]
        found = await read_job(api, job, red)
        assert (found["state"], found["counts"]["rows"]) == ("open", 1)


async def test_a_row_has_at_most_the_priority_of_its_token(guarded: Settings) -> None:
    high = bearer(sign({"team_id": "red", "token_id": "h", "max_priority": 5}))
    low = bearer(sign({"team_id": "red", "token_id": "l", "max_priority": 2}))
    async with run_service(guarded, with_worker=False) as api:
        job = await new_job(api, high, priority=5)
        await send_rows(api, [row(job, "high")], high)
        await send_rows(api, [row(job, "low")], low)
        rows = await api.services.database.fetch("SELECT priority FROM results ORDER BY id")
        assert [one["priority"] for one in rows] == [5, 2]
        refused = await api.client.post("/jobs", json={"priority": 3}, headers=low)
        assert_problem(refused, 422, "invalid_request", "priority")
