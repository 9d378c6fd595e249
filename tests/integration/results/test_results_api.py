"""Results over HTTP: send, wait, list, cancel, delete, attempts, failures, deadlines."""

import asyncio
import secrets
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

import asyncpg
import pytest

from app.api.native import results as results_module
from app.core.ids import new_id
from tests.conftest import Service, run_service
from tests.integration.support import (
    UNKNOWN_ID,
    assert_problem,
    finish,
    read,
    send,
    until,
    until_running,
)

SLOW = "slow {{chunks=2000 delay_ms=20}}"
RESULT_MEMBERS = {
    "id", "kind", "context_id", "model_name", "model_version", "model_ready", "state", "result",
    "error", "finish_reason", "parameters", "usage", "attempt", "continued", "cancel_requested_at",
    "created_at", "updated_at", "started_at", "first_token_at", "finished_at", "metadata",
    "retry_of", "queue_position", "estimated_wait_seconds",
}  # fmt: skip


# --- send and keep ----------------------------------------------------------------------------------


async def test_a_result_has_the_contracts_members(service: Service) -> None:
    result = await finish(
        service, "hi {{chunks=3}}", metadata={"a": [1, None]}, parameters={"temperature": 0}
    )
    assert result.keys() == RESULT_MEMBERS
    assert result["parameters"] == {"max_tokens": 512, "temperature": 0}
    assert result["metadata"] == {"a": [1, None]}
    assert (result["state"], result["finish_reason"]) == ("completed", "stop")
    assert result["usage"] == {"prompt_tokens": 2, "completion_tokens": 3}
    assert result["updated_at"] == result["finished_at"]
    assert all(
        result[name].endswith(("Z", "+00:00"))
        for name in ("created_at", "updated_at", "started_at", "first_token_at", "finished_at")
    )


async def test_the_output_is_the_models_own(service: Service) -> None:
    """Byte for byte Triton's response to a direct request, without the prompt."""
    prompt, parameters = "Ωmega 🙂 {{chunks=40}}", {"max_tokens": 30, "seed": 5}
    result = await finish(service, prompt, parameters=parameters)
    pieces = [
        d.text
        async for d in service.services.server_pool.get("default").client.generate(
            "scripted", prompt, parameters
        )
    ]
    assert result["result"] == "".join(pieces)
    assert result["finish_reason"] == "length"


async def test_stop_and_seed_reach_the_model(service: Service) -> None:
    text = "{{text=one two three four}}"
    stopped = await finish(service, text, parameters={"stop": "three"})
    assert (stopped["result"], stopped["finish_reason"]) == ("one two ", "stop")
    kept = await finish(
        service, text, parameters={"stop": ["three"], "include_stop_str_in_output": True}
    )
    assert kept["result"] == "one two three"
    a, b, c = [
        (await finish(service, "same", parameters={"max_tokens": 5, "seed": seed}))["result"]
        for seed in (1, 1, 2)
    ]
    assert a == b != c


async def test_logprobs_are_stored_when_asked_for(service: Service) -> None:
    result = await finish(service, "hi {{chunks=3}}", parameters={"logprobs": 1})
    assert len(result["logprobs"]) == 3
    assert "logprobs" not in await finish(service, "hi {{chunks=3}}")


async def test_a_text_with_nul_is_stored(service: Service) -> None:
    result = await finish(service, "hi {{nul chunks=2}}")
    assert result["state"] == "completed"
    assert result["result"].startswith("\ufffd")
    assert "\0" not in result["result"]


async def test_logprobs_that_postgres_cannot_hold_end_the_result_all_the_same(
    service: Service,
) -> None:
    """A token that is NUL is NUL in its log probabilities too."""
    result = await finish(service, "hi {{nul chunks=2}}", parameters={"logprobs": 1})
    assert result["state"] == "completed"
    assert result["attempt"] == 1
    assert len(result["logprobs"]) == 2


async def test_send_a_saved_context_again_and_again(service: Service) -> None:
    context = (await service.client.post("/contexts/", json={"content": "x {{chunks=1}}"})).json()
    path = f"/models/send/scripted/{context['id']}"
    client = service.client
    sent = [
        await client.post(path),
        await client.post(path, json={}),
        await client.post(path, json={"metadata": {"k": 1}, "priority": -5}),
        await client.post(path, headers={"prefer": "respond-async, wait=20"}),
    ]
    assert [answer.status_code for answer in sent] == [202, 202, 202, 200]
    done = [await read(service, answer.json()["id"], wait=20) for answer in sent]
    assert {result["context_id"] for result in done} == {context["id"]}
    assert len({result["result"] for result in done}) == 1
    listed = await service.client.get("/results/", params={"context_id": context["id"]})
    assert len(listed.json()) == 4


@pytest.mark.trial
async def test_a_thousand_at_once(service: Service) -> None:
    items = [{"model": "scripted", "content": f"{n} {{{{chunks=2}}}}"} for n in range(1000)]
    answer = await service.client.post("/results/", json=items)
    assert answer.status_code == 202
    accepted = answer.json()
    assert len({item["id"] for item in accepted}) == 1000
    results = await asyncio.gather(*(read(service, item["id"], wait=60) for item in accepted))
    assert {result["state"] for result in results} == {"completed"}
    assert len({result["result"] for result in results}) == 1000


# --- wait -------------------------------------------------------------------------------------------


async def test_wait_returns_as_it_stands_when_the_time_is_over(api: Service) -> None:
    accepted = await send(api, "never")
    began = asyncio.get_running_loop().time()
    result = await read(api, accepted["id"], wait="0.3")
    assert 0.25 < asyncio.get_running_loop().time() - began < 20
    assert result["state"] == "pending"
    assert (await read(api, accepted["id"], wait=0))["state"] == "pending"


@pytest.mark.parametrize(
    ("prefer", "applied"),
    [("wait=1", "wait=1"), ("wait=0", "wait=0"), ('respond-async; wait="1"', "wait=1"),
     ("WAIT = 1", "wait=1"), ("await=1", None), ("wait=-1", None), ("wait=x", None), ("", None)],
)  # fmt: skip
async def test_prefer_wait(api: Service, prefer: str, applied: str | None) -> None:
    answer = await api.client.post(
        "/results/", json={"model": "scripted", "content": "x"}, headers={"prefer": prefer}
    )
    assert answer.status_code == 202
    assert answer.headers.get("preference-applied") == applied


async def test_a_long_prefer_is_cut_to_the_limit(api: Service) -> None:
    small = api.services.settings.model_copy(update={"max_wait_seconds": 0.2})
    async with run_service(small, with_worker=False) as running:
        answer = await running.client.post(
            "/results/", json={"model": "scripted", "content": "x"}, headers={"prefer": "wait=999"}
        )
        assert answer.status_code == 202
        assert answer.headers["preference-applied"].startswith("wait=0")
        too_long = await running.client.get(f"/results/{answer.json()['id']}?wait=1")
        assert_problem(too_long, 422, "invalid_request", "wait")


async def test_too_many_waiters_are_told(api: Service) -> None:
    small = api.services.settings.model_copy(update={"max_waiters": 2})
    async with run_service(small, with_worker=False) as running:
        accepted = await send(running, "x")
        path = f"/results/{accepted['id']}?wait=30"
        waiting = [asyncio.create_task(running.client.get(path)) for _ in range(2)]

        async def is_full() -> bool:
            return running.services.hub._waiters.count == 2

        await until(is_full)
        problem = assert_problem(await running.client.get(path), 503, "too_many_waiters")
        assert "LLM_MAX_WAITERS" in problem["detail"]
        cancelled = await running.client.post(f"/results/{accepted['id']}/cancel")
        assert cancelled.status_code == 200  # a cancel needs no place among the waiters
        for task in waiting:
            assert (await task).json()["state"] == "failed"


async def test_partial_text_while_running(service: Service) -> None:
    accepted = await send(service, SLOW)
    partial = await until_running(service, accepted["id"])
    assert partial["state"] == "pending"
    later = await until(lambda: longer(service, accepted["id"], partial["result"]))
    assert later["result"].startswith(partial["result"])
    assert (await read(service, accepted["id"]))["result"] is None
    cancelled = await service.client.post(f"/results/{accepted['id']}/cancel")
    final = cancelled.json()
    assert final["result"].startswith(later["result"])
    assert (await read(service, accepted["id"], partial=True))["result"] == final["result"]


async def longer(service: Service, result_id: str, than: str) -> dict[str, Any] | None:
    result = await read(service, result_id, partial=True)
    return result if len(result["result"]) > len(than) else None


# --- cancel -----------------------------------------------------------------------------------------


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancel that would wait for a minute: a sooner response proves a notification of the end."""
    monkeypatch.setattr(results_module, "_CANCEL_WAIT_SECONDS", 60.0)


async def test_cancel_of_a_queued_result_is_done_at_once(api: Service, patient: None) -> None:
    accepted = await send(api, "never")
    async with asyncio.timeout(20):
        answer = await api.client.post(f"/results/{accepted['id']}/cancel")
    assert answer.status_code == 200
    result = answer.json()
    assert (result["state"], result["error"]["code"]) == ("failed", "cancelled")
    assert result["error"]["retryable"] is False
    assert result["finish_reason"] == "cancelled"
    assert result["cancel_requested_at"] is not None
    again = await api.client.post(f"/results/{accepted['id']}/cancel")
    assert again.status_code == 200
    assert again.json() == result


async def test_cancel_of_a_running_result_stops_the_engine(service: Service, patient: None) -> None:
    accepted = await send(service, SLOW)
    partial = await until_running(service, accepted["id"])
    async with asyncio.timeout(20):
        answer = await service.client.post(f"/results/{accepted['id']}/cancel")
    assert answer.status_code == 200
    result = answer.json()
    assert (result["state"], result["error"]["code"]) == ("failed", "cancelled")
    assert result["result"].startswith(partial["result"])
    assert result["usage"]["completion_tokens"] == len(result["result"].split())
    assert result["usage"]["prompt_tokens"] > 0
    assert await read(service, accepted["id"]) == result


@pytest.mark.trial
async def test_cancel_without_a_worker_is_accepted_only(
    api: Service, connection: asyncpg.Connection
) -> None:
    accepted = await send(api, "never")
    await connection.execute("UPDATE results SET worker_id = $1, started_at = now()", new_id())
    answer = await api.client.post(f"/results/{accepted['id']}/cancel")
    assert answer.status_code == 202
    assert answer.json()["state"] == "pending"
    assert answer.json()["cancel_requested_at"] is not None


async def test_cancel_of_an_ended_result_changes_nothing(service: Service) -> None:
    result = await finish(service, "hi {{chunks=2}}")
    answer = await service.client.post(f"/results/{result['id']}/cancel")
    assert answer.status_code == 200
    assert answer.json() == result


async def test_cancel_by_filter(api: Service) -> None:
    context = (await api.client.post("/contexts/", json={"content": "x"})).json()["id"]
    for _ in range(3):
        await api.client.post(f"/models/send/scripted/{context}")
    other = await send(api, "y")
    by_context = await api.client.post("/results/cancel", params={"context_id": context})
    assert (by_context.status_code, by_context.json()) == (200, {"cancelled": 3})
    assert (await read(api, other["id"]))["state"] == "pending"
    nothing = await api.client.post("/results/cancel", params={"model_name": "nobody"})
    assert nothing.json() == {"cancelled": 0}
    by_model = await api.client.post("/results/cancel", params={"model_name": "scripted"})
    assert by_model.json() == {"cancelled": 1}
    assert (await read(api, other["id"]))["error"]["code"] == "cancelled"


# --- delete -----------------------------------------------------------------------------------------


async def test_delete_of_an_ended_result(service: Service) -> None:
    result = await finish(service, "hi {{chunks=1}}")
    answer = await service.client.delete(f"/results/{result['id']}")
    assert (answer.status_code, answer.content) == (204, b"")
    assert_problem(await service.client.get(f"/results/{result['id']}"), 404, "not_found")
    assert_problem(await service.client.delete(f"/results/{result['id']}"), 404, "not_found")
    context = await service.client.get(f"/contexts/{result['context_id']}")
    assert context.status_code == 200


async def test_delete_of_a_pending_result_needs_force(api: Service) -> None:
    accepted = await send(api, "never")
    assert_problem(await api.client.delete(f"/results/{accepted['id']}"), 409, "conflict")
    assert (await read(api, accepted["id"]))["state"] == "pending"
    answer = await api.client.delete(f"/results/{accepted['id']}?force=true")
    assert answer.status_code == 204


async def test_forced_delete_of_a_running_result_stops_it(
    service: Service, connection: asyncpg.Connection
) -> None:
    accepted = await send(service, SLOW)
    await until_running(service, accepted["id"])
    waiting = asyncio.create_task(service.client.get(f"/results/{accepted['id']}?wait=30"))
    answer = await service.client.delete(f"/results/{accepted['id']}?force=true")
    assert answer.status_code == 204

    async def is_idle() -> bool:
        models = (await service.client.get("/models/scripted")).json()
        rows = await connection.fetchval("SELECT count(*) FROM result_chunks")
        return bool(models["running"] == 0 and rows == 0)

    await until(is_idle)
    # A client that waited for it is notified as well, and not after thirty seconds.
    assert_problem(await asyncio.wait_for(waiting, 30), 404, "not_found")


# --- lists ------------------------------------------------------------------------------------------


async def walk(service: Service, path: str) -> list[dict[str, Any]]:
    """All rows of a list, following `Link: rel=next`."""
    rows: list[dict[str, Any]] = []
    following: str | None = path
    while following is not None:
        answer = await service.client.get(following)
        assert answer.status_code == 200, answer.text
        rows += answer.json()
        link = answer.links.get("next")
        following = link["url"] if link else None
        assert following is None or urlsplit(following).netloc == ""
    return rows


async def test_pages_walk_all_rows_once_while_rows_arrive(api: Service) -> None:
    items = [{"model": "scripted", "content": str(n)} for n in range(25)]
    ids = [item["id"] for item in (await api.client.post("/results/", json=items)).json()]
    first = await api.client.get("/results/?limit=10")
    assert [row["id"] for row in first.json()] == ids[:-11:-1]
    await send(api, "arrived between two pages")
    rest = await walk(api, first.links["next"]["url"])
    assert [row["id"] for row in first.json() + rest] == ids[::-1]
    assert len(await walk(api, "/results/?limit=1")) == 26
    assert len(await walk(api, "/results/?limit=13")) == 26
    assert len(await walk(api, "/results/?limit=26")) == 26
    assert await walk(api, f"/results/?after={ids[0]}") == []


async def test_a_page_keeps_its_filters(api: Service) -> None:
    items = [{"model": "scripted", "content": str(n)} for n in range(6)]
    accepted = (await api.client.post("/results/", json=items)).json()
    for item in accepted[:3]:
        await api.client.post(f"/results/{item['id']}/cancel")
    rows = await walk(api, "/results/?state=failed&limit=2&full=true")
    assert [row["id"] for row in rows] == [item["id"] for item in accepted[2::-1]]


async def test_list_filters(service: Service) -> None:
    done = await finish(service, "a {{chunks=1}}")
    failed = await finish(service, "b {{fail_at=1 chunks=2}}")
    refused = await finish(service, "c {{refuse}}")
    slow = await send(service, SLOW)

    async def ids(**query: str) -> set[str]:
        answer = await service.client.get("/results/", params=query)
        assert answer.status_code == 200, answer.text
        return {row["id"] for row in answer.json()}

    everything = {item["id"] for item in (done, failed, refused, slow)}
    assert await ids() == everything
    assert await ids(state="completed") == {done["id"]}
    assert await ids(state="failed") == {failed["id"], refused["id"]}
    assert await ids(state="pending") == {slow["id"]}
    assert await ids(model_name="scripted") == everything
    assert await ids(model_name="nobody") == set()
    assert await ids(context_id=done["context_id"]) == {done["id"]}
    assert await ids(context_id=UNKNOWN_ID) == set()
    assert await ids(error_code="model_error") == {failed["id"]}
    assert await ids(error_code="invalid_request") == {refused["id"]}
    assert await ids(error_code="nothing") == set()
    assert await ids(retryable="true") == {failed["id"]}
    assert await ids(retryable="false") == {refused["id"]}
    assert await ids(retryable="true", state="completed") == set()
    assert await ids(retryable="true", error_code="model_error", model_name="scripted") == {
        failed["id"]
    }
    assert await ids(created_after=refused["created_at"]) == {refused["id"], slow["id"]}
    assert await ids(created_before=refused["created_at"]) == {done["id"], failed["id"]}
    window = {"created_after": failed["created_at"], "created_before": slow["created_at"]}
    assert await ids(**window) == {failed["id"], refused["id"]}
    assert await ids(**window, state="failed", context_id=failed["context_id"]) == {failed["id"]}
    await service.client.post(f"/results/{slow['id']}/cancel")


async def test_lists_cut_long_texts_unless_full(service: Service) -> None:
    result = await finish(service, "long {{chunks=300}}", parameters={"logprobs": 1})
    assert len(result["result"]) > 1000
    assert result["logprobs"]
    (row,) = (await service.client.get("/results/")).json()
    assert row["result"] == result["result"][:1000]
    assert row["truncated"] is True
    assert "logprobs" not in row
    (full,) = (await service.client.get("/results/?full=true")).json()
    assert full == result


@pytest.mark.parametrize(("length", "is_cut"), [(1000, False), (1001, True)])
async def test_a_text_of_the_limits_length_is_not_truncated(
    service: Service, connection: asyncpg.Connection, length: int, is_cut: bool
) -> None:
    result = await finish(service, "exact {{chunks=1}}")
    await connection.execute(
        "UPDATE results SET output = repeat('é', $2) WHERE id = $1", UUID(result["id"]), length
    )
    (row,) = (await service.client.get("/results/")).json()
    assert (row["result"], row.get("truncated", False)) == ("é" * 1000, is_cut)


async def test_lists_tell_how_prompts_begin_if_asked(service: Service) -> None:
    await finish(service, "Grüße " * 50)
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    huge = [{"role": "user", "content": secrets.token_hex(100_000)}]
    for body in ({"messages": chat}, {"messages": huge}):
        sent = await service.client.post("/results/", json={"model": "scripted", **body})
        assert sent.status_code == 202, sent.text
    rows = (await service.client.get("/results/?prompts=true")).json()
    assert [row["prompt_start"] for row in rows] == [None, "Why?", ("Grüße " * 50)[:200]]
    found = (await service.client.get("/results/?prompts=true&model_name=scripted&limit=2")).json()
    assert [row["prompt_start"] for row in found] == [None, "Why?"]
    (plain, *_) = (await service.client.get("/results/")).json()
    assert "prompt_start" not in plain


# --- failures and attempts --------------------------------------------------------------------------


async def test_the_models_refusal_fails_at_once(service: Service) -> None:
    result = await finish(service, "x {{refuse}}")
    assert result["state"] == "failed"
    error = result["error"]
    assert (error["code"], error["retryable"]) == ("invalid_request", False)
    assert "refuses this prompt" in error["message"]
    assert result["result"] in ("", None)
    assert result["attempt"] == 1


async def test_a_models_error_keeps_the_text_before_it(service: Service) -> None:
    result = await finish(service, "x {{chunks=10 fail_at=4}}")
    error = result["error"]
    assert (error["code"], error["retryable"]) == ("model_error", True)
    assert "failed after 4 chunks" in error["message"]
    assert len(result["result"].split()) == 4
    assert result["usage"]["completion_tokens"] == 4
    assert result["finish_reason"] == "error"
    assert result["attempt"] == 1


async def test_a_lost_engine_is_tried_again_and_told_in_the_history(api: Service) -> None:
    small = api.services.settings.model_copy(update={"max_attempts": 2})
    async with run_service(small, with_worker=True) as running:
        result = await finish(running, "x {{chunks=10 lost_at=3}}")
        assert result["state"] == "failed"
        assert result["attempt"] == 2
        assert result["error"]["code"] in ("triton_lost", "engine_crashed")
        answer = await running.client.get(f"/results/{result['id']}/attempts")
        attempts = answer.json()
        assert [item["attempt"] for item in attempts] == [1, 2]
        assert all(item["counted"] and item["worker_id"] for item in attempts)
        assert {item["error"]["code"] for item in attempts} == {"triton_lost"}
        assert "lost its engine" in attempts[0]["error"]["message"]
        times = [item[name] for item in attempts for name in ("started_at", "ended_at")]
        assert times == sorted(times)


async def test_the_attempts_of_other_results(service: Service) -> None:
    async def attempts(result_id: str) -> Any:
        return (await service.client.get(f"/results/{result_id}/attempts")).json()

    done = await finish(service, "x {{chunks=1}}")
    (only,) = await attempts(done["id"])
    assert (only["attempt"], only["error"]) == (1, None)
    assert only["started_at"] == done["started_at"]
    assert only["ended_at"] == done["finished_at"]
    failed = await finish(service, "x {{fail_at=1 chunks=3}}")
    (only,) = await attempts(failed["id"])
    assert only["error"]["code"] == "model_error"
    slow = await send(service, SLOW)
    await until_running(service, slow["id"])
    (only,) = await attempts(slow["id"])
    assert (only["ended_at"], only["error"]) == (None, None)
    await service.client.post(f"/results/{slow['id']}/cancel")


async def test_attempts_of_a_queued_result_are_none(api: Service) -> None:
    accepted = await send(api, "x")
    answer = await api.client.get(f"/results/{accepted['id']}/attempts")
    assert (answer.status_code, answer.json()) == (200, [])


# --- deadlines and priorities -----------------------------------------------------------------------


async def test_a_queued_result_past_its_deadline_fails(api: Service) -> None:
    accepted = await send(api, "never", deadline_seconds=0.2)
    result = await read(api, accepted["id"], wait=20)
    assert (result["state"], result["error"]["code"]) == ("failed", "deadline_exceeded")
    assert result["error"]["retryable"] is True
    assert result["attempt"] == 0


@pytest.mark.trial
async def test_a_running_result_past_its_deadline_keeps_its_text(service: Service) -> None:
    accepted = await send(service, SLOW, deadline_seconds=3.0)
    result = await read(service, accepted["id"], wait=20)
    assert (result["state"], result["error"]["code"]) == ("failed", "deadline_exceeded")
    assert result["result"]
    assert result["usage"]["completion_tokens"] == len(result["result"].split())
    assert result["attempt"] == 1


async def test_priority_decides_who_runs_first(api: Service) -> None:
    low = [await send(api, f"low {n} {{{{chunks=1}}}}", priority=-10) for n in range(3)]
    high = [await send(api, f"high {n} {{{{chunks=1}}}}") for n in range(3)]
    one_slot = api.services.settings.model_copy(update={"worker_slots": 1})
    async with run_service(one_slot, with_worker=True) as running:
        done = [await read(running, item["id"], wait=30) for item in high + low]
    started = [result["started_at"] for result in done]
    assert started == sorted(started)


async def test_the_queues_bound(api: Service) -> None:
    small = api.services.settings.model_copy(update={"max_queued": 3})
    async with run_service(small, with_worker=False) as running:
        for n in range(3):
            await send(running, str(n))
        answer = await running.client.post("/results/", json={"model": "scripted", "content": "x"})
        problem = assert_problem(answer, 429, "queue_full")
        assert "LLM_MAX_QUEUED" in problem["detail"]
        assert int(answer.headers["retry-after"]) > 0
        assert len((await running.client.get("/results/")).json()) == 3


async def test_a_long_result_is_read_whole(service: Service) -> None:
    words = " ".join(f"{number * 2_654_435_761 % 2**24:06x}" for number in range(20_000))
    prompt = f"print {{{{text={words}}}}}"
    long = await finish(service, prompt, parameters={"max_tokens": 20_000})
    short = await finish(service, "x")
    assert long["result"].split() == words.split()
    both = [long, short] * 5
    assert await asyncio.gather(*(read(service, result["id"]) for result in both)) == both
