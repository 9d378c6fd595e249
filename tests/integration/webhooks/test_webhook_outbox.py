"""Each statement on deliveries and secrets, on rows that it must and must not touch."""

from collections.abc import AsyncIterator
from datetime import datetime
from uuid import UUID

import asyncpg
import pytest

from app.api.container import open_services
from app.core.errors import NotFoundError
from app.core.settings import Settings
from app.webhooks.outbox import Verdict, WebhookOutbox
from tests.conftest import make_settings
from tests.integration.webhooks.test_webhook_delivery import TEAM, owe, read
from tests.postgres import PostgresServer

URL = "http://a.example:81/hook"
OTHER = "other"


@pytest.fixture
def settings(postgres_server: PostgresServer, database_name: str) -> Settings:
    return make_settings(postgres_server, database_name)


@pytest.fixture
async def outbox(settings: Settings) -> AsyncIterator[WebhookOutbox]:
    async with open_services(settings, "test") as services:
        yield services.outbox


async def end(
    connection: asyncpg.Connection, result_id: UUID, state: str, at: datetime | None = None
) -> None:
    """Conclude a delivery without the service."""
    await connection.execute(
        "UPDATE webhook_deliveries SET state = $2, finished_at = now(),"
        " next_attempt_at = coalesce($3, now() - interval '1 hour') WHERE result_id = $1",
        result_id, state, at,
    )  # fmt: skip


async def postpone(connection: asyncpg.Connection, result_id: UUID, seconds: float) -> None:
    await connection.execute(
        "UPDATE webhook_deliveries SET next_attempt_at = now() + make_interval(secs => $2)"
        " WHERE result_id = $1",
        result_id, seconds,
    )  # fmt: skip


# --- claims ---------------------------------------------------------------------------------------


async def test_a_claim_takes_due_pending_deliveries_for_its_lease(
    outbox: WebhookOutbox, connection: asyncpg.Connection
) -> None:
    due, later, delivered, failed = await owe(connection, URL, 4)
    await postpone(connection, later, 3600)
    await end(connection, delivered, "delivered")
    await end(connection, failed, "failed")
    before = await connection.fetchval("SELECT now()")
    (claimed,) = await outbox.claim(10, 600)
    assert (claimed.result_id, claimed.team_id, claimed.url) == (due, TEAM, URL)
    assert (claimed.receiver, claimed.attempts) == ("a.example:81", 1)
    assert 600 <= (claimed.lease - before).total_seconds() < 1200
    row = await read(connection, due)
    assert (row["attempts"], row["next_attempt_at"]) == (1, claimed.lease)
    for result in (later, delivered, failed):
        assert (await read(connection, result))["attempts"] == 0
    assert await outbox.claim(10, 600) == []


async def test_a_claim_takes_those_that_are_due_for_longest(
    outbox: WebhookOutbox, connection: asyncpg.Connection
) -> None:
    ids = await owe(connection, URL, 3)
    for result, seconds in zip(ids, (-10, -30, -20), strict=True):
        await postpone(connection, result, seconds)
    claimed = [(await outbox.claim(1, 600))[0].result_id for _ in ids]
    assert claimed == [ids[1], ids[2], ids[0]]


async def test_a_claim_leaves_busy_teams_and_receivers(
    outbox: WebhookOutbox, connection: asyncpg.Connection
) -> None:
    elsewhere = "http://b.example:81/hook"
    await owe(connection, URL, team="busy")
    await owe(connection, f"{URL}?other", team=TEAM)
    (other_receiver,) = await owe(connection, elsewhere, team=TEAM)
    (other_team,) = await owe(connection, URL, team=OTHER)
    busy = [(TEAM, "a.example:81"), (OTHER, "b.example:81")]
    claimed = await outbox.claim(10, 600, ["busy"], busy)
    assert {due.result_id for due in claimed} == {other_receiver, other_team}
    assert len(await outbox.claim(10, 600)) == 2


async def test_a_claim_passes_by_what_another_process_is_claiming(
    outbox: WebhookOutbox, connection: asyncpg.Connection
) -> None:
    """A claim that waited for the lock would end at the database's time limit."""
    held, free = await owe(connection, URL, 2)
    async with connection.transaction():
        await connection.execute(
            "SELECT FROM webhook_deliveries WHERE result_id = $1 FOR UPDATE", held
        )
        assert [due.result_id for due in await outbox.claim(10, 600)] == [free]
    assert [due.result_id for due in await outbox.claim(10, 600)] == [held]


async def test_seconds_until_due_are_those_of_the_next_pending_delivery(
    outbox: WebhookOutbox, connection: asyncpg.Connection
) -> None:
    assert await outbox.seconds_until_due() is None
    first, second, delivered = await owe(connection, URL, 3)
    await end(connection, delivered, "delivered")
    await postpone(connection, first, 7200)
    await postpone(connection, second, 3600)
    seconds = await outbox.seconds_until_due()
    assert seconds is not None
    assert 1800 < seconds <= 3600
    await postpone(connection, first, -3600)
    seconds = await outbox.seconds_until_due()
    assert seconds is not None
    assert seconds <= -3600


# --- verdicts -------------------------------------------------------------------------------------


async def test_a_verdict_changes_its_own_delivery_alone(
    outbox: WebhookOutbox, connection: asyncpg.Connection
) -> None:
    await owe(connection, URL, 3)
    accepted, refused, calling = await outbox.claim(10, 600)
    before = await connection.fetchval("SELECT now()")
    await outbox.conclude(Verdict(accepted, "delivered", 0, '{"n": 1}'))
    await outbox.conclude(Verdict(refused, "pending", 3600, '{"n": 2}'))
    row = await read(connection, accepted.result_id)
    assert (row["state"], row["log"]) == ("delivered", [{"n": 1}])
    assert row["finished_at"] >= before
    row = await read(connection, refused.result_id)
    assert (row["state"], row["finished_at"], row["log"]) == ("pending", None, [{"n": 2}])
    assert 3600 <= (row["next_attempt_at"] - before).total_seconds() < 7200
    row = await read(connection, calling.result_id)
    assert (row["state"], row["log"]) == ("pending", [])
    assert row["next_attempt_at"] == calling.lease


async def test_a_verdict_changes_no_delivery_that_has_ended(
    outbox: WebhookOutbox, connection: asyncpg.Connection
) -> None:
    await owe(connection, URL)
    (due,) = await outbox.claim(1, 600)
    await end(connection, due.result_id, "delivered", due.lease)
    await outbox.conclude(Verdict(due, "failed", 0, "{}"))
    row = await read(connection, due.result_id)
    assert (row["state"], row["log"]) == ("delivered", [])


@pytest.mark.parametrize(("before", "after"), [(19, 20), (20, 20)])
async def test_the_log_drops_its_oldest_entry_of_twenty(
    outbox: WebhookOutbox, connection: asyncpg.Connection, before: int, after: int
) -> None:
    await owe(connection, URL)
    await connection.execute(
        "UPDATE webhook_deliveries SET log = (SELECT jsonb_agg(n) FROM generate_series(1, $1::int) n)",
        before,
    )
    (due,) = await outbox.claim(1, 600)
    await outbox.conclude(Verdict(due, "pending", 0, '"new"'))
    log = (await read(connection, due.result_id))["log"]
    assert len(log) == after
    assert (log[0], log[-1]) == (before + 2 - after, "new")


# --- lists and redelivery -------------------------------------------------------------------------


async def test_lists_are_newest_first_and_of_one_team(
    outbox: WebhookOutbox, connection: asyncpg.Connection
) -> None:
    await owe(connection, URL, team="a")
    ids = await owe(connection, URL, 4)
    await owe(connection, URL, team="z")

    async def listed(result_id: UUID | None, after: UUID | None, limit: int = 10) -> list[UUID]:
        found = await outbox.list(TEAM, state=None, result_id=result_id, after=after, limit=limit)
        return [delivery.result_id for delivery in found]

    assert await listed(None, None) == ids[::-1]
    assert await listed(None, None, 2) == [ids[3], ids[2]]
    assert await listed(None, ids[2]) == [ids[1], ids[0]]
    for n, result in enumerate(ids):
        assert await listed(result, None) == [result]
        assert await listed(result, ids[3]) == ([result] if n < 3 else [])


async def test_one_result_is_listed_without_the_one_that_has_the_next_id(
    outbox: WebhookOutbox, connection: asyncpg.Connection
) -> None:
    (result,) = await owe(connection, URL)
    await connection.execute(
        """WITH r AS (SELECT * FROM results WHERE id = $1), copy AS (
             INSERT INTO results (id, team_id, context_id, model_name, parameters, deadline_at,
                                  state, finished_at, error_code, error_message, error_retryable)
             SELECT $2, team_id, context_id, model_name, parameters, deadline_at,
                    state, finished_at, error_code, error_message, error_retryable FROM r
             RETURNING id)
           INSERT INTO webhook_deliveries (result_id, team_id, url) SELECT id, 'default', 'u' FROM copy
        """,
        result, UUID(int=result.int + 1),
    )  # fmt: skip
    (found,) = await outbox.list(TEAM, state=None, result_id=result, after=None, limit=10)
    assert found.result_id == result


async def test_lists_of_a_state_have_no_other(
    outbox: WebhookOutbox, connection: asyncpg.Connection
) -> None:
    pending, delivered, failed = await owe(connection, URL, 3)
    await end(connection, delivered, "delivered")
    await end(connection, failed, "failed")
    for state, result in (("pending", pending), ("delivered", delivered), ("failed", failed)):
        found = await outbox.list(TEAM, state=state, result_id=None, after=None, limit=10)  # type: ignore[arg-type]
        assert [(one.result_id, one.state) for one in found] == [(result, state)]


async def test_a_redelivery_is_of_one_result_of_the_team(
    outbox: WebhookOutbox, connection: asyncpg.Connection
) -> None:
    again, other = await owe(connection, URL, 2)
    (foreign,) = await owe(connection, URL, team=OTHER)
    await outbox.claim(10, 600)
    for result in (again, other, foreign):
        await end(connection, result, "failed")
    before = await connection.fetchval("SELECT now()")
    delivery = await outbox.redeliver(TEAM, again)
    assert (delivery.result_id, delivery.state, delivery.attempts) == (again, "pending", 0)
    assert delivery.finished_at is None
    assert delivery.next_attempt_at >= before
    with pytest.raises(NotFoundError):
        await outbox.redeliver(TEAM, foreign)
    for result in (other, foreign):
        row = await read(connection, result)
        assert (row["state"], row["attempts"]) == ("failed", 1)


# --- secrets --------------------------------------------------------------------------------------


async def test_a_rotation_that_is_sent_twice_keeps_the_previous_secret(
    outbox: WebhookOutbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service sends a statement again if the connection was lost before its response."""
    first = (await outbox.secret(TEAM)).secret
    await outbox.secret(OTHER)
    monkeypatch.setattr("app.webhooks.outbox.new_secret", lambda: "whsec_new")
    once = await outbox.rotate_secret(TEAM)
    twice = await outbox.rotate_secret(TEAM)
    assert once == twice
    assert twice.all == ["whsec_new", first]


async def test_a_secret_made_meanwhile_is_the_teams(
    outbox: WebhookOutbox, connection: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two first requests: each finds none, and the later one reads the earlier one's."""
    fetch = outbox._database.fetch

    async def fetch_late(query: str, *arguments: object) -> object:
        if "INSERT INTO webhook_secrets" in query:
            await connection.execute(
                "INSERT INTO webhook_secrets (team_id, secret) VALUES ($1, 'whsec_x')", TEAM
            )
        return await fetch(query, *arguments)

    monkeypatch.setattr(outbox._database, "fetch", fetch_late)
    assert (await outbox.secret(TEAM)).all == ["whsec_x"]
