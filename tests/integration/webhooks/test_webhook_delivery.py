"""Deliveries to real receivers that fail, hang, go away, come back, and lie."""

import asyncio
import socket
import ssl
import subprocess
from collections import Counter
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import asyncpg
import orjson
import pytest

from app.api.container import Services, open_services
from app.core.ids import new_id
from app.core.settings import Settings
from app.webhooks.delivery import WebhookDeliverer, message_id
from app.webhooks.outbox import Due, Verdict
from tests.conftest import make_settings
from tests.integration.support import until
from tests.integration.webhook_receiver import (
    Call,
    Receiver,
    answer,
    delivering,
    receiving,
    silence,
)
from tests.postgres import PostgresServer

TEAM = "default"


@pytest.fixture
def settings(postgres_server: PostgresServer, database_name: str) -> Settings:
    """Receivers are here; no Triton is needed."""
    return make_settings(
        postgres_server, database_name, webhook_allow_private=True, webhook_timeout_seconds=10.0
    )


async def owe(
    connection: asyncpg.Connection, url: str, count: int = 1, team: str = TEAM
) -> list[UUID]:
    """Failed results with a webhook, and their due deliveries."""
    context, ids = new_id(), [new_id() for _ in range(count)]
    await connection.execute(
        "INSERT INTO contexts (id, team_id, content) VALUES ($1, $2, 'x')", context, team
    )
    await connection.execute(
        """WITH ended AS (
             INSERT INTO results (id, team_id, context_id, model_name, parameters, deadline_at,
                                  state, finished_at, error_code, error_message, error_retryable)
             SELECT id, $3, $2, 'm', '{}', now(), 'failed', now(), 'cancelled', 'why', false
             FROM unnest($1::uuid[]) AS i(id) RETURNING id
           ) INSERT INTO webhook_deliveries (result_id, team_id, url) SELECT id, $3, $4 FROM ended""",
        ids, context, team, url,
    )  # fmt: skip
    await connection.execute("SELECT pg_notify('llm_webhooks', '')")
    return ids


async def read(connection: asyncpg.Connection, result_id: UUID) -> dict[str, Any]:
    row = await connection.fetchrow(
        "SELECT * FROM webhook_deliveries WHERE result_id = $1", result_id
    )
    assert row is not None
    return dict(row) | {"log": orjson.loads(row["log"])}


async def until_ended(
    connection: asyncpg.Connection, result_id: UUID, seconds: float = 10
) -> dict[str, Any]:
    async def is_over() -> dict[str, Any] | None:
        row = await read(connection, result_id)
        return row if row["state"] != "pending" else None

    ended: dict[str, Any] = await until(is_over, seconds)
    return ended


async def until_calls(receiver: Receiver, count: int) -> None:
    async def came() -> bool:
        return len(receiver.calls) >= count

    await until(came)


async def test_a_message_is_whole_signed_and_told_once(
    settings: Settings, connection: asyncpg.Connection
) -> None:
    async with receiving() as receiver, delivering(settings) as services:
        (result,) = await owe(connection, f"{receiver.url}?a=b")
        row = await until_ended(connection, result)
        secret = (await services.outbox.secret(TEAM)).secret
    assert (row["state"], row["attempts"], len(row["log"])) == ("delivered", 1, 1)
    assert row["log"][0]["status"] == 204
    assert row["log"][0]["error"] is None
    (call,) = receiver.calls
    assert call.line == "POST /hook?a=b HTTP/1.1"
    assert call.headers["host"] == f"127.0.0.1:{receiver.port}"
    assert call.headers["content-type"] == "application/json"
    assert call.headers["user-agent"].startswith("llm-api-service/")
    assert call.id == message_id(result)
    event = call.verify(secret)
    assert event["type"] == "result.failed"
    assert event["data"]["id"] == str(result)
    assert event["data"]["error"] == {"code": "cancelled", "message": "why", "retryable": False}
    assert event["timestamp"] == event["data"]["finished_at"]


async def test_a_receiver_that_fails_is_called_again_with_the_same_id(
    settings: Settings, connection: asyncpg.Connection
) -> None:
    turns = [answer(500, body=b"oh \x00\xff no"), answer(429), answer(404)]
    async with receiving(*turns) as receiver, delivering(settings):
        (result,) = await owe(connection, receiver.url)
        row = await until_ended(connection, result)
    assert (row["state"], row["attempts"]) == ("delivered", 4)
    assert [entry["status"] for entry in row["log"]] == [500, 429, 404, 204]
    assert row["log"][0]["error"].startswith("answered 500: oh")
    assert {call.id for call in receiver.calls} == {message_id(result)}
    assert len({call.body for call in receiver.calls}) == 1


async def test_a_receiver_that_never_answers_is_given_up(
    settings: Settings, connection: asyncpg.Connection
) -> None:
    quick = settings.model_copy(update={"webhook_timeout_seconds": 0.2})
    async with receiving() as receiver, delivering(quick, schedule=(0.05, 0.05)):
        receiver.respond = silence
        (result,) = await owe(connection, receiver.url)
        row = await until_ended(connection, result)
    assert (row["state"], row["attempts"], len(receiver.calls)) == ("failed", 3, 3)
    assert all("LLM_WEBHOOK_TIMEOUT_SECONDS" in entry["error"] for entry in row["log"])
    assert all(0.15 < entry["seconds"] < 20 for entry in row["log"])


async def test_a_receiver_that_is_gone_is_given_up_at_once(
    settings: Settings, connection: asyncpg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    async with receiving(answer(204), answer(410)) as receiver, delivering(settings):
        (result,) = await owe(connection, receiver.url)
        assert (await until_ended(connection, result))["state"] == "delivered"
        (result,) = await owe(connection, receiver.url)
        row = await until_ended(connection, result)
    assert (row["state"], len(receiver.calls)) == ("failed", 2)
    warnings = [r.getMessage() for r in caplog.records if r.name == "app.webhooks.delivery"]
    assert warnings == [f"webhook of result {result} was given up after 1 calls"]
    assert row["log"][0] | {"status": 410} == row["log"][0]
    assert "gone" in row["log"][0]["error"]


async def test_a_receiver_that_restarts_is_told(
    settings: Settings, connection: asyncpg.Connection
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    async with delivering(settings, schedule=(0.1,) * 100):
        (result,) = await owe(connection, f"http://127.0.0.1:{port}/hook")

        async def was_refused() -> bool:
            return len((await read(connection, result))["log"]) >= 2

        await until(was_refused)
        async with receiving(port=port) as receiver:
            row = await until_ended(connection, result)
    assert row["state"] == "delivered"
    assert row["log"][0]["status"] is None
    assert "Connect" in row["log"][0]["error"]
    assert [call.id for call in receiver.calls] == [message_id(result)]


@pytest.mark.parametrize("status", [301, 302, 307, 308])
async def test_redirects_are_not_followed(
    settings: Settings, connection: asyncpg.Connection, status: int
) -> None:
    async with receiving() as inner, receiving() as receiver:
        receiver.respond = answer(status, f"Location: {inner.url}")
        async with delivering(settings, schedule=(0.05,)):
            (result,) = await owe(connection, receiver.url)
            row = await until_ended(connection, result)
        assert (row["state"], len(receiver.calls), inner.calls) == ("failed", 2, [])
    assert "redirects are not followed" in row["log"][0]["error"]


async def drip_head(_: Any, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n")
    while True:
        writer.write(b"X-More: x\r\n")
        await writer.drain()
        await asyncio.sleep(0.02)


async def drip_body(_: Any, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 500 X\r\n\r\n")
    while True:
        writer.write(b".")
        await writer.drain()
        await asyncio.sleep(0.02)


async def flood(_: Any, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 500 X\r\n\r\n")
    while True:
        writer.write(b"f" * 1_000_000)
        await writer.drain()


async def flood_head(_: Any, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nX-More: ")
    while True:
        writer.write(b"f" * 1_000_000)
        await writer.drain()


async def nonsense(_: Any, writer: asyncio.StreamWriter) -> None:
    writer.write(b"\x00\xff not HTTP \r\n\r\n")


async def hang_up(_: Any, writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


@pytest.mark.parametrize(
    ("lie", "words"),
    [
        (drip_head, "LLM_WEBHOOK_TIMEOUT_SECONDS"), (drip_body, "answered 500"),
        (flood, "answered 500: fff"), (flood_head, "RemoteProtocolError"),
        (nonsense, "RemoteProtocolError"), (hang_up, "Re"),
    ],
)  # fmt: skip
async def test_answers_without_end_or_sense_are_cut(
    settings: Settings, connection: asyncpg.Connection, lie: Any, words: str
) -> None:
    quick = settings.model_copy(update={"webhook_timeout_seconds": 0.5})
    async with receiving() as receiver, delivering(quick, schedule=()):
        receiver.respond = lie
        (result,) = await owe(connection, receiver.url)
        row = await until_ended(connection, result)
    (entry,) = row["log"]
    assert row["state"] == "failed"
    assert words in entry["error"]
    assert len(entry["error"]) < 400
    assert entry["seconds"] < 10


async def test_a_success_is_one_whatever_its_body(
    settings: Settings, connection: asyncpg.Connection
) -> None:
    async def succeed(_: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nSet-Cookie: a=b\r\n\r\n")
        await writer.drain()
        await flood(_, writer)

    async with receiving(answer(503, "Set-Cookie: c=d"), succeed) as receiver, delivering(settings):
        (result,) = await owe(connection, receiver.url)
        assert (await until_ended(connection, result))["state"] == "delivered"
        (other,) = await owe(connection, receiver.url)
        await until_ended(connection, other)
    assert len(receiver.calls) == 3
    assert all("cookie" not in call.headers for call in receiver.calls)


@pytest.mark.parametrize(
    ("text", "least", "most"),
    [
        ("100", 100, 111), ("999999999", 86_400, 95_100), ("0", 0, 1), ("-5", 0, 1), ("x", 0, 1),
        ("", 0, 1), ("Wed, 21 Oct 2015 07:28:00 GMT", 0, 1),
        ("Wed, 21 Oct 2015 07:28:00 +99999999999999", 0, 1), ("Fri, 31 Dec 9999 23:59:59 GMT", 86_400, 95_100),
        ("in an hour", 3500, 3970),
    ],
)  # fmt: skip
async def test_a_busy_receiver_may_ask_for_time(
    settings: Settings, connection: asyncpg.Connection, text: str, least: int, most: int
) -> None:
    if text == "in an hour":
        text = format_datetime(datetime.now(UTC) + timedelta(hours=1), usegmt=True)
    busy = answer(503, f"Retry-After: {text}")
    async with receiving(busy) as receiver, delivering(settings, schedule=(0.5,) * 9):
        (result,) = await owe(connection, receiver.url)

        async def was_called() -> dict[str, Any] | None:
            row = await read(connection, result)
            return row if row["log"] else None

        row = await until(was_called)
    pause = row["next_attempt_at"] - datetime.fromisoformat(row["log"][0]["at"])
    assert least - 2 <= pause.total_seconds() <= most + 20  # seconds of a busy machine


# --- where a webhook may go -----------------------------------------------------------------------


class Names:
    """A nameserver that knows one name, whose addresses may change from question to question."""

    def __init__(self, *turns: list[str]) -> None:
        self.turns = list(turns)

    def __call__(self, host: str, port: int, **_: Any) -> list[tuple[Any, ...]]:
        assert host == "hook.example"
        found = self.turns.pop(0) if len(self.turns) > 1 else self.turns[0]
        return [(0, 0, 0, "", (address, port)) for address in found]


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "10.1.2.3", "::ffff:127.0.0.1"])
async def test_names_that_resolve_to_private_addresses_are_given_up(
    settings: Settings, connection: asyncpg.Connection, address: str
) -> None:
    strict = settings.model_copy(update={"webhook_allow_private": False})
    async with receiving() as receiver:
        async with delivering(strict, lookup=Names(["8.8.8.8", address])):
            (result,) = await owe(connection, f"http://hook.example:{receiver.port}/")
            row = await until_ended(connection, result)
        assert receiver.calls == []
    assert (row["state"], row["attempts"]) == ("failed", 1)
    assert "LLM_WEBHOOK_ALLOW_PRIVATE" in row["log"][0]["error"]


async def test_literal_addresses_are_judged_at_delivery_too(
    settings: Settings, connection: asyncpg.Connection
) -> None:
    """Accepted while the setting permitted it, due when it does not any more."""
    strict = settings.model_copy(update={"webhook_allow_private": False})
    async with receiving() as receiver, delivering(strict):
        (result,) = await owe(connection, receiver.url)
        row = await until_ended(connection, result)
        assert receiver.calls == []
    assert "LLM_WEBHOOK_ALLOW_PRIVATE" in row["log"][0]["error"]


async def test_the_judged_address_is_called_whatever_the_name_says_next(
    settings: Settings, connection: asyncpg.Connection
) -> None:
    async with receiving() as receiver:
        names = Names(["127.0.0.1"], ["10.255.255.1"])
        async with delivering(settings, lookup=names):
            (result,) = await owe(connection, f"http://hook.example:{receiver.port}/")
            row = await until_ended(connection, result)
    assert row["state"] == "delivered"
    assert receiver.calls[0].headers["host"] == f"hook.example:{receiver.port}"


async def test_another_address_of_the_name_is_tried_where_one_takes_no_connection(
    settings: Settings, connection: asyncpg.Connection
) -> None:
    names = Names(["::1", "127.0.0.1", "127.0.0.2"])
    async with receiving() as receiver, delivering(settings, lookup=names):
        (result,) = await owe(connection, f"http://hook.example:{receiver.port}/")
        row = await until_ended(connection, result)
    assert (row["state"], len(row["log"])) == ("delivered", 1)


async def test_unknown_names_are_tried_again(
    settings: Settings, connection: asyncpg.Connection
) -> None:
    async with delivering(settings, schedule=(0.05,)):
        (result,) = await owe(connection, "http://nowhere.invalid/")
        row = await until_ended(connection, result, seconds=60)
    assert (row["state"], row["attempts"]) == ("failed", 2)
    assert row["log"][0]["error"]


async def test_certificates_are_those_of_the_name(
    settings: Settings, connection: asyncpg.Connection, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
         "-nodes", "-days", "2", "-subj", "/CN=hook.example", "-addext",
         "subjectAltName=DNS:hook.example", "-keyout", str(key), "-out", str(certificate)],
        check=True, capture_output=True,
    )  # fmt: skip
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    names: list[str | None] = []
    tls.sni_callback = lambda _socket, name, _context: names.append(name)
    async with receiving(tls=tls) as receiver:
        async with delivering(settings, schedule=(), lookup=Names(["127.0.0.1"])):
            (result,) = await owe(connection, f"https://hook.example:{receiver.port}/")
            assert (await until_ended(connection, result))["state"] == "delivered"
        async with delivering(settings, schedule=()):
            (result,) = await owe(connection, receiver.url)
            row = await until_ended(connection, result)
    assert names[0] == "hook.example"
    assert row["state"] == "failed"
    assert "CERTIFICATE_VERIFY_FAILED" in row["log"][0]["error"]
    assert len(receiver.calls) == 1


# --- who delivers ---------------------------------------------------------------------------------


@pytest.mark.trial
async def test_five_hundred_at_once_to_two_deliverers(
    settings: Settings, connection: asyncpg.Connection
) -> None:
    async with receiving() as receiver, delivering(settings), delivering(settings):
        ids = await owe(connection, receiver.url, 500)

        async def are_delivered() -> bool:
            return not await connection.fetchval(
                "SELECT count(*) FROM webhook_deliveries WHERE state <> 'delivered'"
            )

        await until(are_delivered, seconds=60)
    assert Counter(call.id for call in receiver.calls) == Counter(message_id(i) for i in ids)
    assert 2 < receiver.most_at_once <= 2 * 15


async def test_a_receiver_that_hangs_leaves_places_to_the_others(
    settings: Settings, connection: asyncpg.Connection
) -> None:
    may_answer = asyncio.Event()

    async def hang(call: Call, writer: asyncio.StreamWriter) -> None:
        await may_answer.wait()
        await answer(204)(call, writer)

    async with receiving() as hanging, receiving() as receiver:
        hanging.respond = hang
        # Each has a URL of its own: they are one receiver all the same.
        for n in range(5):
            await owe(connection, f"{hanging.url}?n={n}", 40)
        ids = await owe(connection, receiver.url, 20)
        patient = settings.model_copy(update={"webhook_timeout_seconds": 60.0})
        async with delivering(patient):
            for result in ids:
                assert (await until_ended(connection, result, seconds=50))["state"] == "delivered"
            assert 8 <= hanging.most_at_once <= 15
            may_answer.set()
            await until_calls(hanging, 20)  # whose turn comes when one has ended


async def test_no_deliverer_polls_when_nothing_is_due(
    settings: Settings, connection: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    start_due = WebhookDeliverer._start_due

    async def look(deliverer: WebhookDeliverer) -> float:
        pauses.append(await start_due(deliverer))
        return pauses[-1]

    monkeypatch.setattr(WebhookDeliverer, "_start_due", look)
    async with receiving() as receiver, delivering(settings):
        (result,) = await owe(connection, receiver.url)
        await until_ended(connection, result)
        # Until then notifications of the delivery may come.
        await until(lambda: asyncio.sleep(0, pauses[-1] > 10))
        before = len(pauses)
        # Its look is the last: one may come before it, by the notification of `owe`.
        await connection.execute("SELECT pg_notify('llm_webhooks', '')")
        await until(lambda: asyncio.sleep(0, len(pauses) > before))
        assert len(pauses) - before <= 2
        assert min(pauses[before:]) > 10
    assert before < 8


async def test_a_held_up_deliverer_writes_nothing_over_its_successor(
    settings: Settings, connection: asyncpg.Connection
) -> None:
    async with open_services(settings, "test") as services:
        outbox = services.outbox
        (result,) = await owe(connection, "http://127.0.0.1:9/")

        async def take() -> Due:
            await connection.execute("UPDATE webhook_deliveries SET next_attempt_at = now()")
            (due,) = await outbox.claim(10, 60)
            return due

        first = await take()
        assert await outbox.claim(10, 60) == []
        second = await take()
        assert (first.attempts, second.attempts) == (1, 2)
        await outbox.conclude(Verdict(first, "failed", 0, '{"n": 1}'))
        row = await read(connection, result)
        assert (row["state"], row["log"]) == ("pending", [])
        await outbox.conclude(Verdict(second, "delivered", 0, '{"n": 2}'))
        await outbox.conclude(Verdict(second, "failed", 0, '{"n": 3}'))
        row = await read(connection, result)
        assert (row["state"], row["log"]) == ("delivered", [{"n": 2}])


async def test_the_log_is_bounded(settings: Settings, connection: asyncpg.Connection) -> None:
    async with receiving() as receiver, delivering(settings, schedule=(0.01,) * 24):
        receiver.respond = answer(500)
        (result,) = await owe(connection, receiver.url)
        row = await until_ended(connection, result, seconds=30)
    assert (row["attempts"], len(row["log"])) == (25, 20)
    times = [entry["at"] for entry in row["log"]]
    assert times == sorted(times)
    seconds = [entry["seconds"] for entry in row["log"]]
    assert seconds == [round(one, 3) for one in seconds]


async def test_what_a_stopping_process_is_calling_may_end(
    settings: Settings, connection: asyncpg.Connection
) -> None:
    async def slow(call: Any, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.3)  # the process begins to stop meanwhile
        await answer(200)(call, writer)

    async with receiving(slow) as receiver:
        async with delivering(settings):
            (result,) = await owe(connection, receiver.url)
            await until_calls(receiver, 1)
        assert (await read(connection, result))["state"] == "delivered"


async def test_a_result_deleted_meanwhile_ends_its_delivery(
    settings: Settings, connection: asyncpg.Connection
) -> None:
    is_deleted = asyncio.Event()

    async def fail_late(call: Call, writer: asyncio.StreamWriter) -> None:
        await is_deleted.wait()
        await answer(500)(call, writer)

    async with receiving(fail_late, answer(500), answer(500)) as receiver, delivering(settings):
        (result,) = await owe(connection, receiver.url)
        await until_calls(receiver, 1)
        await connection.execute("DELETE FROM results")
        assert not await connection.fetchval("SELECT count(*) FROM webhook_deliveries")
        is_deleted.set()
        # Its calls are repeated later than those of the deleted one would be.
        (other,) = await owe(connection, receiver.url)
        await until_ended(connection, other)
    calls = [call.id for call in receiver.calls]
    assert calls == [message_id(result), *[message_id(other)] * 3]


async def test_connections_killed_all_the_time_lose_no_delivery(
    settings: Settings, connection: asyncpg.Connection
) -> None:
    async with receiving() as receiver, delivering(settings):
        ids = []
        for _ in range(10):
            ids += await owe(connection, receiver.url, 5)
            await connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
            await asyncio.sleep(0.05)  # calls are under way when the connections are lost
        await connection.execute("UPDATE webhook_deliveries SET next_attempt_at = now()")
        await connection.execute("SELECT pg_notify('llm_webhooks', '')")

        async def all_came() -> bool:
            # A claim whose answer was lost is due again when its lease is over: here, at once.
            await connection.execute(
                "UPDATE webhook_deliveries SET next_attempt_at = now() WHERE state = 'pending'"
            )
            await connection.execute("SELECT pg_notify('llm_webhooks', '')")
            await asyncio.sleep(0.2)  # time for the calls: otherwise each is due again at once
            return not await connection.fetchval(
                "SELECT count(*) FROM webhook_deliveries WHERE state <> 'delivered'"
            )

        await until(all_came, seconds=30)
    assert {call.id for call in receiver.calls} == {message_id(i) for i in ids}


async def test_a_bug_of_ours_is_logged_and_tried_again(
    settings: Settings,
    connection: asyncpg.Connection,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def broken(*_: Any) -> None:
        raise RuntimeError("a bug")

    async with receiving() as receiver, delivering(settings, schedule=(0.05,)):
        monkeypatch.setattr("app.webhooks.sender.to_outcome", broken)
        (result,) = await owe(connection, receiver.url)
        row = await until_ended(connection, result)
    assert (row["state"], row["attempts"]) == ("failed", 2)
    assert "bug" in row["log"][0]["error"]
    assert any(
        record.exc_info for record in caplog.records if record.name == "app.webhooks.delivery"
    )


async def test_a_rotated_secret_signs_beside_the_new_one_for_a_while(
    settings: Settings, connection: asyncpg.Connection
) -> None:
    async def deliver_one(services: Services, receiver: Receiver) -> list[str]:
        (result,) = await owe(connection, receiver.url)
        await until_ended(connection, result)
        return receiver.calls[-1].headers["webhook-signature"].split(" ")

    async with receiving() as receiver, delivering(settings) as services:
        old = (await services.outbox.secret(TEAM)).secret
        assert len(await deliver_one(services, receiver)) == 1
        new = (await services.outbox.rotate_secret(TEAM)).secret
        assert len(await deliver_one(services, receiver)) == 2
        for secret in (old, new):
            receiver.calls[-1].verify(secret)
        await connection.execute("UPDATE webhook_secrets SET previous_expires_at = now()")
        assert len(await deliver_one(services, receiver)) == 1
        receiver.calls[-1].verify(new)


async def test_each_team_has_a_secret_of_its_own(
    settings: Settings, connection: asyncpg.Connection
) -> None:
    async with receiving() as receiver, delivering(settings) as services:
        (ours,) = await owe(connection, receiver.url)
        await until_ended(connection, ours)
        (theirs,) = await owe(connection, receiver.url, team="other")
        await until_ended(connection, theirs)
        own = (await services.outbox.secret(TEAM)).secret
        other = (await services.outbox.secret("other")).secret
    assert own != other
    receiver.calls[0].verify(own)
    receiver.calls[1].verify(other)
