"""Results that are claimed by the statement that stores them: when, and when not."""

import asyncio
from dataclasses import replace
from uuid import UUID

import asyncpg
import pytest

from app.core.database import Connection
from app.core.ids import new_id
from app.core.settings import Settings
from app.queue import enqueue
from app.queue.enqueue import NewContext
from app.worker.worker import Worker
from tests.conftest import Service, connect, run_service, short_lease
from tests.integration.queue.dispatcher import Dispatcher
from tests.integration.queue.queue_bench import MODEL, Bench, keyed, make_result
from tests.integration.support import finish, read, send, until


@pytest.fixture
async def dispatcher(bench: Bench) -> Dispatcher:
    dispatcher = Dispatcher(await bench.worker())
    bench.queue.dispatcher = dispatcher
    return dispatcher


async def state(connection: asyncpg.Connection, result_id: UUID) -> tuple[object, ...]:
    row = await connection.fetchrow(
        "SELECT state, worker_id, attempt, started_at IS NOT NULL FROM results WHERE id = $1",
        result_id,
    )
    assert row is not None
    return tuple(row)


async def test_claimed_as_it_is_stored(bench: Bench, dispatcher: Dispatcher) -> None:
    (result_id,) = await bench.add()
    assert await state(bench.connection, result_id) == ("pending", dispatcher.worker_id, 1, True)
    (claim,) = dispatcher.started
    assert (claim.id, claim.attempt, claim.is_suspect) == (result_id, 1, False)
    assert claim.prompt
    assert claim.parameters == {"max_tokens": 3}
    assert await bench.claim(await bench.worker()) == []


async def test_a_saved_context_gives_its_prompt(bench: Bench, dispatcher: Dispatcher) -> None:
    other = NewContext(new_id(), "default", "another prompt", None, "{}")
    await bench.add(context_id=other.id, new_context=other)
    (first,) = await bench.add()
    context_id = await bench.connection.fetchval(
        "SELECT context_id FROM results WHERE id = $1", first
    )
    again = make_result(context_id=context_id, new_context=None)
    assert await bench.queue.enqueue([again]) == [True]
    prompts = [claim.prompt for claim in dispatcher.started]
    assert prompts == ["another prompt", "a prompt", "a prompt"]


async def test_results_that_ended_in_the_queue_do_not_wait(
    bench: Bench, dispatcher: Dispatcher
) -> None:
    bench.queue.dispatcher = None
    (cancelled,) = await bench.add()
    await bench.connection.execute("UPDATE results SET engine_deaths = 2")
    await bench.queue.cancel("default", id=cancelled)
    bench.queue.dispatcher = dispatcher
    (result_id,) = await bench.add()
    assert [claim.id for claim in dispatcher.started] == [result_id]


async def test_nothing_that_waits_is_overtaken(bench: Bench, dispatcher: Dispatcher) -> None:
    bench.queue.dispatcher = None
    (waiting,) = await bench.add()
    bench.queue.dispatcher = dispatcher
    (later,) = await bench.add()
    assert dispatcher.started == []
    assert await state(bench.connection, later) == ("pending", None, 0, False)
    claims = await bench.claim(await bench.worker())
    assert [claim.id for claim in claims] == [waiting, later]


async def test_a_team_with_a_running_limit_is_left_to_claims(
    bench: Bench, dispatcher: Dispatcher
) -> None:
    """Also while the process of the request has not read it: what the model began is stopped."""
    await bench.queue._limits.set("other team", MODEL, {"max_running": 1})
    (free,) = await bench.add()
    assert [claim.id for claim in dispatcher.started] == [free]
    await bench.queue._limits.set("default", MODEL, {"max_running": 1})
    (result_id,) = await bench.add()
    assert (dispatcher.counts, dispatcher.begun, len(dispatcher.started)) == ([1, 1], [], 1)
    assert await state(bench.connection, result_id) == ("pending", None, 0, False)


async def test_one_statement_starts_only_what_may_start(
    bench: Bench, dispatcher: Dispatcher
) -> None:
    """Results of several teams and models: a limit, or a queue, of one holds up no other."""
    await bench.queue._limits.set("limited", MODEL, {"max_running": 1})
    bench.queue.dispatcher = None
    await bench.add(model_name="busy")
    bench.queue.dispatcher = dispatcher
    free, limited = make_result(), make_result(team_id="limited")
    behind = make_result(model_name="busy")
    assert await bench.queue.enqueue([limited, behind, free]) == [True] * 3
    assert [claim.id for claim in dispatcher.started] == [free.id]
    for one in (limited, behind):
        assert await state(bench.connection, one.id) == ("pending", None, 0, False)


async def test_only_as_many_as_there_is_room_for(bench: Bench, dispatcher: Dispatcher) -> None:
    dispatcher.room = 2
    ids = await bench.add(5)
    assert [claim.id for claim in dispatcher.started] == ids[:2]
    assert [claim.id for claim in await bench.claim(await bench.worker())] == ids[2:]


async def test_a_worker_that_is_dead_claims_nothing(bench: Bench, dispatcher: Dispatcher) -> None:
    await bench.connection.execute(
        "UPDATE workers SET dead_at = now() WHERE id = $1", dispatcher.worker_id
    )
    (result_id,) = await bench.add()
    assert dispatcher.started == []
    assert await state(bench.connection, result_id) == ("pending", None, 0, False)


async def test_a_failed_statement_aborts_what_has_begun(
    bench: Bench, dispatcher: Dispatcher
) -> None:
    await bench.connection.execute("ALTER TABLE results RENAME TO hidden")
    with pytest.raises(asyncpg.UndefinedTableError):
        await bench.add()
    assert dispatcher.counts == [1]
    assert (dispatcher.begun, dispatcher.started, dispatcher.aborted) == ([], [], 1)


async def test_a_suspect_is_alone(bench: Bench, dispatcher: Dispatcher) -> None:
    (suspect,) = await bench.add()
    await bench.connection.execute("UPDATE results SET engine_deaths = 2 WHERE id = $1", suspect)
    (innocent,) = await bench.add()
    assert [claim.id for claim in dispatcher.started] == [suspect]
    assert await state(bench.connection, innocent) == ("pending", None, 0, False)


async def test_an_outdated_dispatcher_frees_what_it_was_given(
    bench: Bench, dispatcher: Dispatcher
) -> None:
    (result_id,) = await bench.add()
    assert await bench.queue.retire(dispatcher.worker_id) == 1
    assert await state(bench.connection, result_id) == ("pending", None, 1, False)


async def test_a_suspect_of_another_model_holds_nothing_up(
    bench: Bench, dispatcher: Dispatcher
) -> None:
    bench.queue.dispatcher = None
    await bench.add(model_name="another")
    await bench.connection.execute("UPDATE results SET engine_deaths = 2")
    bench.queue.dispatcher = dispatcher
    (result_id,) = await bench.add()
    assert [claim.id for claim in dispatcher.started] == [result_id]


async def test_repetitions_do_not_begin_early(bench: Bench, dispatcher: Dispatcher) -> None:
    first, again = keyed("k"), keyed("k")
    assert await bench.queue.enqueue([first]) == [True]
    assert await bench.queue.enqueue([again]) == [False]
    assert dispatcher.counts == [0, 0]
    assert [claim.id for claim in dispatcher.started] == [first.id]
    await bench.add(3)
    assert dispatcher.counts == [0, 0, 3]


async def test_a_statement_that_is_sent_again_begins_nothing_early(
    bench: Bench, dispatcher: Dispatcher
) -> None:
    """The first sending may be committed: its claims are another's to hand back."""
    result = make_result()
    async with bench.database.connection() as connection:
        assert await bench.queue._enqueues._statement(connection, [result], True) == [True]
    assert dispatcher.counts == []
    assert [claim.id for claim in dispatcher.started] == [result.id]


async def test_results_that_are_found_stored_are_awaited_on_the_standby(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their ids are returned next; the commit of the first sending may be on the primary alone."""
    awaited = []

    async def await_standby(connection: Connection) -> None:
        awaited.append(connection)

    monkeypatch.setattr(enqueue, "await_standby", await_standby)
    result = make_result()
    async with bench.database.connection() as connection:
        for _ in range(2):
            assert await bench.queue._enqueues._statement(connection, [result], True) == [True]
    assert len(awaited) == 1


async def test_what_is_not_stored_is_stopped(
    service: Service, connection: asyncpg.Connection
) -> None:
    """The model has begun when the statement fails: it is stopped, and nothing is left of it."""
    await finish(service, "{{chunks=1}}")
    # For the insertion alone: other statements of the worker go on.
    await connection.execute("ALTER TABLE results ADD CONSTRAINT none CHECK (false) NOT VALID")
    refused = await service.client.post(
        "/results/", json={"model": "scripted", "content": "{{chunks=500 delay_ms=200}}"}
    )
    assert refused.status_code == 500
    await connection.execute("ALTER TABLE results DROP CONSTRAINT none")
    worker = service.services.queue.dispatcher
    assert isinstance(worker, Worker)
    assert not worker._attempts._early

    async def is_quiet() -> bool:
        return not [task for task in worker._attempts.tasks if task.get_name().startswith("early")]

    await until(is_quiet)  # the script itself takes 100 seconds
    assert (await finish(service, "{{chunks=3}} go"))["attempt"] == 1


async def test_retiring_waits_for_what_is_being_stored_as_claimed(
    bench: Bench, dispatcher: Dispatcher
) -> None:
    """A statement under way when its worker leaves: freed at once, and not counted as lost."""
    storing = bench.connection.transaction()
    await storing.start()
    await bench.connection.execute(
        "SELECT FROM workers WHERE id = $1 AND dead_at IS NULL FOR KEY SHARE", dispatcher.worker_id
    )
    context_id = await bench.connection.fetchval(
        "INSERT INTO contexts (id, content) VALUES (gen_random_uuid(), 'c') RETURNING id"
    )
    result_id = await bench.connection.fetchval(
        """INSERT INTO results (id, context_id, model_name, parameters, deadline_at, worker_id,
                                attempt, started_at)
           VALUES (gen_random_uuid(), $1, 'm', '{}', now() + interval '1 h', $2, 1, now())
           RETURNING id""",
        context_id,
        dispatcher.worker_id,
    )
    retiring = asyncio.create_task(bench.queue.retire(dispatcher.worker_id))
    other = await connect(bench.settings)

    async def is_waiting() -> bool:
        return bool(await other.fetchval("SELECT count(*) FROM pg_locks WHERE NOT granted"))

    await until(is_waiting)
    await other.close()
    await storing.commit()
    assert await retiring == 1
    assert await state(bench.connection, result_id) == ("pending", None, 1, False)


async def test_the_first_slots_go_to_the_highest_priority(
    bench: Bench, dispatcher: Dispatcher
) -> None:
    dispatcher.room = 2
    results = [make_result(priority=priority) for priority in (-5, -1, 0, -5, 0)]
    assert all(await bench.queue.enqueue(results))
    assert {claim.id for claim in dispatcher.started} == {results[2].id, results[4].id}
    claims = await bench.claim(await bench.worker())
    assert {claim.id for claim in claims} == {results[number].id for number in (1, 0, 3)}


async def test_of_a_service(service: Service, connection: asyncpg.Connection) -> None:
    """In one process a result goes straight to Triton, and is reported as any other."""
    await finish(service, "{{chunks=1}}")  # the worker has looked at its queue
    heard: list[object] = []
    await connection.add_listener("llm_enqueued", lambda *news: heard.append(news[-1]))
    result = await finish(service, "{{chunks=3}} go")
    assert (result["state"], result["attempt"]) == ("completed", 1)
    await connection.fetchval("SELECT 1")
    assert heard == []


async def test_slots_are_kept(settings: Settings, connection: asyncpg.Connection) -> None:
    few = settings.model_copy(update={"worker_slots": 3})
    async with run_service(few, with_worker=True) as service:
        await finish(service, "{{chunks=1}}")
        sent = [await send(service, "{{chunks=4 delay_ms=50}}") for _ in range(12)]
        most = 0

        async def are_done() -> bool:
            nonlocal most
            running = await connection.fetchval(
                "SELECT count(*) FROM results WHERE state = 'pending' AND worker_id IS NOT NULL"
            )
            most = max(most, running)
            results = await asyncio.gather(*(read(service, one["id"]) for one in sent))
            return all(result["state"] == "completed" for result in results)

        await until(are_done)
        # For as long as a claim is under way, there may be twice the slots; never more.
        assert most <= 6


@short_lease
@pytest.mark.trial
async def test_a_lost_confirmation_is_rescued_by_its_heartbeat(
    service: Service, connection: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Committed as claimed, and never started: as if the answer of the statement was lost."""
    await finish(service, "{{chunks=1}}")
    worker = service.services.queue.dispatcher
    assert worker is not None
    with monkeypatch.context() as patch:
        confirm = worker.confirm
        patch.setattr(worker, "confirm", lambda worker_id, _: confirm(worker_id, []))
        sent = await send(service, "{{chunks=2}} go")
    result = await read(service, sent["id"], wait=20)
    assert result["state"] == "completed"
    assert result["attempt"] == 2


async def test_the_others_of_a_keyed_group_do_not_begin_early(bench: Bench) -> None:
    """Its key decides whether the group is stored: none of its results may generate before."""
    dispatcher = Dispatcher(await bench.worker())
    bench.queue.dispatcher = dispatcher
    first = keyed("a")
    second = make_result(
        context_id=first.context_id,
        new_context=first.new_context,
        group_id=first.id,
        goes_with_key=True,
    )
    assert await bench.queue.enqueue([replace(first, group_id=first.id), second]) == [True, True]
    assert dispatcher.counts == [0]
    assert {claim.id for claim in dispatcher.started} == {first.id, second.id}
