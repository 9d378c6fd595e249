"""Each result is stored with its own values, also beside others in one statement."""

from dataclasses import fields, replace
from typing import Any

import orjson
import pytest

from app.core.ids import new_id
from app.queue.enqueue import NewContext, NewResult
from app.queue.idempotency import NewKey
from app.queue.team_limits import Limits
from tests.integration.queue.dispatcher import Dispatcher
from tests.integration.queue.queue_bench import Bench, make_result

_UNSTORED = {
    *("new_context", "key", "job", "goes_with_key", "tokens", "limits"),
    *("expected_bytes", "has_images"),
}
_JSON = {"parameters", "metadata", "request", "attribution"}
# A value for each member, none of which is its default.
_OTHER: dict[str, Any] = {
    "team_id": "another",
    "model_name": "another",
    "parameters": '{"max_tokens": 7, "stop": ["\\"", "\\\\", "é"]}',
    "deadline_seconds": 7.0,
    "model_version": 7,
    "prompt": "another",
    "priority": 7,
    "metadata": '{"a": null}',
    "group_id": new_id(),
    "retry_of": new_id(),
    "webhook_url": "https://example.org",
    "on_disconnect": "cancel",
    "waiter_id": new_id(),
    "request": '{"user": "u"}',
    "store": False,
    "kind": "attribution",
    "attribution": '{"queue": "q"}',
    "retain_seconds": 7.0,
    "trace": "00-1-1-01",
    "resumable": True,
    "token_id": "llm_7",
    "reuse_digest": b"another",
}


def of_team(team: str, **members: Any) -> NewResult:
    context = NewContext(new_id(), team, "a prompt", None, "{}")
    return make_result(team_id=team, context_id=context.id, new_context=context, **members)


async def assert_stored(bench: Bench, result: NewResult) -> None:
    row = await bench.row(result.id)
    for name in {field.name for field in fields(NewResult)} - _UNSTORED:
        sent, stored = getattr(result, name), row[name]
        if name in _JSON and sent is not None:
            sent, stored = orjson.loads(sent), orjson.loads(stored)
        assert stored == sent, name
    deadline = await bench.connection.fetchval(
        "SELECT deadline_at > now() + make_interval(secs => $2 - 60) FROM results WHERE id = $1",
        *(result.id, result.deadline_seconds),
    )
    assert deadline


async def different(bench: Bench) -> list[NewResult]:
    """Results each of which differs from the first in one member."""
    (source,) = await bench.add()
    results = [make_result()]
    for name, value in _OTHER.items():
        others = {name: value}
        results.append(of_team(others.pop("team_id", "default"), **others))
    context_id = results[0].context_id
    return [
        *results,
        make_result(source_id=source),
        make_result(),
        replace(results[0], id=new_id(), prompt="of the same context", context_id=context_id),
    ]


async def test_in_one_statement(bench: Bench) -> None:
    results = await different(bench)
    assert set(_OTHER) | {"id", "context_id", "source_id"} | _UNSTORED == {
        field.name for field in fields(NewResult)
    }
    assert all(await bench.queue.enqueue(results))
    for result in results:
        await assert_stored(bench, result)


async def test_nothing_is_a_statement_of_nothing(bench: Bench) -> None:
    assert await bench.queue.enqueue([]) == []


async def test_each_alone(bench: Bench) -> None:
    for result in await different(bench):
        assert await bench.queue.enqueue([result]) == [True]
        await assert_stored(bench, result)


async def test_each_alone_with_a_key_in_its_stored_context(bench: Bench) -> None:
    for number, result in enumerate(await different(bench)):
        if result.kind == "generation" and result.team_id == "default":
            await bench.queue.enqueue([replace(result, id=new_id(), group_id=None)])
            again = replace(result, new_context=None, key=NewKey(f"{number}", b"hash", 60.0))
            assert await bench.queue.enqueue([again]) == [True]
            await assert_stored(bench, again)


@pytest.mark.parametrize("alone", [True, False])
async def test_claimed_ones_too(bench: Bench, alone: bool) -> None:
    dispatcher = Dispatcher(await bench.worker())
    bench.queue.dispatcher = dispatcher
    results = await different(bench)
    for batch in [[one] for one in results] if alone else [results]:
        assert all(await bench.queue.enqueue(batch))
    for result in results:
        await assert_stored(bench, result)
    claims = {claim.id: claim for claim in dispatcher.started}
    assert {result.id for result in results} < set(claims)
    for result in results:
        assert claims[result.id].prompt == result.prompt or result.prompt is None


@pytest.mark.parametrize("is_new", [True, False])
async def test_a_context_of_another_team_is_missing(bench: Bench, is_new: bool) -> None:
    """Alone and beside results that have one; a missing one takes no place in the queue."""
    (known,) = [make_result()]
    await bench.queue.enqueue([known])
    stored = [
        make_result() if is_new else replace(known, id=new_id(), new_context=None) for _ in "ab"
    ]
    missing = make_result(context_id=known.context_id, new_context=None, team_id="another")
    assert await bench.queue.enqueue([missing]) == [False]
    # By their ids it stands between them.
    missing = replace(missing, id=new_id(), team_id="default", context_id=new_id())
    last = replace(stored[1], id=new_id())
    assert await bench.queue.enqueue([stored[0], missing, last]) == [True, False, True]
    keys = [(await bench.row(one.id))["fair_key"] for one in (known, stored[0], last)]
    assert keys == [0.0, 1.0, 2.0]


async def test_the_step_of_a_weight(bench: Bench) -> None:
    heavy = [make_result(limits=Limits(weight=4.0)) for _ in range(3)]
    light = [of_team("another", limits=Limits(weight=0.5)) for _ in range(2)]
    assert all(await bench.queue.enqueue([*heavy, *light]))
    keys = [(await bench.row(one.id))["fair_key"] for one in (*heavy, *light)]
    assert keys == [0.0, 0.25, 0.5, 0.0, 2.0]
    (alone,) = [of_team("another", limits=Limits(weight=0.5))]
    await bench.queue.enqueue([alone])
    assert (await bench.row(alone.id))["fair_key"] == 4.0
