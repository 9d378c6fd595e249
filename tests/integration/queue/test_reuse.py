"""Exact reuse in the queue: which results answer an equal one, and what stays as it was."""

import asyncio
from typing import Any
from uuid import UUID

import pytest

from app.queue import reuse
from app.queue.enqueue import NewResult
from app.queue.finish import AttemptOutcome
from tests.integration.queue.queue_bench import MODEL, REFUSED, Bench, ended, make_result
from tests.integration.support import until

DIGEST = b"digest"
ANSWER: dict[str, Any] = {
    "output": "an answer", "finish_reason": "length", "prompt_tokens": 5, "completion_tokens": 2,
    "logprobs": [b'{"7": {"logprob": -0.5}}'], "prompt_logprobs": '[null, {"9": {}}]',
    "model_version": 3,
}  # fmt: skip


def equal(**members: Any) -> NewResult:
    return make_result(**{"reuse_digest": DIGEST, "model_version": 3} | members)


async def add_source(bench: Bench, **members: Any) -> UUID:
    """A result that an attempt has completed, and may be a source."""
    source = equal(**members)
    await bench.queue.enqueue([source])
    worker = await bench.worker()
    (claim,) = await bench.claim(worker)
    assert await bench.end(worker, ended(claim, **ANSWER)) == [True]
    return source.id


async def send(bench: Bench, *results: NewResult) -> list[Any]:
    """Enqueue results; their rows."""
    assert all(await bench.queue.enqueue(results))
    return [await bench.row(one.id) for one in results]


async def test_an_equal_result_has_the_answer_at_once(bench: Bench) -> None:
    source = await add_source(bench)
    (row,) = await send(bench, equal(webhook_url="https://example.org/"))
    original = await bench.row(source)
    assert row["reused_from"] == source
    assert row["state"] == "completed"
    for name in ("output", "finish_reason", "prompt_tokens", "completion_tokens", "logprobs",
                 "prompt_logprobs", "model_version"):  # fmt: skip
        assert row[name] == original[name], name
    assert (row["attempt"], row["worker_id"], row["started_at"]) == (0, None, None)
    assert row["attempt_history"] == "[]"
    of_result = "SELECT count(*) FROM {} WHERE result_id = $1"
    for table in ("webhook_deliveries", "undigested_results"):
        assert await bench.connection.fetchval(of_result.format(table), row["id"]) == 1
    assert await bench.claim(await bench.worker()) == []


@pytest.mark.parametrize(
    "members",
    [{"team_id": "other"}, {"model_version": 4}, {"reuse_digest": b"other"}, {"reuse_digest": None}],
)  # fmt: skip
async def test_an_unequal_result_runs(bench: Bench, members: dict[str, Any]) -> None:
    await add_source(bench)
    context: dict[str, Any] = {}
    if "team_id" in members:  # its context is its own
        new = make_result().new_context
        assert new is not None
        context = {"new_context": type(new)(new.id, "other", "a prompt", None, "{}")}
        context |= {"context_id": new.id}
    (row,) = await send(bench, equal(**members | context))
    assert (row["state"], row["reused_from"]) == ("pending", None)
    assert len(await bench.claim(await bench.worker())) == 1


@pytest.mark.parametrize(
    "change",
    [
        "DELETE FROM results WHERE id = $1",
        "UPDATE results SET erased_at = now(), output = NULL WHERE id = $1",
        "UPDATE results SET store = false WHERE id = $1",
        # A reused result answers no other: its own source may have been deleted.
        "UPDATE results SET reused_from = gen_random_uuid() WHERE id = $1",
        # Retention has erased its prompt, and keeps the answer.
        "UPDATE contexts SET erased_at = now() FROM results r WHERE r.id = $1 AND contexts.id = r.context_id",
    ],
)
async def test_a_source_that_is_gone_answers_nothing(bench: Bench, change: str) -> None:
    source = await add_source(bench)
    await bench.connection.execute(change, source)
    (row,) = await send(bench, equal())
    assert (row["state"], row["reused_from"]) == ("pending", None)


async def test_a_result_that_runs_meanwhile_is_not_ended_by_an_equal_one(bench: Bench) -> None:
    """Its first commit was lost and is sent again, and a worker claims it at the same time."""
    source = await add_source(bench, reuse_digest=b"later")
    new, worker = equal(), await bench.worker()
    await bench.queue.enqueue([new])
    await bench.connection.execute(
        "UPDATE results SET reuse_digest = $2 WHERE id = $1", source, DIGEST
    )
    async with bench.database.connection() as other:
        async with bench.connection.transaction():
            await bench.connection.execute(
                "UPDATE results SET worker_id = $2, attempt = 1, started_at = now() WHERE id = $1",
                *(new.id, worker),
            )
            sending = asyncio.create_task(other.fetch(reuse._COMPLETE, [new.id]))
            waits = "SELECT count(*) FROM pg_locks WHERE NOT granted"
            await until(lambda: bench.connection.fetchval(waits))
        await sending
    row = await bench.row(new.id)
    assert (row["state"], row["worker_id"], row["reused_from"]) == ("pending", worker, None)


async def test_failed_cancelled_and_pending_results_answer_nothing(bench: Bench) -> None:
    failed, cancelled, pending = equal(), equal(), equal()
    worker = await bench.worker()
    await bench.queue.enqueue([failed])
    (claim,) = await bench.claim(worker)
    await bench.end(worker, ended(claim, AttemptOutcome.FAILED, failure=REFUSED))
    await bench.queue.enqueue([cancelled])
    assert await bench.queue.cancel("default", id=cancelled.id) == 1
    await bench.queue.enqueue([pending])
    (row,) = await send(bench, equal())
    assert (row["state"], row["reused_from"]) == ("pending", None)


async def test_the_newest_source_answers_and_keeps_doing_so(bench: Bench) -> None:
    older = await add_source(bench)
    newer = equal()
    await bench.connection.execute("UPDATE results SET reuse_digest = 'x' WHERE id = $1", older)
    await send(bench, newer)
    worker = await bench.worker()
    (claim,) = await bench.claim(worker)
    await bench.end(worker, ended(claim, **ANSWER))
    await bench.connection.execute(
        "UPDATE results SET reuse_digest = $2 WHERE id = $1", older, DIGEST
    )
    for _ in range(2):
        (row,) = await send(bench, equal())
        assert row["reused_from"] == newer.id
    await bench.connection.execute("DELETE FROM results WHERE id = $1", newer.id)
    (row,) = await send(bench, equal())
    assert row["reused_from"] == older


async def test_others_of_the_same_send_wait_for_a_worker(bench: Bench) -> None:
    source = await add_source(bench)
    reused, other, plain = await send(bench, equal(), equal(reuse_digest=b"other"), make_result())
    assert [row["reused_from"] for row in (reused, other, plain)] == [source, None, None]
    claims = await bench.claim(await bench.worker())
    assert {claim.id for claim in claims} == {other["id"], plain["id"]}


async def test_equal_results_at_once_all_run(bench: Bench) -> None:
    results = [equal() for _ in range(8)]
    stored = await asyncio.gather(*(bench.queue.enqueue([one]) for one in results))
    assert stored == [[True]] * 8
    worker = await bench.worker()
    claims = await bench.claim(worker)
    assert len(claims) == 8
    assert await bench.end(worker, *(ended(claim, **ANSWER) for claim in claims)) == [True] * 8
    (row,) = await send(bench, equal())
    assert row["reused_from"] in {one.id for one in results}


async def test_a_lost_attempt_is_as_that_of_any_other_result(bench: Bench) -> None:
    result, worker = equal(), await bench.worker()
    await bench.queue.enqueue([result])
    row = await bench.lose(worker, result.id)
    assert (row["state"], row["lost_attempts"], row["reused_from"]) == ("pending", 1, None)
    await bench.fast_forward()
    (claim,) = await bench.claim(worker)
    assert await bench.end(worker, ended(claim, **ANSWER)) == [True]
    (row,) = await send(bench, equal())
    assert row["reused_from"] == result.id


async def test_a_send_that_is_repeated_after_a_lost_connection_changes_nothing(
    bench: Bench,
) -> None:
    source = await add_source(bench)
    results = [equal(), equal(reuse_digest=b"other")]
    found = []
    for resent in (False, True):
        async with bench.database.connection() as connection:
            assert await reuse.enqueue_reused(connection, results, resent) == [True, True]
        found.append([dict(await bench.row(one.id)) for one in results])
    assert found[0] == found[1]
    assert [row["reused_from"] for row in found[0]] == [source, None]


async def test_sends_without_reuse_have_no_further_statement(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    run, submit = bench.database.run, bench.queue._reuses.submit_all

    async def counted_run(*arguments: Any) -> Any:
        calls.append("run")
        return await run(*arguments)

    async def counted_submit(*arguments: Any) -> Any:
        calls.append("submit")
        return await submit(*arguments)

    monkeypatch.setattr(bench.database, "run", counted_run)
    monkeypatch.setattr(bench.queue._reuses, "submit_all", counted_submit)
    await bench.queue.enqueue([make_result()])
    assert calls == []
    await bench.queue.enqueue([equal()])
    assert calls == ["run"]
    worker = await bench.worker()
    claims = await bench.claim(worker, model=MODEL)
    await bench.end(worker, *(ended(claim, **ANSWER) for claim in claims))
    calls.clear()
    await bench.queue.enqueue([equal()])
    assert calls == ["run", "submit"]
