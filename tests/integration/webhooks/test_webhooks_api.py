"""Webhooks from the API's side: who owes a delivery, the log, redelivery, secrets, refusals."""

import asyncio
import contextlib
import os
import re
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

import asyncpg
import httpx
import orjson
import pytest
from pydantic import SecretStr
from standardwebhooks import Webhook

from app.core.ids import new_id
from app.core.settings import Settings
from app.webhooks.delivery import message_id
from app.webhooks.outbox import Due, WebhookOutbox
from app.webhooks.sender import new_secret, sign
from tests.conftest import ROOT, Service, short_lease
from tests.integration.support import (
    UNKNOWN_ID,
    assert_problem,
    finish,
    read,
    send,
    serve,
    until,
    until_running,
)
from tests.integration.webhook_receiver import Receiver, answer, delivering, receiving, silence

URL = "https://hook.example/results"


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(
        update={"webhook_allow_private": True, "webhook_timeout_seconds": 2.0}
    )


async def owed(connection: asyncpg.Connection) -> dict[str, str]:
    """Deliveries by result: their state."""
    rows = await connection.fetch("SELECT result_id, url, state FROM webhook_deliveries")
    return {str(row["result_id"]): row["state"] for row in rows}


async def deliveries(service: Service, **query: str | int) -> list[dict[str, Any]]:
    answered = await service.client.get("/webhooks/deliveries", params=query)
    assert answered.status_code == 200, answered.text
    found: list[dict[str, Any]] = answered.json()
    return found


async def until_delivered(service: Service, result_id: str) -> dict[str, Any]:
    async def is_delivered() -> dict[str, Any] | None:
        (found,) = await deliveries(service, result_id=result_id)
        return found if found["state"] == "delivered" else None

    delivery: dict[str, Any] = await until(is_delivered)
    return delivery


# --- every way to the end ---------------------------------------------------------------------------


async def test_completed_and_failed_results_are_told_as_they_are_read(service: Service) -> None:
    async with receiving() as receiver:
        done = await finish(service, "x {{chunks=2}}", webhook_url=receiver.url)
        refused = await finish(service, "x {{fail_at=1}}", webhook_url=receiver.url)
        assert (done["state"], refused["state"]) == ("completed", "failed")
        for result in (done, refused):
            await until_delivered(service, result["id"])
        secret = (await service.client.get("/webhooks/secret")).json()["secret"]
        events = {call.id: call.verify(secret) for call in receiver.calls}
    assert len(receiver.calls) == 2
    for result in (done, refused):
        event = events[message_id(UUID(result["id"]))]
        assert event["type"] == f"result.{result['state']}"
        assert event["data"] == result
        assert event["timestamp"] == result["finished_at"]


async def test_a_cancelled_running_result_is_told(service: Service) -> None:
    async with receiving() as receiver:
        accepted = await send(service, "x {{chunks=2000 delay_ms=20}}", webhook_url=receiver.url)
        await until_running(service, accepted["id"])
        await service.client.post(f"/results/{accepted['id']}/cancel")
        await until_delivered(service, accepted["id"])
        event = orjson.loads(receiver.calls[0].body)
    assert (event["type"], event["data"]["error"]["code"]) == ("result.failed", "cancelled")


async def test_results_cancelled_in_the_queue_owe_one_delivery_each(
    api: Service, connection: asyncpg.Connection
) -> None:
    notified = [await send(api, "x", webhook_url=URL) for _ in range(3)]
    silent = await send(api, "x")
    assert await owed(connection) == {}
    for item in notified[:2]:
        answered = await api.client.post(f"/results/{item['id']}/cancel")
        assert answered.status_code == 200
    again = await api.client.post(f"/results/{notified[0]['id']}/cancel")
    assert again.status_code == 200
    await api.client.post("/results/cancel", params={"model_name": "scripted"})
    assert (await read(api, silent["id"]))["state"] == "failed"
    assert await owed(connection) == {item["id"]: "pending" for item in notified}


async def test_expired_results_owe_one_delivery_each(
    api: Service, connection: asyncpg.Connection
) -> None:
    notified = await send(api, "x", webhook_url=URL, deadline_seconds=0.1)
    await send(api, "x", deadline_seconds=0.1)
    result = await read(api, notified["id"], wait=60)
    assert result["error"]["code"] == "deadline_exceeded"
    assert await owed(connection) == {notified["id"]: "pending"}


@short_lease
@pytest.mark.trial
async def test_results_of_a_lost_worker_owe_one_delivery_when_they_end(
    api: Service, connection: asyncpg.Connection
) -> None:
    notified = [await send(api, "x", webhook_url=URL) for _ in range(2)]
    silent = await send(api, "x")
    lost = new_id()
    await connection.execute(
        "INSERT INTO workers (id, host, pid, lease_expires_at) VALUES ($1, 'h', 1, now())", lost
    )
    await connection.execute(
        "UPDATE results SET worker_id = $1, attempt = 1, started_at = now()", lost
    )
    # One has attempts left and is queued again: no event is sent.
    await connection.execute(
        "UPDATE results SET lost_attempts = 99 WHERE id = ANY($1::uuid[])",
        [notified[0]["id"], silent["id"]],
    )
    result = await read(api, notified[0]["id"], wait=20)
    assert result["error"]["code"] == "worker_lost"
    assert await owed(connection) == {notified[0]["id"]: "pending"}
    await api.client.post(f"/results/{notified[1]['id']}/cancel")
    assert await owed(connection) == {item["id"]: "pending" for item in notified}


async def test_a_delivery_is_there_whenever_the_end_is(
    service: Service, connection: asyncpg.Connection
) -> None:
    """In the same commit: no moment shows the one without the other."""
    watching = asyncio.Event()

    async def watch() -> int:
        seen = 0
        while not watching.is_set():
            row = await connection.fetchrow(
                """SELECT count(*) FILTER (WHERE r.state <> 'pending') AS ended,
                          count(d.*) AS owed
                   FROM results r LEFT JOIN webhook_deliveries d ON d.result_id = r.id"""
            )
            assert row is not None
            assert row["ended"] == row["owed"]
            seen += 1
        return seen

    task = asyncio.create_task(watch())
    async with receiving() as receiver:
        accepted = [
            await send(service, "x {{chunks=2}}", webhook_url=receiver.url) for _ in range(40)
        ]
        for item in accepted:
            await read(service, item["id"], wait=20)
        watching.set()
        assert await task > 10
        assert len(await owed(connection)) == 40


async def test_saved_contexts_and_lists_take_a_webhook(
    api: Service, connection: asyncpg.Connection
) -> None:
    context = (await api.client.post("/contexts/", json={"content": "x"})).json()
    answered = await api.client.post(
        f"/models/send/scripted/{context['id']}", json={"webhook_url": URL}
    )
    assert answered.status_code == 202
    items = [
        {"model": "scripted", "content": "x", "webhook_url": URL},
        {"model": "scripted", "content": "x", "webhook_url": "http://user@example.com/"},
        {"model": "scripted", "content": "x"},
    ]
    listed = (await api.client.post("/results/", json=items)).json()
    assert listed[1]["code"] == "invalid_request"
    rows = await connection.fetch("SELECT webhook_url FROM results ORDER BY id")
    assert [row["webhook_url"] for row in rows] == [URL, URL, None]


# --- what is refused --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("ftp://example.com/", "http"), ("http://user:pw@example.com/", "password"),
        ("http://127.0.0.1/", "LLM_WEBHOOK_ALLOW_PRIVATE"), ("http://[::1]:80/", "LLM_WEBHOOK"),
        ("http://localhost./", "LLM_WEBHOOK"), ("http://169.254.169.254/", "LLM_WEBHOOK"),
        ("http://0x7f.1/", "LLM_WEBHOOK"), ("https://" + "a" * 2048, "2048"), ("", "http"),
        (7, "string"), ("nonsense", "http"),
    ],
)  # fmt: skip
async def test_urls_that_lead_nowhere_good_are_refused_by_name(
    settings: Settings, connection: asyncpg.Connection, url: Any, words: str
) -> None:
    strict = settings.model_copy(update={"webhook_allow_private": False})
    async with serve(strict) as api:
        body = {"model": "scripted", "content": "x", "webhook_url": url}
        problem = assert_problem(
            await api.client.post("/results/", json=body), 422, "invalid_request", "webhook_url"
        )
    assert words in problem["errors"][0]["message"]
    assert await connection.fetchval("SELECT count(*) FROM contexts") == 0


# --- the log ----------------------------------------------------------------------------------------


@pytest.fixture
async def notified(api: Service, connection: asyncpg.Connection) -> list[str]:
    """Seven results that had a webhook, two delivered and two given up; the last of another team."""
    ids = [(await send(api, "x", webhook_url=URL))["id"] for _ in range(8)]
    await connection.execute("UPDATE results SET team_id = 'other' WHERE id = $1", ids[-1])
    for team in ("default", "other"):
        await api.services.queue.cancel(team, model_name="scripted")
    for state, some in (("delivered", ids[0:2]), ("failed", ids[2:4])):
        await connection.execute(
            "UPDATE webhook_deliveries SET state = $1, finished_at = now(), attempts = 3,"
            """ log = '[{"at": "2026-01-01T00:00:00Z", "status": 500, "error": "answered 500",
                "seconds": 0.1}]' WHERE result_id = ANY($2::uuid[])""",
            state, some,
        )  # fmt: skip
    return ids


async def test_deliveries_are_listed_newest_first_by_filter(
    api: Service, notified: list[str]
) -> None:
    own = notified[:-1]
    assert [item["id"] for item in await deliveries(api)] == own[::-1]
    for state, expected in (
        ("pending", own[4:]), ("failed", own[2:4]), ("delivered", own[:2]),
    ):  # fmt: skip
        found = await deliveries(api, state=state)
        assert [item["id"] for item in found] == expected[::-1]
        assert {item["state"] for item in found} == {state}
        assert all((item["next_attempt_at"] is not None) == (state == "pending") for item in found)
        assert all((item["finished_at"] is None) == (state == "pending") for item in found)
    (one,) = await deliveries(api, result_id=own[2])
    assert one == {
        "id": own[2], "result_id": own[2], "job_id": None, "url": URL, "state": "failed", "attempts": 3,
        "next_attempt_at": None, "created_at": one["created_at"],
        "finished_at": one["finished_at"],
        "log": [{"at": "2026-01-01T00:00:00Z", "status": 500, "error": "answered 500",
                 "seconds": 0.1}],
    }  # fmt: skip
    assert await deliveries(api, result_id=own[2], state="pending") == []
    assert await deliveries(api, result_id=UNKNOWN_ID) == []
    assert await deliveries(api, result_id=notified[-1]) == []


@pytest.mark.parametrize("query", [{}, {"state": "pending"}])
async def test_pages_lead_through_the_whole_list(
    api: Service, notified: list[str], query: dict[str, str | int]
) -> None:
    seen: list[str] = []
    answered = await api.client.get("/webhooks/deliveries", params=query | {"limit": 2})
    while True:
        seen += [item["id"] for item in answered.json()]
        if "next" not in answered.links:
            break
        answered = await api.client.get(answered.links["next"]["url"])
    assert seen == [item["id"] for item in await deliveries(api, **query)]


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("state=sent", "query.state"), ("limit=0", "query.limit"), ("limit=1001", "query.limit"),
        ("after=x", "query.after"), ("result_id=x", "query.result_id"),
    ],
)  # fmt: skip
async def test_wrong_filters_are_refused_by_name(api: Service, query: str, field: str) -> None:
    assert_problem(
        await api.client.get(f"/webhooks/deliveries?{query}"), 422, "invalid_request", field
    )


@pytest.mark.parametrize("whose", ["nobody's", "no id", "pending", "another team's"])
async def test_what_has_no_delivery_of_ours_cannot_be_repeated(
    api: Service, notified: list[str], connection: asyncpg.Connection, whose: str
) -> None:
    identifier = {"nobody's": UNKNOWN_ID, "no id": "nonsense", "another team's": notified[-1]}.get(
        whose
    )
    if identifier is None:
        identifier = (await send(api, "x", webhook_url=URL))["id"]
    before = await connection.fetch("SELECT * FROM webhook_deliveries ORDER BY result_id")
    answered = await api.client.post(f"/webhooks/deliveries/{identifier}/redeliver")
    assert_problem(answered, 404, "not_found")
    after = await connection.fetch("SELECT * FROM webhook_deliveries ORDER BY result_id")
    assert before == after


async def test_a_delivery_is_repeated_at_once_under_the_same_id(service: Service) -> None:
    async with receiving(answer(410)) as receiver:
        result = await finish(service, "x {{chunks=2}}", webhook_url=receiver.url)

        async def is_given_up() -> bool:
            (found,) = await deliveries(service, result_id=result["id"])
            return bool(found["state"] == "failed")

        await until(is_given_up)
        path = f"/webhooks/deliveries/{result['id']}/redeliver"
        answered = await service.client.post(path)
        assert answered.status_code == 202
        assert answered.json() | {"state": "pending", "attempts": 0} == answered.json()
        delivery = await until_delivered(service, result["id"])
        assert (delivery["attempts"], len(delivery["log"])) == (1, 2)
        # A delivered event may be sent again, too.
        assert (await service.client.post(path)).status_code == 202
        assert len((await until_delivered(service, result["id"]))["log"]) == 3
    assert {call.id for call in receiver.calls} == {message_id(UUID(result["id"]))}
    assert len(receiver.calls) == 3


# --- the secret -------------------------------------------------------------------------------------


async def test_the_secret_is_made_once_and_rotates(
    api: Service, connection: asyncpg.Connection
) -> None:
    answers = await asyncio.gather(*(api.client.get("/webhooks/secret") for _ in range(20)))
    first = answers[0].json()
    assert all(answered.json() == first for answered in answers)
    assert answers[0].headers["cache-control"] == "no-store"
    assert first["previous_valid_until"] is None
    Webhook(first["secret"])
    rotated = (await api.client.post("/webhooks/secret")).json()
    assert rotated["secret"] != first["secret"]
    assert rotated["previous_valid_until"] is not None
    assert rotated["rotated_at"] > first["rotated_at"]
    assert (await api.client.get("/webhooks/secret")).json() == rotated
    seconds = await connection.fetchval(
        "SELECT extract(epoch FROM previous_expires_at - now()) FROM webhook_secrets"
    )
    assert 86_000 < seconds <= 86_400
    assert (
        await connection.fetchval("SELECT previous_secret FROM webhook_secrets") == first["secret"]
    )


async def test_a_rotation_may_come_first(api: Service) -> None:
    made = (await api.client.post("/webhooks/secret")).json()
    assert made["previous_valid_until"] is None
    assert (await api.client.get("/webhooks/secret")).json() == made


# --- processes --------------------------------------------------------------------------------------


async def start_worker(settings: Settings) -> asyncio.subprocess.Process:
    names = {name: field.alias for name, field in Settings.model_fields.items()}
    values = {
        name: value.get_secret_value() if isinstance(value, SecretStr) else value
        for name, value in settings.model_dump().items()
    }
    environment = {
        str(names[name]): ",".join(value) if isinstance(value, list) else str(value)
        for name, value in values.items()
        if value is not None
    }
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "app", "worker", cwd=ROOT, env=os.environ | environment,
        stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip


async def came(receiver: Receiver, count: int) -> None:
    async def are_there() -> bool:
        return len(receiver.calls) >= count

    await until(are_there, seconds=30)


@pytest.mark.trial
async def test_a_delivery_whose_process_is_killed_is_told_again_under_the_same_id(
    api: Service, settings: Settings, connection: asyncpg.Connection
) -> None:
    async with receiving(silence) as receiver:
        worker = await start_worker(settings)
        try:
            accepted = await send(api, "x {{chunks=2}}", webhook_url=receiver.url)
            await came(receiver, 1)
            worker.send_signal(signal.SIGKILL)
            await worker.wait()
            (left,) = await deliveries(api)
            assert (left["state"], left["attempts"], left["log"]) == ("pending", 1, [])
            # It is due again by itself, once the call would have been over for long.
            seconds = await connection.fetchval(
                "SELECT extract(epoch FROM next_attempt_at - now()) FROM webhook_deliveries"
            )
            assert 0 < seconds <= settings.webhook_timeout_seconds + 15
            await connection.execute("UPDATE webhook_deliveries SET next_attempt_at = now()")
            worker = await start_worker(settings)
            delivery = await until_delivered(api, accepted["id"])
        finally:
            worker.terminate()
            await worker.wait()
    assert delivery["attempts"] == 2
    assert [call.id for call in receiver.calls] == [message_id(UUID(accepted["id"]))] * 2
    first, second = (orjson.loads(call.body) for call in receiver.calls)
    for event in (first, second):  # a worker that has just started has no model yet
        del event["data"]["model_ready"]
    assert first == second


async def test_the_documented_receiver_works(service: Service, tmp_path: Path) -> None:
    programs = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "webhooks.md").read_text(), re.DOTALL
    )
    (program,) = [text for text in programs if "standardwebhooks" in text]
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    assert "9000" in program
    (tmp_path / "receiver.py").write_text(program.replace("9000", str(port)))
    secret = (await service.client.get("/webhooks/secret")).json()["secret"]
    receiver = await asyncio.create_subprocess_exec(
        sys.executable, "receiver.py", cwd=tmp_path, env=os.environ | {"WEBHOOK_SECRET": secret},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:

        async def listens() -> bool:
            with contextlib.suppress(ConnectionRefusedError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                return True
            return False

        await until(listens)
        url = f"http://localhost:{port}/"
        result = await finish(service, "x {{chunks=2}}", webhook_url=url)
        await until_delivered(service, result["id"])
        assert receiver.stdout is not None
        line = (await receiver.stdout.readline()).decode()
        assert line == f"result.completed {result['id']} {result['result']}\n"
        # A forged message is refused.
        async with httpx.AsyncClient(trust_env=False) as forger:
            answered = await forger.post(
                url, content=b"{}", headers=sign([new_secret()], "x", b"{}")
            )
        assert answered.status_code == 400
    finally:
        receiver.terminate()
        await receiver.wait()


async def test_a_process_without_a_worker_does_not_deliver(
    api: Service, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It never looks for what is due, neither at its start nor at a notification."""
    looked: set[WebhookOutbox] = set()
    claim = WebhookOutbox.claim

    async def look(outbox: WebhookOutbox, *arguments: Any) -> Sequence[Due]:
        looked.add(outbox)
        return await claim(outbox, *arguments)

    monkeypatch.setattr(WebhookOutbox, "claim", look)
    async with receiving() as receiver:
        accepted = await send(api, "x", webhook_url=receiver.url)
        await api.client.post(f"/results/{accepted['id']}/cancel")
        async with delivering(settings) as services:
            await until_delivered(api, accepted["id"])
            assert looked == {services.outbox}
    assert len(receiver.calls) == 1
