"""Calls that a deliverer starts, its next look, and its end.

The tests take the deliverer's steps themselves: its loop does not run.
"""

import asyncio
import threading
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import asyncpg
import pytest

from app.api.container import open_services
from app.core import metrics
from app.core.settings import Settings
from app.core.waiting import cancel_all
from app.webhooks import delivery
from app.webhooks.delivery import WebhookDeliverer
from app.webhooks.sender import Sender
from tests.conftest import make_settings
from tests.integration.webhook_receiver import answer, receiving
from tests.integration.webhooks.test_webhook_delivery import owe, read
from tests.postgres import PostgresServer

LONGEST = 30.0  # seconds between two looks


@pytest.fixture
def settings(postgres_server: PostgresServer, database_name: str) -> Settings:
    """A hanging call lasts longer than the test."""
    return make_settings(
        postgres_server, database_name, webhook_allow_private=True, webhook_timeout_seconds=100.0
    )


@pytest.fixture
async def deliverer(settings: Settings) -> AsyncIterator[WebhookDeliverer]:
    """Its calls wait for a nameserver until the test is over."""
    over = threading.Event()

    def lookup(host: str, port: int, **_: Any) -> list[tuple[Any, ...]]:
        if host != "127.0.0.1":
            over.wait(100)
        return [(0, 0, 0, "", ("127.0.0.1", port))]

    try:
        async with open_services(settings, "test") as services, Sender(settings, lookup) as sender:
            yield WebhookDeliverer(
                *(services.outbox, services.results, services.jobs),
                *(services.registry, services.listener, sender),
            )
            await cancel_all(calls())
    finally:
        over.set()


def url(host: int = 0) -> str:
    return f"http://host{host}.example/"


def calls() -> list[asyncio.Task[Any]]:
    return [task for task in asyncio.all_tasks() if task.get_name().startswith("webhook ")]


async def started(connection: asyncpg.Connection, team: str) -> int:
    return int(
        await connection.fetchval(
            "SELECT count(*) FROM webhook_deliveries WHERE attempts = 1 AND team_id = $1", team
        )
    )


async def test_a_receiver_gets_eight_calls_and_no_look_until_one_ends(
    deliverer: WebhookDeliverer, connection: asyncpg.Connection
) -> None:
    await owe(connection, url(1), 20)
    assert await deliverer._start_due() == LONGEST
    assert await started(connection, "default") == len(calls()) == 8
    await owe(connection, url(2), 3)
    assert await deliverer._start_due() == LONGEST
    assert await started(connection, "default") == len(calls()) == 11


async def test_a_team_gets_half_of_the_places_and_no_look_until_a_call_ends(
    deliverer: WebhookDeliverer, connection: asyncpg.Connection
) -> None:
    for n in range(50):
        await owe(connection, url(n), team="large")
    assert await deliverer._start_due() == LONGEST
    assert 32 <= await started(connection, "large") == len(calls()) <= 34
    await owe(connection, url(0), 3, team="small")
    assert await deliverer._start_due() == LONGEST
    assert await started(connection, "small") == 3


async def test_no_more_than_64_calls_run(
    deliverer: WebhookDeliverer, connection: asyncpg.Connection
) -> None:
    """As many teams as that, each with a call that hangs."""
    for n in range(70):
        await owe(connection, url(n), team=f"team-{n}")
    assert await deliverer._start_due() == LONGEST
    assert len(calls()) == 64
    attempts = await connection.fetchval("SELECT sum(attempts) FROM webhook_deliveries")
    assert attempts == 64


async def test_the_next_look_is_when_a_delivery_is_due(
    deliverer: WebhookDeliverer, connection: asyncpg.Connection
) -> None:
    (result,) = await owe(connection, url(1))
    due_in = "UPDATE webhook_deliveries SET next_attempt_at = now() + $1"
    await connection.execute(due_in, timedelta(seconds=25))
    assert 1 < await deliverer._start_due() <= 25
    await connection.execute(due_in, timedelta(hours=1))
    assert await deliverer._start_due() == LONGEST
    await connection.execute(due_in, timedelta(seconds=-100))
    async with connection.transaction():  # another process is claiming it
        await connection.execute("SELECT FROM webhook_deliveries FOR UPDATE")
        assert await deliverer._start_due() == delivery._SHORTEST_PAUSE
    assert (await read(connection, result))["attempts"] == 0


async def test_a_claim_lasts_longer_than_its_call(
    deliverer: WebhookDeliverer, connection: asyncpg.Connection, settings: Settings
) -> None:
    (result,) = await owe(connection, url(1))
    before = await connection.fetchval("SELECT now()")
    await deliverer._start_due()
    lease = (await read(connection, result))["next_attempt_at"] - before
    assert lease.total_seconds() >= settings.webhook_timeout_seconds + 15


async def test_what_does_not_end_in_time_is_cut_when_the_process_stops(
    deliverer: WebhookDeliverer,
    connection: asyncpg.Connection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(delivery, "_STOP_SECONDS", 0.01)
    (result,) = await owe(connection, url(1))
    await deliverer._start_due()
    assert len(calls()) == 1
    await deliverer._stop_calls()
    assert calls() == []
    row = await read(connection, result)
    assert (row["state"], row["attempts"], row["log"]) == ("pending", 1, [])


async def test_each_outcome_of_a_call_is_counted(
    deliverer: WebhookDeliverer, connection: asyncpg.Connection
) -> None:
    def counts() -> list[float]:
        return [
            metrics.WEBHOOKS.of(name).value for name in ("delivered", "to_be_retried", "given_up")
        ]

    before = counts()
    async with receiving(answer(204), answer(410), answer(500)) as receiver:
        for _ in range(3):
            await owe(connection, receiver.url)
            await deliverer._start_due()
            await asyncio.gather(*calls())
    assert [now - then for now, then in zip(counts(), before, strict=True)] == [1, 1, 1]
