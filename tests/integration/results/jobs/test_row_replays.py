"""Rows that are sent again: found by their keys, without the texts of their results."""

import asyncpg

from app.core.settings import Settings
from tests.conftest import run_service
from tests.integration.results.jobs.support import act, new_job, row, send_rows


async def test_rows_that_are_sent_again_take_no_memory_for_their_texts(
    settings: Settings, connection: asyncpg.Connection
) -> None:
    """Their texts are more than the process holds."""
    narrow = settings.model_copy(update={"max_bytes_in_flight": 64 * 2**20})
    async with run_service(narrow, with_worker=False) as api:
        job = await new_job(api)
        rows = [row(job, f"k{place}") for place in range(20)]
        sent = await send_rows(api, rows)
        await api.client.post(f"/results/{sent[1]['id']}/cancel")
        await connection.execute("UPDATE results SET output = repeat('x', 500000)")
        await act(api, job, "close")
        again = await send_rows(api, [*rows, row(job, "new")])
        assert [one.get("code") for one in again] == [None] * 20 + ["job_closed"]
        assert again[:-1] == [
            {
                "id": one["id"],
                "state": "failed" if place == 1 else "pending",
                "job_id": job["id"],
                "job_key": f"k{place}",
            }
            for place, one in enumerate(sent)
        ]
        keyed = [
            {"model": "scripted", "content": "x", "idempotency_key": f"k{place}"}
            for place in range(20)
        ]
        # Those of idempotency keys have their texts, or the id to read them by.
        stored = await send_rows(api, keyed)
        await connection.execute("UPDATE results SET output = repeat('x', 500000)")
        repeated = await send_rows(api, keyed)
        assert [one.get("result_id", one.get("id")) for one in repeated] == [
            one["id"] for one in stored
        ]
        assert "memory_busy" in {one.get("code") for one in repeated}
        # Alone, a row is its whole result.
        (alone,) = [await api.client.post("/results/", json=rows[0])]
        assert alone.headers["idempotent-replayed"] == "true"
        assert alone.json()["result"] == "x" * 500_000
