"""GET /jobs/{id}?wait=: the response comes with the end, by a notification."""

import asyncio
import time
from typing import Any
from uuid import UUID

import pytest

from app.core.listener import ENDED
from app.results.jobs.rows import Job
from tests.conftest import Service
from tests.integration.results.jobs.support import act, new_job, row, send_rows, until_ended
from tests.integration.support import UNKNOWN_ID, assert_problem, until

pytestmark = pytest.mark.timeout(120)


class Reads:
    """The reads of jobs by the API."""

    def __init__(self, service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        store = service.services.jobs
        original = store.get

        async def get(team_id: str, job_id: UUID) -> Job:
            self.count += 1
            return await original(team_id, job_id)

        monkeypatch.setattr(store, "get", get)


async def wait_for(service: Service, job: dict[str, Any], seconds: float) -> dict[str, Any]:
    answer = await service.client.get(f"/jobs/{job['id']}", params={"wait": seconds})
    assert answer.status_code == 200, answer.text
    read: dict[str, Any] = answer.json()
    return read


@pytest.mark.trial
async def test_the_end_is_notified(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    job = await new_job(service)
    await send_rows(service, [row(job, "a", "{{delay_ms=500 chunks=3}}")])
    await act(service, job, "close")
    reads = Reads(service, monkeypatch)
    waiting = [asyncio.create_task(wait_for(service, job, 60)) for _ in range(3)]
    ended = await asyncio.gather(*waiting)
    assert [one["state"] for one in ended] == ["ended"] * 3
    assert ended[0]["counts"] == {"rows": 1, "pending": 0, "completed": 1, "failed": 0}
    # One read at the beginning and one at the end: a notification of another kind may add one.
    assert reads.count <= 9
    assert (await wait_for(service, job, 60))["state"] == "ended"  # at once


async def test_an_open_job_is_returned_as_it_is(service: Service) -> None:
    job = await new_job(service)
    began = time.monotonic()
    assert (await wait_for(service, job, 0.5))["state"] == "open"
    assert time.monotonic() - began >= 0.5


async def test_a_second_end_after_a_retry(service: Service) -> None:
    job = await new_job(service)
    await send_rows(service, [row(job, "a", "{{fail_at=1}}")])
    await act(service, job, "close")
    first = await until_ended(service, job)
    assert (await act(service, job, "retry"))["retried"] == 1
    again = await wait_for(service, job, 60)
    assert (again["state"], again["ended_at"] > first["ended_at"]) == ("ended", True)


@pytest.mark.trial
async def test_very_many_ends_at_once_wake_all(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    received: list[str] = []
    service.services.listener._handlers[ENDED].append(received.append)
    jobs = [await new_job(service) for _ in range(201)]
    waiting = asyncio.create_task(wait_for(service, jobs[-1], 60))
    await until(lambda: asyncio.sleep(0, service.services.hub._waiters.count == 1))
    await service.services.database.fetch(
        """WITH closed AS (UPDATE jobs SET closed_at = now() RETURNING id)
           INSERT INTO job_events (job_id, rows) SELECT id, 0 FROM closed"""
    )
    assert (await waiting)["state"] == "ended"

    async def is_notified() -> bool:
        return "" in received

    await until(is_notified)


async def test_what_is_refused(api: Service) -> None:
    job = await new_job(api)
    for wrong in ("-1", "61", "x", "nan"):
        answer = await api.client.get(f"/jobs/{job['id']}", params={"wait": wrong})
        assert_problem(answer, 422, "invalid_request")
    assert_problem(await api.client.get(f"/jobs/{UNKNOWN_ID}?wait=5"), 404, "not_found")
