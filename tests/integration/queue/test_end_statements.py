"""Ends by each form of their statement: alone, beside others, and beside some that are requeued."""

from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from asyncpg import Record

from app.queue.claim import Claim
from app.queue.finish import AttemptEnd, AttemptOutcome
from tests.integration.queue.dispatcher import Dispatcher
from tests.integration.queue.queue_bench import REFUSED, Bench, ended
from tests.integration.queue.schedules.works import WEBHOOK, lost

COMPLETED, FAILED = AttemptOutcome.COMPLETED, AttemptOutcome.FAILED
# Members that differ between two results of the same request.
OWN = {"id", "context_id", "started_at", "first_token_at", "finished_at", "fair_key"} | {
    "worker_id", "deadline_at", "expires_at", "cancel_requested_at",
}  # fmt: skip


@pytest.fixture(params=["alone", "beside an end", "beside a requeued one", "attributed"])
def company(request: pytest.FixtureRequest) -> str:
    """The other work of the statement."""
    name: str = request.param
    return name


async def end_in(
    company: str, bench: Bench, claim: Claim, worker: Any, end: AttemptEnd, by: Any = None
) -> bool:
    """End an attempt of `worker`, as `by` sends it."""
    ends = [end]
    if company.startswith("beside"):
        await bench.add(model_name="other")
        other, *_ = await bench.claim(worker, model="other")
        ends = [ended(other) if company == "beside an end" else lost(other), end]
    elif company == "attributed":
        ends = [replace(end, has_attribution=True)]
    return (await bench.end(by or worker, *ends))[-1]


@pytest.mark.parametrize("is_cancelled", [False, True])
@pytest.mark.parametrize("outcome", [COMPLETED, FAILED])
async def test_all_statements_write_the_same(
    bench: Bench, outcome: AttemptOutcome, is_cancelled: bool
) -> None:
    failure = None if outcome is COMPLETED else REFUSED
    members: dict[str, Any] = {
        "failure": failure, "prompt_tokens": 7, "logprobs": (b"1", b"2"), "model_version": 4,
        "first_token_seconds": 0.25, "continued_from": 3, "continued": True,
    }  # fmt: skip
    rows = []
    for company in ("alone", "beside an end", "beside a requeued one", "attributed"):
        worker = await bench.worker()
        (identifier,) = await bench.add(retain_seconds=60.0)
        (claim,) = await bench.claim(worker)
        if is_cancelled:
            await bench.queue.cancel("default", id=identifier)
        end = ended(claim, outcome, **members)
        assert await end_in(company, bench, claim, worker, end)
        row = await bench.row(identifier)
        assert row["first_token_at"] == row["started_at"] + timedelta(seconds=0.25)
        assert abs(row["expires_at"] - row["finished_at"] - timedelta(minutes=1)) < timedelta(
            seconds=1
        )
        assert row["worker_id"] == worker
        rows.append({name: value for name, value in row.items() if name not in OWN})
        rows[-1]["attempt_history"] = len(rows[-1]["attempt_history"]) > 2
    state = "failed" if is_cancelled or failure else "completed"
    code = "cancelled" if is_cancelled else failure and failure.code
    assert (rows[0]["state"], rows[0]["error_code"]) == (state, code)
    assert (rows[0]["output"], rows[0]["logprobs"]) == ("text", "[1, 2]")
    assert all(row == rows[0] for row in rows)


async def test_each_statement_ends_only_the_attempt_of_its_worker(
    bench: Bench, company: str
) -> None:
    worker, other = await bench.worker(), await bench.worker()
    (identifier,) = await bench.add()
    (claim,) = await bench.claim(worker)
    end = ended(claim)
    assert not await end_in(company, bench, claim, worker, replace(end, attempt=2))
    assert not await end_in(company, bench, claim, worker, end, by=other)
    assert (await bench.row(identifier))["state"] == "pending"
    assert await end_in(company, bench, claim, worker, end)
    assert not await end_in(company, bench, claim, worker, replace(end, output="again"))
    assert (await bench.row(identifier))["output"] == "text"


async def test_each_statement_inserts_the_delivery_of_a_webhook(bench: Bench, company: str) -> None:
    worker = await bench.worker()
    (identifier,) = await bench.add(webhook_url=WEBHOOK)
    (claim,) = await bench.claim(worker)
    assert claim.has_webhook
    assert await end_in(company, bench, claim, worker, ended(claim, has_webhook=True))
    deliveries = await bench.connection.fetch("SELECT result_id, url FROM webhook_deliveries")
    assert [tuple(row) for row in deliveries] == [(identifier, WEBHOOK)]
    await bench.add()
    (claim,) = await bench.claim(worker)
    assert not claim.has_webhook


async def test_a_result_that_starts_as_it_is_stored_keeps_its_webhook(bench: Bench) -> None:
    bench.queue.dispatcher = dispatcher = Dispatcher(await bench.worker())
    await bench.add(webhook_url=WEBHOOK)
    await bench.add()
    assert [claim.has_webhook for claim in dispatcher.started] == [True, False]


class Waiters:
    """Readers that wait for all results."""

    def __init__(self) -> None:
        self.rows: list[Record] = []

    def awaits(self, _result_id: UUID) -> bool:
        return True

    def deliver(self, row: Record) -> None:
        self.rows.append(row)


async def test_one_row_alone_has_the_ids_of_all(bench: Bench) -> None:
    """Each row is read in full by this process: with all ids in each, 200 took 17 ms."""
    ids = await bench.add(3)
    worker = await bench.worker()
    ends = [ended(claim) for claim in await bench.claim(worker)]
    waiters = Waiters()
    assert await bench.queue.end_batcher(worker, 5.0, waiters).submit_all(ends) == [True] * 3
    assert sorted(row["id"] for row in waiters.rows) == sorted(ids)
    first, *others = [row["ids"] for row in waiters.rows]
    assert (sorted(first), others) == (sorted(ids), [None, None])
