"""Idempotency keys: the same request is one result at any timing; another one is refused."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import UUID

import asyncpg
import httpx
import pytest

from app.core.ids import new_id
from app.core.settings import Settings
from app.queue.idempotency import TakenKey, hash_request
from tests.conftest import Service, connect, run_service
from tests.integration.support import UNKNOWN_ID, assert_problem, finish, read, until

BODY = {"model": "scripted", "content": "once {{chunks=1}}"}
OTHER = BODY | {"content": "another {{chunks=1}}"}


async def post(
    service: Service, body: object, key: str | None = None, **more: str
) -> httpx.Response:
    headers = more | ({} if key is None else {"idempotency-key": key})
    return await service.client.post("/results/", json=body, headers=headers)


async def stored(connection: asyncpg.Connection) -> tuple[int, int, int]:
    """The numbers of contexts, results and keys."""
    row = await connection.fetchrow(
        """SELECT (SELECT count(*) FROM contexts), (SELECT count(*) FROM results),
                  (SELECT count(*) FROM idempotency_keys)"""
    )
    assert row is not None
    return row[0], row[1], row[2]


# --- one after the other ----------------------------------------------------------------------------


async def test_the_same_request_again_is_the_same_result(
    service: Service, connection: asyncpg.Connection
) -> None:
    first = await post(service, BODY, "k")
    assert first.status_code == 202
    assert first.headers["retry-after"] == "1"
    assert "idempotent-replayed" not in first.headers
    accepted = first.json()
    done = await read(service, accepted["id"], wait=20)
    again = await post(service, BODY, "k")
    assert again.status_code == 200  # terminal by now, and returned as it is
    assert again.headers["idempotent-replayed"] == "true"
    assert again.headers["location"] == first.headers["location"]
    assert "retry-after" not in again.headers
    assert again.json() == done
    assert await stored(connection) == (1, 1, 1)


async def test_a_pending_result_is_told_as_pending(api: Service) -> None:
    first = await post(api, BODY, "k")
    again = await post(api, BODY, "k")
    assert (again.status_code, again.headers["retry-after"]) == (202, "1")
    assert again.headers["idempotent-replayed"] == "true"
    assert again.json() == first.json()


async def test_a_replay_can_wait_for_the_end(service: Service) -> None:
    body = BODY | {"content": "x {{chunks=20 delay_ms=30}}"}
    first = await post(service, body, "k")
    again = await post(service, body, "k", prefer="wait=20")
    assert (again.status_code, again.json()["state"]) == (200, "completed")
    assert again.json()["id"] == first.json()["id"]
    assert again.headers["preference-applied"] == "wait=20"


@pytest.mark.parametrize(
    "other",
    [
        OTHER,
        BODY | {"priority": -1},
        BODY | {"metadata": {"a": 1}},
        BODY | {"deadline_seconds": 5},
        BODY | {"parameters": {"max_tokens": 512}},
        {"model": "scripted", "messages": [{"role": "user", "content": BODY["content"]}]},
    ],
)
async def test_another_request_is_refused_with_the_first_id(
    api: Service, connection: asyncpg.Connection, other: dict[str, Any]
) -> None:
    first = (await post(api, BODY, "k")).json()
    problem = assert_problem(await post(api, other, "k"), 409, "idempotency_conflict")
    assert problem["result_id"] == first["id"]
    assert await stored(connection) == (1, 1, 1)


async def test_what_is_the_same_request(api: Service, connection: asyncpg.Connection) -> None:
    """Order, written-out defaults and the way the key is sent make no other request."""
    first = (await post(api, BODY | {"metadata": {"a": 1, "b": {"c": 2, "d": 3}}}, "k")).json()
    same: list[dict[str, Any]] = [
        {"metadata": {"b": {"d": 3, "c": 2}, "a": 1}} | BODY,
        BODY | {"metadata": {"a": 1, "b": {"c": 2, "d": 3}}, "priority": 0, "parameters": {}},
        BODY
        | {"metadata": {"a": 1, "b": {"c": 2, "d": 3}}, "parameters": {"temperature": None}}
        | {"deadline_seconds": None},
    ]
    for body in same:
        assert (await post(api, body, "k")).json()["id"] == first["id"]
        assert (await post(api, body | {"idempotency_key": "k"})).json()["id"] == first["id"]
        both = await post(api, body | {"idempotency_key": "k"}, "k")
        assert both.json()["id"] == first["id"]
    assert await stored(connection) == (1, 1, 1)


async def test_a_saved_context_is_the_same_on_both_paths(api: Service) -> None:
    context = (await api.client.post("/contexts/", json={"content": "x"})).json()["id"]
    path, key = f"/models/send/scripted/{context}", {"idempotency-key": "k"}
    first = await api.client.post(path, headers=key)
    again = [
        await api.client.post(path, json={"idempotency_key": "k"}),
        await api.client.post(path, headers=key, json={}),
        await post(api, {"model": "scripted", "context_id": context}, "k"),
    ]
    assert {answer.json()["id"] for answer in again} == {first.json()["id"]}
    other = await api.client.post(path, headers=key, json={"priority": -2})
    assert_problem(other, 409, "idempotency_conflict")


async def test_keys_of_other_teams_are_other_keys(
    api: Service, connection: asyncpg.Connection
) -> None:
    context, result = new_id(), new_id()
    await connection.execute(
        "INSERT INTO contexts (id, team_id, content) VALUES ($1, 'other', 'x')", context
    )
    await connection.execute(
        "INSERT INTO results (id, team_id, context_id, model_name, parameters, deadline_at)"
        " VALUES ($1, 'other', $2, 'scripted', '{}', now() + interval '1 h')",
        result,
        context,
    )
    await connection.execute(
        "INSERT INTO idempotency_keys VALUES ('other', 'k', $1, $2, now() + interval '1 h')",
        hash_request(BODY),
        result,
    )
    answer = await post(api, BODY, "k")
    assert answer.status_code == 202
    assert answer.json()["id"] != str(result)
    assert await stored(connection) == (2, 2, 2)


async def test_an_expired_key_is_free(api: Service, connection: asyncpg.Connection) -> None:
    first = (await post(api, BODY, "k")).json()
    left = await connection.fetchval(
        "SELECT extract(epoch FROM expires_at - now()) FROM idempotency_keys"
    )
    assert 86_300 < left <= 86_400
    await connection.execute("UPDATE idempotency_keys SET expires_at = now()")
    second = await post(api, OTHER, "k")
    assert second.status_code == 202
    assert second.json()["id"] != first["id"]
    problem = assert_problem(await post(api, BODY, "k"), 409, "idempotency_conflict")
    assert problem["result_id"] == second.json()["id"]
    assert await stored(connection) == (2, 2, 1)


async def test_expired_keys_are_removed_and_no_others(
    api: Service, connection: asyncpg.Connection
) -> None:
    items = [BODY | {"idempotency_key": f"key {n}"} for n in range(1000)]
    assert (await post(api, items)).status_code == 202
    for n in range(5):
        await post(api, BODY, f"kept {n}")
    await connection.execute(
        "UPDATE idempotency_keys SET expires_at = now() WHERE key LIKE 'key %'"
    )
    async with connection.transaction():  # the transaction that holds one is not waited for
        await connection.execute("SELECT FROM idempotency_keys WHERE key = 'key 7' FOR UPDATE")
        removals = [api.services.keys.remove_expired() for _ in range(3)]
        assert sum(await asyncio.wait_for(asyncio.gather(*removals), 60)) == 999
    assert await api.services.keys.remove_expired() == 1
    assert await stored(connection) == (1005, 1005, 5)


async def test_every_process_removes_expired_keys(
    settings: Settings, connection: asyncpg.Connection
) -> None:
    async with run_service(settings, with_worker=False) as service:
        await post(service, BODY, "k")
        await connection.execute("UPDATE idempotency_keys SET expires_at = now()")

    async def is_gone() -> bool:
        return await stored(connection) == (1, 1, 0)

    async with run_service(settings, with_worker=False):
        await until(is_gone)


async def test_a_deleted_result_frees_its_key(api: Service, connection: asyncpg.Connection) -> None:
    first = (await post(api, BODY, "k")).json()
    await api.client.delete(f"/results/{first['id']}?force=true")
    second = await post(api, OTHER, "k")
    assert second.status_code == 202
    await api.client.delete(f"/contexts/{second.json()['context_id']}?force=true")
    assert (await post(api, BODY, "k")).status_code == 202
    assert await stored(connection) == (2, 1, 1)


async def test_a_request_that_is_refused_leaves_its_key_free(
    settings: Settings, connection: asyncpg.Connection, tmp_path: Path
) -> None:
    text_only = settings.model_copy(update={"model_repository": tmp_path})
    async with run_service(text_only, with_worker=False) as api:
        await refuse_in_turn(api, connection)


async def refuse_in_turn(api: Service, connection: asyncpg.Connection) -> None:
    missing = await post(api, {"model": "scripted", "context_id": UNKNOWN_ID}, "k")
    assert_problem(missing, 404, "not_found")
    chat = {"messages": [{"role": "user", "content": "x"}]}
    context = (await api.client.post("/contexts/", json=chat)).json()["id"]
    unrendered = await post(api, {"model": "scripted", "context_id": context}, "k")
    assert_problem(unrendered, 422, "invalid_request", "messages")
    assert_problem(await post(api, BODY | {"model": "nobody"}, "k"), 404, "unknown_model")
    assert await stored(connection) == (1, 0, 0)
    assert (await post(api, BODY, "k")).status_code == 202


async def test_a_full_queue_still_knows_its_keys(settings: Settings) -> None:
    full = settings.model_copy(update={"max_queued": 1})
    async with run_service(full, with_worker=False) as service:
        first = (await post(service, BODY, "k")).json()
        assert_problem(await post(service, BODY, "other"), 429, "queue_full")
        assert (await post(service, BODY, "k")).json()["id"] == first["id"]
        assert_problem(await post(service, OTHER, "k"), 409, "idempotency_conflict")


# --- lists ------------------------------------------------------------------------------------------


async def test_keys_in_a_list(api: Service, connection: asyncpg.Connection) -> None:
    before = (await post(api, BODY, "before")).json()
    items: list[object] = [
        BODY | {"idempotency_key": "a"},
        OTHER,
        BODY | {"idempotency_key": "a"},
        OTHER | {"idempotency_key": "a"},
        BODY | {"idempotency_key": "before"},
        OTHER | {"idempotency_key": "before"},
        {"model": "scripted", "context_id": UNKNOWN_ID, "idempotency_key": "m"},
        BODY | {"idempotency_key": ""},
        BODY | {"idempotency_key": "b"},
    ]
    answer = await post(api, items)
    assert answer.status_code == 202
    one, plain, same, conflict, old, old_conflict, missing, bad, late = answer.json()
    assert one["state"] == plain["state"] == late["state"] == "pending"
    assert same == one
    assert old["id"] == before["id"]
    assert (conflict["code"], conflict["result_id"]) == ("idempotency_conflict", one["id"])
    assert (old_conflict["status"], old_conflict["result_id"]) == (409, before["id"])
    assert (missing["code"], bad["code"]) == ("not_found", "invalid_request")
    assert await stored(connection) == (4, 4, 3)
    again = (await post(api, items)).json()
    assert again[0] == one
    assert again[8]["id"] == late["id"]
    assert await stored(connection) == (5, 5, 3)  # the one without a key is new


# --- at the same moment -----------------------------------------------------------------------------


@pytest.fixture
async def replicas(settings: Settings) -> AsyncIterator[list[Service]]:
    """Two of the API, each with its own connections and group commit."""
    async with (
        run_service(settings, with_worker=False) as one,
        run_service(settings, with_worker=False) as two,
    ):
        yield [one, two]


@pytest.mark.parametrize("count", [1, 2])
async def test_the_same_request_many_times_at_once(
    replicas: list[Service], connection: asyncpg.Connection, count: int
) -> None:
    for key in ("k", "l", "m"):
        sent = [post(replicas[n % count], BODY, key) for n in range(60)]
        answers = await asyncio.gather(*sent)
        assert {answer.status_code for answer in answers} == {202}
        assert len({answer.json()["id"] for answer in answers}) == 1
        new = [answer for answer in answers if "idempotent-replayed" not in answer.headers]
        assert len(new) == 1
    assert await stored(connection) == (3, 3, 3)


@pytest.mark.parametrize("count", [1, 2])
async def test_other_requests_at_the_same_moment(
    replicas: list[Service], connection: asyncpg.Connection, count: int
) -> None:
    """Exactly one body wins; the others receive its id."""
    sent = [post(replicas[n % count], BODY | {"content": f"body {n % 5}"}, "k") for n in range(50)]
    answers = await asyncio.gather(*sent)
    (winner,) = {answer.json()["id"] for answer in answers if answer.status_code == 202}
    assert sum(answer.status_code == 202 for answer in answers) == 10
    for answer in answers:
        if answer.status_code != 202:
            problem = assert_problem(answer, 409, "idempotency_conflict")
            assert problem["result_id"] == winner
    assert await stored(connection) == (1, 1, 1)


async def test_many_keys_in_any_order_lock_nobody_out(
    replicas: list[Service], connection: asyncpg.Connection
) -> None:
    """Lists that take the same keys in opposite orders: nothing waits for a deadlock to be found."""
    items = [BODY | {"idempotency_key": f"key {n}", "priority": -(n % 3)} for n in range(100)]
    began = asyncio.get_running_loop().time()
    answers = await asyncio.gather(
        *(post(service, items[::step]) for service in replicas for step in (1, -1) * 3)
    )
    assert asyncio.get_running_loop().time() - began < 20
    ids = [[item["id"] for item in answer.json()] for answer in answers]
    for step in (0, 1):
        assert all(one[:: 1 - 2 * step] == ids[0] for one in ids[step::2])
    assert await stored(connection) == (100, 100, 100)
    deadlocks = await connection.fetchval(
        "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
    )
    assert deadlocks == 0


@pytest.mark.parametrize("is_committed", [True, False])
async def test_a_key_that_somebody_is_taking_is_waited_for(
    api: Service, connection: asyncpg.Connection, is_committed: bool
) -> None:
    """The statement's snapshot knows nothing of the other's row; its commit decides all the same."""
    other = await connect(api.services.settings)
    context, result = new_id(), new_id()
    transaction = other.transaction()
    await transaction.start()
    await other.execute("INSERT INTO contexts (id, content) VALUES ($1, 'x')", context)
    await other.execute(
        "INSERT INTO results (id, context_id, model_name, parameters, deadline_at)"
        " VALUES ($1, $2, 'scripted', '{}', now() + interval '1 h')",
        result,
        context,
    )
    await other.execute(
        "INSERT INTO idempotency_keys VALUES ('default', 'k', 'hash', $1, now() + interval '1 h')",
        result,
    )
    sending = asyncio.create_task(post(api, BODY, "k"))

    async def is_waiting() -> bool:
        return bool(
            await connection.fetchval(
                "SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted AND pid IN ("
                " SELECT pid FROM pg_stat_activity WHERE datname = current_database()))"
            )
        )

    await until(is_waiting)
    await (transaction.commit() if is_committed else transaction.rollback())
    await other.close()
    answer = await sending
    if is_committed:
        problem = assert_problem(answer, 409, "idempotency_conflict")
        assert problem["result_id"] == str(result)
    else:
        assert answer.status_code == 202
    assert await stored(connection) == (1, 1, 1)


async def test_a_key_freed_while_it_is_looked_up(
    api: Service, connection: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused for a result that is deleted before it can be named: the request is sent again."""
    find, looks = api.services.keys.find, 0

    async def find_between(team_id: str, key: str) -> TakenKey | None:
        nonlocal looks
        looks += 1
        if looks == 1:  # no replica has it yet; then another replica takes it
            found = await find(team_id, key)
            async with run_service(api.services.settings, with_worker=False) as replica:
                assert (await post(replica, OTHER, "k")).status_code == 202
            return found
        await connection.execute("DELETE FROM results WHERE id <> ALL($1::uuid[])", list[UUID]())
        return await find(team_id, key)

    monkeypatch.setattr(type(api.services.keys), "find", lambda _, *given: find_between(*given))
    answer = await post(api, BODY, "k")
    monkeypatch.undo()
    assert answer.status_code == 202, answer.text
    assert "idempotent-replayed" not in answer.headers
    assert (await post(api, BODY, "k")).json()["id"] == answer.json()["id"]


async def test_deletes_and_repeats_at_the_same_time(
    replicas: list[Service], connection: asyncpg.Connection
) -> None:
    """Each 202 names a result that existed; no key names a missing one."""
    one, two = replicas

    async def send(service: Service) -> None:
        for _ in range(30):
            answer = await post(service, BODY, "k")
            assert answer.status_code == 202, answer.text

    async def delete() -> None:
        for _ in range(30):
            for row in (await two.client.get("/results/")).json():
                answer = await two.client.delete(f"/results/{row['id']}?force=true")
                assert answer.status_code in (204, 404), answer.text

    await asyncio.gather(send(one), send(two), delete())
    assert (await post(one, BODY, "k")).status_code == 202
    assert (await stored(connection))[1:] == (1, 1)


# --- bad keys ---------------------------------------------------------------------------------------

BAD_KEYS = ["", "x" * 256, "a\x00b", "a\nb", "\x1f", "\x7f", "\u0085"]


@pytest.mark.parametrize("key", BAD_KEYS, ids=ascii)
async def test_bad_keys_in_a_body(api: Service, connection: asyncpg.Connection, key: str) -> None:
    answer = await post(api, BODY | {"idempotency_key": key})
    assert_problem(answer, 422, "invalid_request", "idempotency_key")
    assert await stored(connection) == (0, 0, 0)


@pytest.mark.parametrize("key", [*(key.encode() for key in BAD_KEYS), b"\xff\xfe"], ids=ascii)
async def test_bad_keys_in_a_header(
    api: Service, connection: asyncpg.Connection, key: bytes
) -> None:
    # No real server lets control characters through; the service does not rely on that.
    for path in ("/results/", f"/results/{UNKNOWN_ID}/retry"):
        answer = await api.client.post(path, json=BODY, headers={b"idempotency-key": key})
        assert_problem(answer, 422, "invalid_request", "Idempotency-Key")
    assert await stored(connection) == (0, 0, 0)


async def test_keys_that_contradict_each_other(
    api: Service, connection: asyncpg.Connection
) -> None:
    differs = await post(api, BODY | {"idempotency_key": "a"}, "b")
    assert_problem(differs, 422, "invalid_request", "Idempotency-Key")
    two = await api.client.post(
        "/results/", json=BODY, headers=[("idempotency-key", "a"), ("idempotency-key", "b")]
    )
    assert_problem(two, 422, "invalid_request", "Idempotency-Key")
    for_many = assert_problem(await post(api, [BODY], "a"), 422, "invalid_request")
    assert for_many["errors"][0]["field"] == "Idempotency-Key"
    assert "each item" in for_many["detail"]
    assert await stored(connection) == (0, 0, 0)


@pytest.mark.parametrize("key", ["x" * 255, 'Ω 🙂 "quoted", with: all; kinds', " ", "'; --"])
async def test_odd_keys_are_keys(api: Service, key: str) -> None:
    first = await post(api, BODY | {"idempotency_key": key})
    assert first.status_code == 202
    if key.strip():  # HTTP strips the spaces around a header's value
        again = await api.client.post(
            "/results/", json=BODY, headers={b"idempotency-key": key.encode()}
        )
        assert again.json()["id"] == first.json()["id"]


async def test_requests_without_a_key_are_all_new(
    service: Service, connection: asyncpg.Connection
) -> None:
    ids = {(await finish(service, "x {{chunks=1}}"))["id"] for _ in range(2)}
    assert len(ids) == 2
    assert await stored(connection) == (2, 2, 0)
