"""The queue on real PostgreSQL: every transition with its guard."""

import asyncio
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any
from uuid import UUID

import asyncpg
import orjson
import pytest

from app.core.database import Connection, Database
from app.core.errors import CANCELLED, Failure, FailureCode
from app.core.ids import new_id
from app.core.listener import CANCELLED as CANCELLED_CHANNEL, ENDED, ENQUEUED
from app.core.settings import Settings
from app.queue.claim import owned_results
from app.queue.enqueue import NewContext
from app.queue.finish import AttemptOutcome
from app.queue.idempotency import IdempotencyKeys
from app.queue.job_queue import JobQueue
from app.queue.terminal_state import MAX_BATCH
from app.results.contexts import ContextStore
from app.results.rows import ResultRow
from app.results.store import ResultStore
from tests.claims import claim_all
from tests.conftest import connect, make_settings
from tests.integration.queue.queue_bench import (
    LOST,
    MAX_ATTEMPTS,
    MODEL,
    REFUSED,
    Bench,
    chunk,
    ended,
    keyed,
    make_result,
)
from tests.integration.support import until
from tests.postgres import PostgresServer

# --- enqueue ----------------------------------------------------------------------------------------


async def test_enqueue_stores_what_was_asked(bench: Bench) -> None:
    group = new_id()
    (identifier,) = await bench.add(
        priority=-3, metadata='{"a": 1}', group_id=group, model_version=4, prompt="rendered"
    )
    row = await bench.row(identifier)
    assert (row["state"], row["attempt"], row["worker_id"]) == ("pending", 0, None)
    assert (row["priority"], row["model_version"], row["prompt"]) == (-3, 4, "rendered")
    assert (row["team_id"], row["kind"], row["group_id"]) == ("default", "generation", group)
    left = await bench.connection.fetchval(
        "SELECT extract(epoch FROM deadline_at - now()) FROM results"
    )
    assert 3590 < left <= 3600


async def test_enqueue_of_a_missing_context_is_told_and_stores_nothing(bench: Bench) -> None:
    good = make_result()
    other_team = replace(make_result(), team_id="other", context_id=good.context_id)
    answers = await bench.queue.enqueue([make_result(new_context=None, context_id=new_id()), good])
    assert answers == [False, True]
    other_team = replace(other_team, new_context=None)
    assert await bench.queue.enqueue([other_team]) == [False]
    missing = make_result(new_context=None, context_id=new_id())
    assert await bench.queue.enqueue([missing]) == [False]
    await bench.connection.execute("UPDATE contexts SET content = '', erased_at = now()")
    assert await bench.queue.enqueue([replace(good, id=new_id(), new_context=None)]) == [False]
    assert await bench.connection.fetchval("SELECT count(*) FROM results") == 1


async def test_enqueue_of_unrendered_messages_stores_nothing(bench: Bench) -> None:
    chat = NewContext(new_id(), "default", None, '[{"role": "user", "content": "x"}]', "{}")
    first = make_result(new_context=chat, context_id=chat.id, prompt="rendered")
    assert await bench.queue.enqueue([first]) == [True]
    saved = make_result(new_context=None, context_id=chat.id)
    assert await bench.queue.enqueue([saved]) == [False]
    assert await bench.queue.enqueue([replace(saved, prompt="rendered")]) == [True]


async def test_enqueue_twice_is_one_row(bench: Bench) -> None:
    result = make_result()
    await bench.queue.enqueue([result])
    await bench.queue.enqueue([result])
    assert await bench.connection.fetchval("SELECT count(*) FROM results") == 1
    assert await bench.connection.fetchval("SELECT count(*) FROM contexts") == 1


async def test_enqueue_survives_a_connection_lost_at_commit(bench: Bench) -> None:
    """Its row is there already when the statement is sent again: still reported as stored."""
    result = make_result()
    assert await bench.queue.enqueue([result]) == [True]
    lane = bench.queue._enqueues
    async with bench.database.connection() as connection:
        assert await lane._statement(connection, [result], True) == [True]
        assert await lane._statement(connection, [result], False) == [False]


async def key_owners(bench: Bench) -> dict[str, UUID]:
    rows = await bench.connection.fetch("SELECT key, result_id FROM idempotency_keys")
    return {row["key"]: row["result_id"] for row in rows}


async def test_enqueue_with_keys_beside_others(bench: Bench) -> None:
    """The first row of a key is stored with it; the others leave nothing, not even a context."""
    first, second = keyed("a"), keyed("a")
    plain = [make_result() for _ in range(3)]
    other_team = replace(
        keyed("a"), team_id="other", new_context=NewContext(new_id(), "other", "x", None, "{}")
    )
    assert other_team.new_context is not None
    other_team = replace(other_team, context_id=other_team.new_context.id)
    batch = [plain[0], first, plain[1], second, other_team, plain[2], keyed("b")]
    assert await bench.queue.enqueue(batch) == [True, True, True, False, True, True, True]
    assert await bench.queue.enqueue([keyed("b"), make_result(), keyed("c")]) == [False, True, True]
    owners = await bench.connection.fetch(
        "SELECT team_id, result_id FROM idempotency_keys WHERE key = 'a' ORDER BY team_id"
    )
    assert [tuple(row) for row in owners] == [("default", first.id), ("other", other_team.id)]
    assert await bench.connection.fetchval("SELECT count(*) FROM results") == 8
    assert await bench.connection.fetchval("SELECT count(*) FROM contexts") == 8


async def test_enqueue_takes_an_expired_key_over(bench: Bench) -> None:
    first, second, third = keyed("a", seconds=0.0), keyed("a"), keyed("a")
    assert await bench.queue.enqueue([first]) == [True]
    assert await bench.queue.enqueue([second]) == [True]
    assert await key_owners(bench) == {"a": second.id}
    assert await bench.queue.enqueue([third]) == [False]


async def test_enqueue_without_its_context_takes_no_key(bench: Bench) -> None:
    chat = NewContext(new_id(), "default", None, '[{"role": "user", "content": "x"}]', "{}")
    await bench.queue.enqueue([make_result(new_context=chat, context_id=chat.id, prompt="p")])
    missing = keyed("a", new_context=None, context_id=new_id())
    unrendered = keyed("b", new_context=None, context_id=chat.id)
    late = keyed("a")
    assert await bench.queue.enqueue([missing, unrendered, late]) == [False, False, True]
    assert await key_owners(bench) == {"a": late.id}
    assert await bench.queue.enqueue([replace(unrendered, prompt="p")]) == [True]


async def test_enqueue_with_a_key_survives_a_connection_lost_at_commit(bench: Bench) -> None:
    """Sent again, it meets its own key: stored. So it is if the key expired, or is another's now."""
    lane = bench.queue._enqueues
    for seconds, taker in ((60.0, None), (0.0, None), (0.0, keyed("a"))):
        mine, plain = keyed("a", seconds), make_result()
        async with bench.database.connection() as connection:
            assert await lane._statement(connection, [mine, plain], False) == [True, True]
            if taker:
                assert await lane._statement(connection, [taker], False) == [True]
            assert await lane._statement(connection, [mine, plain], True) == [True, True]
        assert await key_owners(bench) == {"a": (taker or mine).id}
        await bench.connection.execute("DELETE FROM idempotency_keys")
    assert await bench.connection.fetchval("SELECT count(*) FROM results") == 7


async def test_two_queues_take_keys_in_opposite_orders(bench: Bench) -> None:
    """Two processes, each batch with the same keys the other way round: one winner each."""
    other = JobQueue(bench.database, bench.settings)
    for number in range(20):
        keys = [f"{number} {n}" for n in range(50)]
        one, two = [keyed(key) for key in keys], [keyed(key) for key in reversed(keys)]
        answers = await asyncio.gather(bench.queue.enqueue(one), other.enqueue(two))
        assert [won != lost for won, lost in zip(answers[0], answers[1][::-1], strict=True)] == [
            True
        ] * 50
    assert await bench.connection.fetchval("SELECT count(*) FROM results") == 1000
    deadlocks = await bench.connection.fetchval(
        "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
    )
    assert deadlocks == 0


async def test_enqueue_tells_the_models(bench: Bench) -> None:
    noted: asyncio.Queue[str] = asyncio.Queue()
    await bench.connection.add_listener(ENQUEUED, lambda *event: noted.put_nowait(event[-1]))
    await bench.queue.enqueue([make_result(model_name=name) for name in ("b", "a", "a")])
    assert await asyncio.wait_for(noted.get(), 30) == "a,b"


# --- claim ------------------------------------------------------------------------------------------


async def test_claim_marks_and_returns_what_it_took(bench: Bench) -> None:
    (identifier,) = await bench.add(prompt="rendered")
    worker = await bench.worker()
    (claim,) = await bench.claim(worker)
    assert claim.id == identifier
    assert (claim.attempt, claim.model_name, claim.prompt) == (1, MODEL, "rendered")
    assert claim.parameters == {"max_tokens": 3}
    assert 3590 < claim.seconds_left <= 3600
    assert not claim.is_suspect
    row = await bench.row(identifier)
    assert (row["worker_id"], row["attempt"], row["state"]) == (worker, 1, "pending")
    assert row["started_at"] is not None
    assert await bench.claim(worker) == []


async def test_claim_without_a_rendered_prompt_takes_the_contexts(bench: Bench) -> None:
    await bench.add()
    (claim,) = await bench.claim(await bench.worker())
    assert claim.prompt == "a prompt"


async def test_a_result_whose_context_is_gone_keeps_no_other_from_its_claim(bench: Bench) -> None:
    """No statement of the service makes one: the row was stored or changed by hand."""
    lost, kept = await bench.add(2, prompt=None)
    await bench.connection.execute(
        "UPDATE results SET context_id = $2 WHERE id = $1", lost, new_id()
    )
    assert [claim.id for claim in await bench.claim(await bench.worker())] == [kept]


@pytest.mark.parametrize("dead", ["unknown", "dead"])
async def test_only_live_workers_claim(bench: Bench, dead: str) -> None:
    await bench.add(2)
    worker = new_id() if dead == "unknown" else await bench.worker()
    await bench.connection.execute("UPDATE workers SET dead_at = now()")
    assert await bench.claim(worker) == []
    await bench.connection.execute("UPDATE results SET engine_deaths = 2")
    assert await bench.queue.claim_suspects(worker, [MODEL]) == []


async def test_claim_takes_no_more_than_asked_by_model(bench: Bench) -> None:
    await bench.add(5)
    await bench.add(5, model_name="n")
    await bench.add(5, model_name="o")
    claims = await claim_all(bench.queue, await bench.worker(), {MODEL: 2, "n": 9, "p": 3})
    assert sorted(claim.model_name for claim in claims) == [MODEL] * 2 + ["n"] * 5


async def test_claim_goes_by_priority_then_by_age(bench: Bench) -> None:
    (low,) = await bench.add(priority=-1)
    first, second = await bench.add(2)
    worker = await bench.worker()
    order = [(await bench.claim(worker, 1))[0].id for _ in range(3)]
    assert order == [first, second, low]


async def test_claim_waits_for_not_before(bench: Bench) -> None:
    (identifier,) = await bench.add()
    await bench.connection.execute("UPDATE results SET not_before = now() + interval '1 h'")
    worker = await bench.worker()
    assert await bench.claim(worker) == []
    await bench.connection.execute("UPDATE results SET not_before = now()")
    assert [claim.id for claim in await bench.claim(worker)] == [identifier]
    assert (await bench.row(identifier))["not_before"] is None


async def test_concurrent_claims_never_share_a_result(bench: Bench) -> None:
    identifiers = await bench.add(100)
    workers = [await bench.worker() for _ in range(5)]
    taken = await asyncio.gather(*(bench.claim(worker, 7) for worker in workers for _ in range(4)))
    claimed = [claim.id for claims in taken for claim in claims]
    assert len(claimed) == len(set(claimed)) == 100
    assert set(claimed) == set(identifiers)


# --- end --------------------------------------------------------------------------------------------


async def test_completion_writes_everything_once(bench: Bench) -> None:
    (identifier,) = await bench.add()
    worker = await bench.worker()
    (claim,) = await bench.claim(worker)
    end = ended(claim, prompt_tokens=5, logprobs=(b"1",), model_version=9, first_token_seconds=0.25)
    assert await bench.end(worker, end) == [True]
    row = await bench.row(identifier)
    assert (row["state"], row["output"], row["finish_reason"]) == ("completed", "text", "stop")
    assert (row["prompt_tokens"], row["completion_tokens"]) == (5, 2)
    assert (row["logprobs"], row["model_version"], row["error_code"]) == ("[1]", 9, None)
    assert (row["first_token_at"] - row["started_at"]).total_seconds() == 0.25
    assert row["finished_at"] >= row["started_at"]
    assert row["attempt_history"] == "[]"
    again = replace(end, output="other")
    assert await bench.end(worker, again) == [False]
    assert (await bench.row(identifier))["output"] == "text"


async def test_only_the_attempts_own_worker_ends_it(bench: Bench) -> None:
    (identifier,) = await bench.add()
    worker, other = await bench.worker(), await bench.worker()
    (claim,) = await bench.claim(worker)
    assert await bench.end(other, ended(claim)) == [False]
    assert await bench.end(worker, replace(ended(claim), attempt=2)) == [False]
    assert await bench.end(worker, replace(ended(claim), attempt=0)) == [False]
    assert await bench.end(worker, replace(ended(claim), result_id=new_id())) == [False]
    assert (await bench.row(identifier))["state"] == "pending"
    assert await bench.end(worker, ended(claim)) == [True]


async def test_an_old_attempt_of_the_same_worker_writes_nothing(bench: Bench) -> None:
    (identifier,) = await bench.add()
    worker = await bench.worker()
    (first,) = await bench.claim(worker)
    assert await bench.end(worker, ended(first, AttemptOutcome.RETURNED)) == [True]
    (second,) = await bench.claim(worker)
    assert second.attempt == 2
    assert await bench.end(worker, ended(first, output="old")) == [False]
    await bench.queue.append(worker, [chunk(first, 0, "old")])
    assert await bench.chunks(identifier) == 0
    assert await bench.end(worker, ended(second, output="new")) == [True]
    assert (await bench.row(identifier))["output"] == "new"


async def test_a_failure_keeps_its_text_and_history(bench: Bench) -> None:
    (identifier,) = await bench.add()
    worker = await bench.worker()
    (claim,) = await bench.claim(worker)
    end = ended(claim, AttemptOutcome.FAILED, failure=REFUSED, finish_reason=None)
    assert await bench.end(worker, end) == [True]
    row = await bench.row(identifier)
    assert (row["state"], row["finish_reason"], row["output"]) == ("failed", "error", "text")
    assert (row["error_code"], row["error_message"]) == ("invalid_request", "No.")
    assert row["error_retryable"] is False
    (entry,) = orjson.loads(row["attempt_history"])
    assert entry["error"] == {"code": "invalid_request", "message": "No."}
    assert (entry["attempt"], entry["worker_id"], entry["counted"]) == (1, str(worker), False)


async def test_a_returned_attempt_counts_for_nothing(bench: Bench) -> None:
    (identifier,) = await bench.add()
    worker = await bench.worker()
    for attempt in range(1, MAX_ATTEMPTS + 4):
        await bench.fast_forward()
        (claim,) = await bench.claim(worker)
        assert claim.attempt == attempt
        end = ended(claim, AttemptOutcome.RETURNED, failure=LOST, retry_after_seconds=100.0)
        assert await bench.end(worker, end) == [True]
    row = await bench.row(identifier)
    assert (row["state"], row["lost_attempts"], row["engine_deaths"]) == ("pending", 0, 0)
    assert (row["worker_id"], row["started_at"], row["output"]) == (None, None, None)
    assert row["not_before"] is not None
    assert await bench.claim(worker) == []


async def test_lost_attempts_are_counted_until_none_is_left(bench: Bench) -> None:
    """The engine died in each attempt, alone at the last: the request itself is to blame."""
    (identifier,) = await bench.add()
    worker = await bench.worker()
    first = await bench.lose(worker, identifier)
    assert (first["state"], first["lost_attempts"], first["engine_deaths"]) == ("pending", 1, 1)
    assert (first["output"], first["completion_tokens"], first["worker_id"]) == (None, None, None)
    await bench.lose(worker, identifier)
    last = await bench.lose(worker, identifier)
    assert (last["state"], last["error_code"]) == ("failed", "engine_crashed")
    assert last["error_retryable"] is False
    history = orjson.loads(last["attempt_history"])
    assert [entry["attempt"] for entry in history] == [1, 2, 3]
    assert all(entry["counted"] for entry in history)
    assert {entry["error"]["code"] for entry in history} == {"triton_lost"}


async def test_attempts_lost_without_an_engines_death_fail_as_lost(
    postgres_server: PostgresServer, database_name: str
) -> None:
    settings = make_settings(postgres_server, database_name, max_attempts=1)
    async with Database(settings, "test") as database:
        connection = await connect(settings)
        bench = Bench(database, settings, connection)
        (identifier,) = await bench.add()
        row = await bench.lose(await bench.worker(), identifier)
        assert (row["state"], row["error_code"]) == ("failed", "triton_lost")
        assert row["error_retryable"] is True
        await connection.close()


async def test_the_history_is_bounded(bench: Bench) -> None:
    (identifier,) = await bench.add()
    worker = await bench.worker()
    for _ in range(25):
        await bench.fast_forward()
        (claim,) = await bench.claim(worker)
        await bench.end(worker, ended(claim, AttemptOutcome.RETURNED, failure=LOST))
    assert len(orjson.loads((await bench.row(identifier))["attempt_history"])) == 20


async def test_an_end_past_the_deadline(bench: Bench) -> None:
    """Lost results and late returns fail; completed ones are kept."""
    identifiers = await bench.add(3)
    worker = await bench.worker()
    claims = await bench.claim(worker)
    await bench.connection.execute("UPDATE results SET deadline_at = now() - interval '1 s'")
    outcomes = [AttemptOutcome.COMPLETED, AttemptOutcome.LOST, AttemptOutcome.RETURNED]
    ends = [ended(c, o, failure=LOST if o != AttemptOutcome.COMPLETED else None)
            for c, o in zip(claims, outcomes, strict=True)]  # fmt: skip
    assert await bench.end(worker, *ends) == [True] * 3
    rows = {row["id"]: row for row in [await bench.row(i) for i in identifiers]}
    assert [rows[claim.id]["error_code"] for claim in claims] == [
        None, "deadline_exceeded", "deadline_exceeded",
    ]  # fmt: skip
    assert [rows[claim.id]["output"] for claim in claims] == ["text"] * 3


@pytest.mark.parametrize("outcome", list(AttemptOutcome))
async def test_a_cancelled_result_never_completes(bench: Bench, outcome: AttemptOutcome) -> None:
    (identifier,) = await bench.add()
    worker = await bench.worker()
    (claim,) = await bench.claim(worker)
    assert await bench.queue.cancel("default", id=identifier) == 1
    row = await bench.row(identifier)
    assert row["state"] == "pending"
    assert row["cancel_requested_at"] is not None
    failure = {AttemptOutcome.COMPLETED: None, AttemptOutcome.FAILED: CANCELLED}.get(outcome, LOST)
    assert await bench.end(worker, ended(claim, outcome, failure=failure)) == [True]
    row = await bench.row(identifier)
    assert (row["state"], row["error_code"]) == ("failed", "cancelled")
    assert (row["finish_reason"], row["output"]) == ("cancelled", "text")
    assert row["completion_tokens"] == 2


async def test_an_earlier_attempt_is_not_the_end_that_was_committed(bench: Bench) -> None:
    """Its worker ran the result again, and that attempt ended it."""
    await bench.add()
    worker = await bench.worker()
    (first,) = await bench.claim(worker)
    assert await bench.end(worker, ended(first, AttemptOutcome.RETURNED)) == [True]
    (second,) = await bench.claim(worker)
    assert await bench.end(worker, ended(second)) == [True]
    async with bench.database.connection() as connection:
        resent = bench.queue.end_batcher(worker, 5.0)._statement
        assert list(await resent(connection, [ended(first)], True)) == [False]


async def test_an_end_that_was_committed_is_known_as_ours(bench: Bench) -> None:
    """The same statement again, after its answer was lost with the connection."""
    await bench.add(3)
    worker, other = await bench.worker(), await bench.worker()
    claims = await bench.claim(worker)
    ends = [
        ended(claims[0]), ended(claims[1], AttemptOutcome.LOST, failure=LOST),
        ended(claims[2], AttemptOutcome.RETURNED),
    ]  # fmt: skip
    assert await bench.end(worker, *ends) == [True] * 3
    for owner, resent, ours in (
        (worker, True, [True] * 3), (worker, False, [False] * 3),
        # Requeued rows have no owner any more: only the attempt distinguishes them.
        (other, True, [False, True, True]),
    ):  # fmt: skip
        lane = bench.queue.end_batcher(owner, 5.0)
        async with bench.database.connection() as connection:
            assert list(await lane._statement(connection, ends, resent)) == ours


class Waiting:
    """An audience that waits for some results."""

    def __init__(self, ids: Iterable[UUID]) -> None:
        self.ids = set(ids)
        self.handed: dict[UUID, asyncpg.Record] = {}

    def awaits(self, result_id: UUID) -> bool:
        return result_id in self.ids

    def deliver(self, row: asyncpg.Record) -> None:
        assert self.handed.setdefault(row["id"], row) is row


async def test_an_end_hands_on_what_a_read_gives(bench: Bench, queue_settings: Settings) -> None:
    worker = await bench.worker()
    await bench.add(5)
    done, failed, back, unawaited, not_ours = await bench.claim(worker)
    audience = Waiting(claim.id for claim in (done, failed, back, not_ours))
    lane = bench.queue.end_batcher(worker, 5.0, audience)
    said: dict[str, Any] = {"output": "é🙂", "finish_reason": "stop", "logprobs": (b'{"1": 0.50}',)}
    ends = [
        ended(done, **said, prompt_tokens=2, completion_tokens=3, first_token_seconds=0.1),
        ended(failed, AttemptOutcome.FAILED, failure=Failure(FailureCode.MODEL_ERROR, "no", True)),
        ended(back, AttemptOutcome.RETURNED),
        ended(unawaited),
        replace(ended(not_ours), attempt=7),
    ]
    answers = await asyncio.gather(*(lane.submit(end) for end in ends))
    assert answers == [True, True, True, True, False]
    assert audience.handed.keys() == {done.id, failed.id}  # not what goes back to the queue
    store = ResultStore(bench.database, bench.queue, queue_settings)
    for result_id, row in audience.handed.items():
        read = await store.get("default", result_id)
        assert ResultRow.of(row) == read


async def test_ends_tell_who_waits(bench: Bench) -> None:
    noted: asyncio.Queue[str] = asyncio.Queue()
    await bench.connection.add_listener(ENDED, lambda *event: noted.put_nowait(event[-1]))
    await bench.add(3)
    worker = await bench.worker()
    done, failed, back = await bench.claim(worker)
    await bench.end(
        worker, ended(done), ended(failed, AttemptOutcome.FAILED, failure=REFUSED),
        ended(back, AttemptOutcome.RETURNED),
    )  # fmt: skip
    payload = await asyncio.wait_for(noted.get(), 30)
    assert {UUID(hex=digits) for digits in payload.split(",")} == {done.id, failed.id}


# --- chunks -----------------------------------------------------------------------------------------


async def test_chunks_are_kept_only_for_attempts_that_are_ours(bench: Bench) -> None:
    identifiers = await bench.add(2)
    worker, other = await bench.worker(), await bench.worker()
    claims = await bench.claim(worker)
    await bench.queue.append(
        worker, [chunk(claims[0], 0, "a"), chunk(claims[0], 1, "b"), chunk(claims[1], 0, "c")]
    )
    await bench.queue.append(worker, [chunk(claims[0], 0, "a")])  # sent again: no second copy
    await bench.queue.append(other, [chunk(claims[0], 2, "x")])
    await bench.queue.append(worker, [replace(chunk(claims[0], 2, "x"), attempt=9)])
    await bench.queue.append(worker, [replace(chunk(claims[0], 0, "x"), result_id=new_id())])
    assert [await bench.chunks(identifier) for identifier in identifiers] == [2, 1]
    assert await bench.connection.fetchval("SELECT count(*) FROM result_chunks") == 3


@pytest.mark.parametrize("outcome", list(AttemptOutcome))
async def test_chunks_are_gone_after_the_end(bench: Bench, outcome: AttemptOutcome) -> None:
    (identifier,) = await bench.add()
    worker = await bench.worker()
    (claim,) = await bench.claim(worker)
    await bench.queue.append(worker, [chunk(claim, 0, "te"), chunk(claim, 2, "xt")])
    assert await bench.chunks(identifier) == 2
    failure = None if outcome is AttemptOutcome.COMPLETED else LOST
    await bench.end(worker, ended(claim, outcome, failure=failure))
    assert await bench.chunks(identifier) == 0
    await bench.queue.append(worker, [chunk(claim, 4, "late")])
    assert await bench.chunks(identifier) == 0


# --- suspects ---------------------------------------------------------------------------------------


async def make_suspect(bench: Bench, result_id: UUID) -> None:
    await bench.connection.execute("UPDATE results SET engine_deaths = 2 WHERE id = $1", result_id)


async def test_a_suspect_runs_alone(bench: Bench) -> None:
    suspect, innocent = await bench.add(2)
    worker = await bench.worker()
    (running,) = await bench.claim(worker, 1)
    assert running.id == suspect
    await bench.end(worker, ended(running, AttemptOutcome.RETURNED))
    await make_suspect(bench, suspect)
    (other,) = await bench.add(model_name="n")

    assert await bench.claim(worker) == []  # nothing beside a suspect
    assert [claim.id for claim in await bench.claim(worker, model="n")] == [other]
    assert await bench.queue.suspects_in_turn([MODEL, "n"]) == {MODEL: "default"}
    (claim,) = await bench.queue.claim_suspects(worker, [MODEL, "n"])
    assert await bench.queue.suspects_in_turn([MODEL, "n"]) == {}
    assert (claim.id, claim.is_suspect, claim.attempt) == (suspect, True, 2)
    assert await bench.claim(worker) == []  # nor while it runs
    assert await bench.queue.claim_suspects(worker, [MODEL]) == []

    await bench.end(worker, ended(claim))
    assert [claim.id for claim in await bench.claim(worker)] == [innocent]


async def test_a_suspect_waits_until_the_model_is_empty(bench: Bench) -> None:
    innocent, suspect = await bench.add(2)
    worker = await bench.worker()
    (running,) = await bench.claim(worker, 1)
    assert running.id == innocent
    await make_suspect(bench, suspect)
    assert await bench.queue.claim_suspects(worker, [MODEL]) == []
    await bench.end(worker, ended(running))
    (claim,) = await bench.queue.claim_suspects(worker, [MODEL])
    assert claim.id == suspect


async def test_suspects_run_one_after_another_over_all_workers(bench: Bench) -> None:
    identifiers = await bench.add(3)
    for identifier in identifiers:
        await make_suspect(bench, identifier)
    await bench.connection.execute("INSERT INTO models (name) VALUES ($1)", MODEL)
    workers = [await bench.worker() for _ in range(4)]
    seen = []
    for _ in identifiers:
        taken = await asyncio.gather(
            *(bench.queue.claim_suspects(worker, [MODEL]) for worker in workers)
        )
        claims = [(w, c) for w, found in zip(workers, taken, strict=True) for c in found]
        assert len(claims) == 1
        ((worker, claim),) = claims
        seen.append(claim.id)
        await bench.end(worker, ended(claim))
    assert seen == identifiers


async def test_other_results_have_a_share_of_the_time_of_suspects(bench: Bench) -> None:
    """Those of the team that ran one wait longer than those of another, and each longer than others."""
    mine, *others = await bench.add(4, team_id="many")
    (foreign,) = await bench.add(team_id="one")
    (elsewhere,) = await bench.add(model_name="n")
    for identifier in (mine, *others[:2], foreign, elsewhere):
        await make_suspect(bench, identifier)
    worker = await bench.worker()
    (claim,) = await bench.queue.claim_suspects(worker, [MODEL])
    assert claim.id == mine
    assert await bench.claim(worker) == []
    await bench.end(worker, ended(claim))
    await bench.queue.pause_suspects(MODEL, "many", 30.0)

    assert await bench.queue.claim_suspects(worker, [MODEL]) == []
    (innocent,) = await bench.claim(worker)
    assert innocent.id == others[2]
    pauses = "SELECT id, extract(epoch FROM not_before - now())::float8 AS s FROM results WHERE state = 'pending'"
    found = {row["id"]: row["s"] for row in await bench.connection.fetch(pauses)}
    assert found[elsewhere] is None
    assert found[foreign] <= 30.0 < 110.0 < found[others[0]] <= 120.0
    # Their turn comes: others wait, and the model becomes empty.
    await bench.connection.execute("UPDATE results SET not_before = now() WHERE id = $1", foreign)
    assert await bench.add(team_id="third")
    assert await bench.claim(worker) == []
    await bench.end(worker, ended(innocent))
    (claim,) = await bench.queue.claim_suspects(worker, [MODEL])
    assert claim.id == foreign


async def test_suspects_do_not_pause_for_nothing(bench: Bench) -> None:
    first, second = await bench.add(2)
    for identifier in (first, second):
        await make_suspect(bench, identifier)
    worker = await bench.worker()
    (claim,) = await bench.queue.claim_suspects(worker, [MODEL])
    await bench.end(worker, ended(claim))
    await bench.queue.pause_suspects(MODEL, claim.team_id, 30.0)
    (claim,) = await bench.queue.claim_suspects(worker, [MODEL])
    assert claim.id == second


async def test_suspects_of_other_models_or_pauses_are_left(bench: Bench) -> None:
    (identifier,) = await bench.add()
    await make_suspect(bench, identifier)
    worker = await bench.worker()
    assert await bench.queue.claim_suspects(worker, []) == []
    assert await bench.queue.claim_suspects(worker, ["n"]) == []
    await bench.connection.execute("UPDATE results SET not_before = now() + interval '1 h'")
    assert await bench.queue.suspects_in_turn([MODEL]) == {}
    assert await bench.queue.claim_suspects(worker, [MODEL]) == []


# --- cancel -----------------------------------------------------------------------------------------


async def test_cancel_of_a_queued_result_is_terminal_at_once(bench: Bench) -> None:
    (identifier,) = await bench.add()
    assert await bench.queue.cancel("other", id=identifier) == 0
    assert await bench.queue.cancel("default", id=identifier) == 1
    row = await bench.row(identifier)
    assert (row["state"], row["error_code"], row["finish_reason"]) == (
        "failed", "cancelled", "cancelled",
    )  # fmt: skip
    assert row["finished_at"] is not None
    assert row["cancel_requested_at"] is not None
    assert await bench.queue.cancel("default", id=identifier) == 0
    assert await bench.claim(await bench.worker()) == []


async def test_cancel_tells_owners_and_waiters(bench: Bench) -> None:
    running, queued = await bench.add(2)
    await bench.claim(await bench.worker(), 1)
    noted: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
    for channel in (ENDED, CANCELLED_CHANNEL):
        await bench.connection.add_listener(
            channel, lambda *event: noted.put_nowait((event[-2], event[-1]))
        )
    assert await bench.queue.cancel("default", model_name=MODEL) == 2
    events = {await asyncio.wait_for(noted.get(), 30) for _ in range(2)}
    assert events == {(ENDED, queued.hex), (CANCELLED_CHANNEL, running.hex)}
    first = (await bench.row(running))["cancel_requested_at"]
    assert await bench.queue.cancel("default", id=running) == 1  # notified again
    assert (await bench.row(running))["cancel_requested_at"] == first


async def test_cancel_by_filter_reaches_all_and_only_those(bench: Bench) -> None:
    many = await bench.add(2 * MAX_BATCH + 50)
    await bench.add(3, model_name="n")
    worker = await bench.worker()
    await bench.claim(worker, 10)
    assert await bench.queue.cancel("other", model_name=MODEL) == 0
    context = (await bench.row(many[-1]))["context_id"]
    assert await bench.queue.cancel("default", context_id=context, model_name=MODEL) == 1
    assert await bench.queue.cancel("default", model_name=MODEL) == len(many) - 1
    untouched = await bench.connection.fetch(
        "SELECT model_name FROM results WHERE state = 'pending' AND cancel_requested_at IS NULL"
    )
    assert [row["model_name"] for row in untouched] == ["n"] * 3


async def test_cancel_by_filter_goes_on_past_rows_that_end_meanwhile(bench: Bench) -> None:
    """A row that another writer ends while the first batch waits for it makes the batch short."""
    await bench.add(MAX_BATCH + 50)
    worker = await bench.worker()
    (claim,) = await bench.claim(worker, 1)
    async with bench.connection.transaction():
        await bench.connection.execute("SELECT FROM results WHERE id = $1 FOR UPDATE", claim.id)
        cancelling = asyncio.create_task(bench.queue.cancel("default", model_name=MODEL))
        await until_blocked(bench)
        await bench.connection.execute(
            "UPDATE results SET state = 'completed', output = '', finished_at = now()"
            " WHERE id = $1",
            claim.id,
        )
    assert await cancelling == MAX_BATCH + 49
    assert (
        await bench.connection.fetchval("SELECT count(*) FROM results WHERE state = 'pending'") == 0
    )


async def test_cancels_race_the_statements_of_completions(bench: Bench) -> None:
    identifiers = await bench.add(60)
    worker = await bench.worker()
    claims = await bench.claim(worker)
    lane = bench.queue.end_batcher(worker, 5.0)
    await asyncio.gather(
        *(lane.submit(ended(claim)) for claim in claims),
        *(bench.queue.cancel("default", id=identifier) for identifier in identifiers),
        bench.queue.cancel("default", model_name=MODEL),
    )
    rows = [await bench.row(identifier) for identifier in identifiers]
    assert {row["state"] for row in rows} <= {"completed", "failed"}
    for row in rows:
        assert (row["state"] == "failed") == (row["error_code"] == "cancelled")
        assert (row["cancel_requested_at"] is None) == (row["state"] == "completed")


# --- rescue, retire, expire -------------------------------------------------------------------------


async def test_rescue_takes_only_from_workers_whose_lease_ran_out(bench: Bench) -> None:
    lost, kept = await bench.add(2)
    dying, living = await bench.worker(), await bench.worker()
    (claim,) = await bench.claim(dying, 1)
    await bench.claim(living)
    assert await bench.queue.rescue(0.001) == 0
    await bench.connection.execute(
        "UPDATE workers SET lease_expires_at = now() - interval '1 s' WHERE id = $1", dying
    )
    assert await bench.queue.rescue(1e6) == 0  # the server is younger than a lease
    assert await bench.queue.rescue(0.001) == 1
    row = await bench.row(lost)
    assert (row["state"], row["worker_id"], row["lost_attempts"]) == ("pending", None, 1)
    (entry,) = orjson.loads(row["attempt_history"])
    assert (entry["error"]["code"], entry["counted"]) == ("worker_lost", True)
    assert (await bench.row(kept))["worker_id"] == living
    # The dead may neither write, nor append, nor claim, nor renew.
    assert await bench.end(dying, ended(claim)) == [False]
    await bench.queue.append(dying, [chunk(claim, 0, "x")])
    assert await bench.chunks(lost) == 0
    assert await bench.claim(dying) == []
    assert await bench.connection.fetchval(
        "SELECT dead_at IS NOT NULL FROM workers WHERE id = $1", dying
    )


async def test_a_rescued_result_has_no_more_attempts(bench: Bench) -> None:
    """The text so far comes from the chunks of the last attempt, and of no other."""
    (identifier,) = await bench.add()
    for attempt in range(1, MAX_ATTEMPTS + 1):
        worker = await bench.worker(lease_seconds=-1)
        (claim,) = await bench.claim(worker) or await bench.queue.claim_suspects(worker, [MODEL])
        text = ["é🙂", f"-{attempt}"]
        await bench.queue.append(worker, [chunk(claim, 2, text[1], 2), chunk(claim, 0, text[0], 1)])
        assert await bench.queue.rescue(0.001) == 1
        assert await bench.chunks(identifier) == 0
    row = await bench.row(identifier)
    assert (row["state"], row["error_code"]) == ("failed", "worker_lost")
    assert row["error_retryable"] is True
    assert (row["output"], row["finish_reason"]) == (f"é🙂-{MAX_ATTEMPTS}", "error")
    assert (row["prompt_tokens"], row["completion_tokens"]) == (7, 2)
    assert len(orjson.loads(row["attempt_history"])) == MAX_ATTEMPTS


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ("cancel_requested_at = now()", "cancelled"),
        ("deadline_at = now() - interval '1 s'", "deadline_exceeded"),
    ],
)
async def test_rescue_ends_what_was_cancelled_or_is_late(
    bench: Bench, change: str, code: str
) -> None:
    (identifier,) = await bench.add()
    worker, other = await bench.worker(lease_seconds=-1), await bench.worker()
    (claim,) = await bench.claim(worker)
    await bench.queue.append(worker, [chunk(claim, 0, "so far")])
    await bench.connection.execute(f"UPDATE results SET {change}")
    await bench.add()
    (beside,) = await bench.claim(other)
    await bench.queue.append(other, [replace(chunk(beside, 0, "other", 50), prompt_tokens=70)])
    await bench.connection.execute(
        "INSERT INTO result_chunks SELECT result_id, 0, 6, 'of an earlier attempt', 9, 9 FROM"
        " result_chunks WHERE result_id = $1",
        identifier,
    )
    assert await bench.queue.rescue(0.001) == 1
    row = await bench.row(identifier)
    assert (row["state"], row["error_code"], row["output"]) == ("failed", code, "so far")
    assert (row["prompt_tokens"], row["completion_tokens"]) == (7, 1)


@pytest.mark.parametrize("days", [0, 30])
async def test_rescue_frees_what_a_dead_rescuer_left(bench: Bench, days: int) -> None:
    (identifier,) = await bench.add()
    worker = await bench.worker()
    await bench.claim(worker)
    await bench.connection.execute(
        "UPDATE workers SET dead_at = now() - make_interval(days => $1)", days
    )
    assert await bench.queue.rescue(0.001) == 1
    assert (await bench.row(identifier))["worker_id"] is None


async def test_rescue_of_many_by_many(bench: Bench) -> None:
    """More than a batch, several rescuers at once: each result is freed once."""
    identifiers = await bench.add(2 * MAX_BATCH + 10)
    worker = await bench.worker(lease_seconds=-1)
    assert len(await bench.claim(worker, 1000)) == len(identifiers)
    await asyncio.gather(*(bench.queue.rescue(0.001) for _ in range(3)))
    await until(lambda: all_freed(bench))
    counts = await bench.connection.fetch("SELECT DISTINCT lost_attempts FROM results")
    assert [row["lost_attempts"] for row in counts] == [1]


async def all_freed(bench: Bench) -> bool:
    await bench.queue.rescue(0.001)
    left: int = await bench.connection.fetchval(
        "SELECT count(*) FROM results WHERE worker_id IS NOT NULL"
    )
    return left == 0


async def test_retire_hands_back_without_counting(bench: Bench) -> None:
    identifiers = await bench.add(MAX_BATCH + 5)
    worker = await bench.worker()
    await bench.claim(worker, 1000)
    assert await bench.queue.retire(worker) == len(identifiers)
    row = await bench.row(identifiers[0])
    assert (row["state"], row["worker_id"], row["lost_attempts"]) == ("pending", None, 0)
    assert row["attempt_history"] == "[]"
    assert await bench.claim(worker) == []
    assert await bench.queue.retire(worker) == 0


async def test_who_stood_still_in_a_transaction_begins_again(bench: Bench) -> None:
    tries = 0

    async def work(connection: Connection) -> int:
        nonlocal tries
        tries += 1
        async with connection.transaction():
            if tries == 1:
                await connection.execute("SET LOCAL idle_in_transaction_session_timeout = 100")
                time.sleep(0.5)  # noqa: ASYNC251 - as a process does that is stopped
            return int(await connection.fetchval("SELECT 1"))

    assert await bench.database.run(work) == 1
    assert tries == 2


async def test_claims_run_before_their_connection_is_back(bench: Bench) -> None:
    """To return one that leads to a silent server may take longer than two heartbeats, after which
    what is claimed and does not run is handed back.
    """
    await bench.add()
    worker = await bench.worker()
    pool = bench.database._pool
    assert pool is not None
    async for claims in bench.queue.claims(worker, {MODEL: 1}):
        assert len(claims) == 1
        assert pool.get_size() - pool.get_idle_size() == 1


async def test_nobody_finds_results_with_a_retired_worker(bench: Bench, settings: Settings) -> None:
    """A reader that sees it dead before its results are free would count them as lost."""
    (identifier,) = await bench.add()
    worker = await bench.worker()
    await bench.claim(worker)
    other = await connect(settings)
    try:
        async with other.transaction():
            await other.execute("SELECT FROM results WHERE id = $1 FOR UPDATE", identifier)
            retiring = asyncio.create_task(bench.queue.retire(worker))
            await until(lambda: _waits_for_a_lock(bench))
            is_dead = "SELECT dead_at IS NOT NULL FROM workers WHERE id = $1"
            assert not await bench.connection.fetchval(is_dead, worker)
        assert await retiring == 1
        assert await bench.connection.fetchval(is_dead, worker)
        assert (await bench.row(identifier))["lost_attempts"] == 0
    finally:
        await other.close()


async def _waits_for_a_lock(bench: Bench) -> bool:
    count: int = await bench.connection.fetchval(
        """SELECT count(*) FROM pg_stat_activity
           WHERE wait_event_type = 'Lock' AND datname = current_database()"""
    )
    return count > 0


async def test_owned_tells_attempt_and_cancellation(bench: Bench) -> None:
    first, second = await bench.add(2)
    worker = await bench.worker()
    claims = await bench.claim(worker)
    await bench.queue.cancel("default", id=second)
    async with bench.database.connection() as connection:
        owned = await owned_results(connection, worker)
        assert owned == {first: (1, False), second: (1, True)}
        await bench.end(worker, *(ended(claim) for claim in claims))
        assert await owned_results(connection, worker) == {}


async def test_expire_ends_only_queued_results_past_their_deadline(bench: Bench) -> None:
    late = await bench.add(MAX_BATCH + 20, model_name="unloaded")
    (running,) = await bench.add()
    await bench.claim(await bench.worker())
    await bench.connection.execute("UPDATE results SET deadline_at = now() - interval '1 s'")
    (fresh,) = await bench.add()
    assert await bench.queue.expire() == len(late)
    row = await bench.row(late[0])
    assert (row["state"], row["error_code"], row["finish_reason"]) == (
        "failed", "deadline_exceeded", "error",
    )  # fmt: skip
    assert row["error_retryable"] is True
    assert (await bench.row(running))["state"] == "pending"
    assert (await bench.row(fresh))["state"] == "pending"
    assert await bench.queue.expire() == 0


async def test_tell_stopped_reaches_owners_in_batches(bench: Bench) -> None:
    noted: asyncio.Queue[str] = asyncio.Queue()
    await bench.connection.add_listener(
        CANCELLED_CHANNEL, lambda *event: noted.put_nowait(event[-1])
    )
    identifiers = [new_id() for _ in range(MAX_BATCH + 1)]
    await bench.queue.notify_stopped(identifiers)
    payloads = [await asyncio.wait_for(noted.get(), 30) for _ in range(2)]
    assert [UUID(hex=d) for payload in payloads for d in payload.split(",")] == identifiers
    await bench.queue.notify_stopped([])


async def until_blocked(bench: Bench) -> None:
    async def is_blocked() -> object:
        return await bench.database.fetch(
            "SELECT 1 FROM pg_stat_activity WHERE datname = current_database()"
            " AND wait_event_type = 'Lock'"
        )

    await until(is_blocked)


# --- attributions ---------------------------------------------------------------------------------


def attributed(**members: Any) -> tuple[UUID, dict[str, Any]]:
    """An attribution to follow, and the members of a result that asks for it."""
    identifier = new_id()
    asked = {
        "id": str(identifier),
        "queue": "infini-gram/corpus",
        "parameters": {"minimumSpanLength": 2},
        "deadline_seconds": 60.0,
    }
    return identifier, {"attribution": orjson.dumps(asked).decode(), **members}


class Waiter:
    """Waits for every result, and keeps what it is handed."""

    def __init__(self) -> None:
        self.rows: list[asyncpg.Record] = []

    def awaits(self, _: UUID) -> bool:
        return True

    def deliver(self, row: asyncpg.Record) -> None:
        self.rows.append(row)


@pytest.mark.parametrize("is_awaited", [False, True])
async def test_a_completed_text_is_attributed_by_a_result_of_its_own(
    bench: Bench, is_awaited: bool
) -> None:
    first, members = attributed(webhook_url="http://hook.example/", priority=-2)
    second, more = attributed(priority=-2)
    sources = await bench.add(**members) + await bench.add(**more)
    (plain,) = await bench.add()
    worker, waiter = await bench.worker(), Waiter()
    claims = {claim.id: claim for claim in await bench.claim(worker)}
    assert [claims[one].has_attribution for one in (*sources, plain)] == [True, True, False]
    lane = bench.queue.end_batcher(worker, 5.0, waiter if is_awaited else None)
    ends = [
        ended(claims[one], output=f"text {place}", has_attribution=claims[one].has_attribution)
        for place, one in enumerate((*sources, plain))
    ]
    assert list(await lane.submit_all(ends)) == [True] * 3
    assert len(waiter.rows) == (3 if is_awaited else 0)
    rows = [await bench.row(one) for one in (first, second)]
    for place, row in enumerate(rows):
        source = await bench.row(sources[place])
        assert (row["kind"], row["state"], row["source_id"]) == (
            "attribution",
            "pending",
            source["id"],
        )
        assert (row["prompt"], row["context_id"]) == (f"text {place}", source["context_id"])
        assert orjson.loads(row["parameters"]) == {"minimumSpanLength": 2}
        assert (row["priority"], row["webhook_url"]) == (-2, source["webhook_url"])
    assert rows[0]["fair_key"] + 1 == rows[1]["fair_key"]
    # One that is reported twice is stored once.
    count = "SELECT count(*) FROM results"
    before = await bench.connection.fetchval(count)
    await lane.submit_all(ends)
    assert await bench.connection.fetchval(count) == before == 5
    claimed = await bench.claim(worker, 1, "infini-gram/corpus")
    assert [(claim.id, claim.prompt) for claim in claimed] == [(first, "text 0")]


async def test_a_text_that_did_not_complete_is_not_attributed(bench: Bench) -> None:
    identifier, members = attributed()
    (source,) = await bench.add(**members)
    worker = await bench.worker()
    (claim,) = await bench.claim(worker)
    await bench.queue.cancel("default", id=source)
    assert await bench.end(worker, ended(claim, has_attribution=True)) == [True]
    assert (await bench.row(source))["error_code"] == "cancelled"
    assert await bench.connection.fetchval("SELECT count(*) FROM results") == 1
    assert not await bench.connection.fetchval("SELECT true FROM results WHERE id=$1", identifier)


@pytest.mark.trial
async def test_a_text_is_attributed_or_its_context_deleted_without_a_deadlock(
    bench: Bench, queue_settings: Settings
) -> None:
    contexts = ContextStore(bench.database, bench.queue, queue_settings)
    worker = await bench.worker()
    for _ in range(100):
        ids = []
        for _ in range(4):
            _, members = attributed()
            ids += await bench.add(**members)
        claims = {claim.id: claim for claim in await bench.claim(worker)}
        ends = [ended(claims[one], has_attribution=True) for one in ids]
        deleted = [(await bench.row(one))["context_id"] for one in ids]
        await asyncio.gather(
            bench.end(worker, *ends),
            *(contexts.delete("default", one, force=True) for one in deleted),
        )
        assert await bench.connection.fetchval("SELECT count(*) FROM results") == 0
    assert (
        await bench.connection.fetchval(
            "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
        )
        == 0
    )


async def test_an_attribution_costs_its_team_a_place_by_its_weight(bench: Bench) -> None:
    await bench.connection.execute(
        "INSERT INTO team_limits VALUES ('default', '*', 4), ('default', 'another', 9)"
    )
    keys = []
    worker = await bench.worker()
    for _ in range(2):
        identifier, members = attributed()
        await bench.add(**members)
        (claim,) = await bench.claim(worker)
        await bench.end(worker, ended(claim, has_attribution=True))
        keys.append((await bench.row(identifier))["fair_key"])
    assert keys[1] - keys[0] == 0.25


async def test_a_stopping_worker_returns_a_result_whose_client_may_cancel(bench: Bench) -> None:
    """A planned stop loses no attempt: `on_disconnect` counts only where a worker is lost."""
    (identifier,) = await bench.add(on_disconnect="cancel")
    worker = await bench.worker()
    assert await bench.claim(worker)
    assert await bench.queue.retire(worker) == 1
    row = await bench.row(identifier)
    assert (row["state"], row["worker_id"], row["error_code"]) == ("pending", None, None)


async def test_a_queued_result_that_is_cancelled_expires_as_it_was_requested(bench: Bench) -> None:
    (identifier,) = await bench.add(retain_seconds=60.0)
    assert await bench.queue.cancel("default", id=identifier) == 1
    row = await bench.row(identifier)
    assert row["state"] == "failed"
    assert 59 < (row["expires_at"] - row["finished_at"]).total_seconds() < 61


async def test_an_attribution_of_another_teams_result_is_not_stored(bench: Bench) -> None:
    (source,) = await bench.add()
    context = NewContext(new_id(), "other", "a text", None, "{}")
    foreign = make_result(
        team_id="other", context_id=context.id, new_context=context, source_id=source
    )
    assert await bench.queue.enqueue([foreign]) == [False]
    assert await bench.connection.fetchval("SELECT count(*) FROM results") == 1


async def test_the_key_of_an_erased_result_is_freed(bench: Bench) -> None:
    """An erased attribution answers no later request; a kept one of the same version does."""
    kept, erased = keyed("kept"), keyed("erased")
    assert await bench.queue.enqueue([kept, erased]) == [True, True]
    worker = await bench.worker()
    claims = await bench.claim(worker)
    assert all(await bench.end(worker, *(ended(claim, model_version=7) for claim in claims)))
    await bench.connection.execute(
        "UPDATE results SET erased_at = now(), output = NULL WHERE id = $1", erased.id
    )
    keys = IdempotencyKeys(bench.database, bench.settings)
    for name in ("kept", "erased"):
        await keys.forget_unless_good("default", name, 7)
    assert (await key_owners(bench)).keys() == {"kept"}
