"""Webhooks of jobs: one delivery for each end, committed with it."""

from typing import Any

import asyncpg
import pytest

from app.core.settings import Settings
from app.results.jobs import progress
from app.results.jobs.progress import JobKeeper
from tests.conftest import Service
from tests.integration.queue.queue_bench import open_bench
from tests.integration.results.jobs.support import act, new_job, row, send_rows, until_ended
from tests.integration.results.jobs.test_job_progress import Jobs
from tests.integration.support import until
from tests.integration.webhook_receiver import receiving

URL = "https://example.org/hook"


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(
        update={"webhook_allow_private": True, "webhook_timeout_seconds": 2.0}
    )


async def delivery_of(service: Service, job: dict[str, Any], calls: int) -> dict[str, Any]:
    """The one delivery of a job, after so many calls."""

    async def is_delivered() -> dict[str, Any] | None:
        (found,) = (await service.client.get("/webhooks/deliveries")).json()
        return found if found["state"] == "delivered" and len(found["log"]) == calls else None

    delivery: dict[str, Any] = await until(is_delivered)
    assert (delivery["id"], delivery["job_id"], delivery["result_id"]) == (
        job["id"],
        job["id"],
        None,
    )
    return delivery


async def test_a_job_is_delivered_at_each_of_its_ends(service: Service) -> None:
    async with receiving() as receiver:
        job = await new_job(service, webhook_url=receiver.url)
        await send_rows(service, [row(job, "a"), row(job, "b", "{{fail_at=1}}")])
        await act(service, job, "close")
        ended = await until_ended(service, job)
        await delivery_of(service, job, 1)
        assert (await act(service, job, "retry"))["retried"] == 1
        again = await until_ended(service, job)
        await delivery_of(service, job, 2)
        path = f"/webhooks/deliveries/{job['id']}/redeliver"
        assert (await service.client.post(path)).status_code == 202
        await delivery_of(service, job, 3)
        secret = (await service.client.get("/webhooks/secret")).json()["secret"]
        events = [call.verify(secret) for call in receiver.calls]
    assert [event["type"] for event in events] == ["job.ended"] * 3
    assert [event["data"] for event in events] == [ended, again, again]
    assert events[0]["timestamp"] == ended["ended_at"]
    first, second, third = (call.id for call in receiver.calls)
    assert first != second == third


async def test_a_job_without_a_webhook_has_no_delivery(
    api: Service, connection: asyncpg.Connection
) -> None:
    job = await new_job(api)
    await act(api, job, "close")
    await until_ended(api, job)
    assert await connection.fetchval("SELECT count(*) FROM webhook_deliveries") == 0


async def test_an_end_and_its_delivery_are_committed_together(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_bench(settings) as bench:
        jobs = Jobs(bench, settings)
        job = await jobs.create(webhook_url=URL)
        await jobs.store.close("default", job)
        count = "SELECT count(*) FROM webhook_deliveries"
        monkeypatch.setattr(
            progress, "_END", progress._END.replace("SELECT CASE", "SELECT 1 / 0, CASE")
        )
        with pytest.raises(asyncpg.DivisionByZeroError):
            await jobs.keep()
        assert (await jobs.get(job)).ended_at is None
        assert await bench.connection.fetchval(count) == 0
        monkeypatch.undo()
        for _ in range(3):
            await JobKeeper(bench.database).step()
        assert (await jobs.get(job)).state == "ended"
        assert await bench.connection.fetchval(count) == 1
        await jobs.store.delete("default", job)
        await jobs.keep()
        assert await bench.connection.fetchval(count) == 0
