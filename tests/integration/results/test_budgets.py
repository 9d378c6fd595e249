"""Budgets: their use by the ledger, the refusal in each dialect, and alerts about their thresholds."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, date, datetime, timedelta
from typing import Any

import asyncpg
import httpx
import pytest

from app.api.container import open_services
from app.cli.main import main
from app.core.database import Database
from app.core.errors import BudgetExhaustedError, DatabaseUnavailableError
from app.core.ids import new_id
from app.core.settings import Settings
from app.queue.budgets import WHOLE_TEAM
from app.queue.enqueue import NewResult
from app.results.usage.spending import Budget, Spending
from app.webhooks.budget_alerts import BudgetAlerts
from app.webhooks.sender import Sender
from tests.conftest import Service, run_service
from tests.integration.api.test_usage_api import BLUE, OPERATOR, RED, use_database
from tests.integration.auth.test_auth import bearer, guarded
from tests.integration.support import assert_refusal, finish, until
from tests.integration.webhook_receiver import SHORT, answer, receiving
from tests.unit.auth.test_jwt import sign

__all__ = ["guarded"]

OTHER_KEY = bearer(sign({"team_id": "red", "token_id": "other"}))
NATIVE = {"model": "scripted", "content": "{{chunks=1}}"}
USE = """INSERT INTO usage_days VALUES ($1, $2, $3, 'm', '', 'completed', 1, 40, 0, 60, 0, 2000000)
  ON CONFLICT (team_id, day, token_id, model_name, adapter, ended_as) DO UPDATE
  SET prompt_tokens = usage_days.prompt_tokens + 40,
    completion_tokens = usage_days.completion_tokens + 60"""


def today() -> date:
    return datetime.now(UTC).date()


@pytest.fixture
async def spending(settings: Settings) -> AsyncIterator[Spending]:
    async with Database(settings, "test") as database:
        yield Spending(database)


@pytest.fixture
async def closed(guarded: Settings) -> AsyncIterator[Service]:
    async with run_service(guarded, with_worker=False) as service:
        yield service


async def check(spending: Spending, *services: Service) -> None:
    """As the processes do every few seconds."""
    await spending._database.fetch("UPDATE budgets SET checked_at = NULL")
    await spending.check()
    for service in services:
        await service.services.budgets.refresh()


async def test_the_use_is_that_of_this_month_by_team_and_key(
    spending: Spending, connection: asyncpg.Connection
) -> None:
    before = today().replace(day=1) - timedelta(days=1)
    for team, day, key in (
        ("red", today(), "k1"), ("red", today().replace(day=1), "k1"), ("red", today(), "k2"),
        ("red", before, "k1"), ("blue", today(), "k1"),
    ):  # fmt: skip
        await connection.execute(USE, team, day, key)
    await connection.execute(
        """INSERT INTO usage_entries (team_id, day, token_id, model_name, adapter, ended_as, results,
             prompt_tokens, cached_prompt_tokens, completion_tokens, reasoning_tokens, engine_microseconds)
           VALUES ('red', $1, 'k1', 'n', '', 'completed', 1, 1, 0, 1, 0, 0)""",
        today(),
    )
    await connection.execute(
        "INSERT INTO model_prices VALUES ('m', '2020-01-01', 10000, 0, 1), ('n', '2020-01-01', 1e6, 0, 0)"
    )
    for team, key in (("red", WHOLE_TEAM), ("red", "k1"), ("red", "none"), ("blue", "k1")):
        await spending.set(Budget(team, key, 1_000, None))
    await spending.check()
    found = {(one.team_id, one.token_id): one for one in await spending.list()}
    days = 1 if today().day == 1 else 2  # rows of the first day and of today are one on that day
    assert found["red", ""].used_tokens == 302
    assert found["red", "k1"].used_tokens == 202
    assert found["red", "none"].used_tokens == 0
    assert found["blue", "k1"].used_tokens == 100
    assert found["red", "k1"].used_cost == pytest.approx(2 * 0.4 + days * 2 + 1)
    assert {one.month for one in found.values()} == {today().replace(day=1)}
    assert [one.token_id for one in await spending.list("blue")] == ["k1"]


@pytest.mark.parametrize(
    ("checked_at", "used"),
    [
        ("NULL", 200),
        ("now()", 100),  # another process has just checked it
        ("now() - interval '2 h'", 200),
        ("now() + interval '1 h'", 200),  # the clock was set back
    ],
)
async def test_budgets_are_checked_that_no_process_has_just_checked(
    spending: Spending, connection: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch,
    checked_at: str, used: int,
) -> None:  # fmt: skip
    monkeypatch.setattr("app.results.usage.spending._FRESH_SECONDS", 3600.0)
    await connection.execute(USE, "red", today(), "r")
    await spending.set(Budget("red", WHOLE_TEAM, 1_000, None))
    await spending.check()
    await connection.execute(USE, "red", today(), "r")
    await connection.execute(f"UPDATE budgets SET checked_at = {checked_at}")
    await spending.check()
    assert [one.used_tokens for one in await spending.list()] == [used]


async def test_a_process_that_has_just_started_refuses_its_first_request(
    settings: Settings, spending: Spending, connection: asyncpg.Connection
) -> None:
    await connection.execute(USE, "red", today(), "r")
    await spending.set(Budget("red", "r", 100, None))
    await spending.check()
    async with open_services(settings, "test") as started:  # its loops do not run
        allowed = [of_team("blue", "r"), of_team("red", "other"), of_team("red", None)]
        await started.budgets.check(allowed)
        await connection.execute("DELETE FROM budgets")  # what it has read is kept
        with pytest.raises(BudgetExhaustedError, match="Key 'r' of team 'red'"):
            await started.budgets.check([*allowed, of_team("red", "r")])


def of_team(team: str, token: str | None) -> NewResult:
    return NewResult(new_id(), team, new_id(), "m", "{}", 60.0, token_id=token)


REQUESTS: dict[str, Any] = {
    "/results/": NATIVE,
    "/v1/completions": {"model": "scripted", "prompt": "x"},
    "/v1/chat/completions": {"model": "scripted", "messages": [{"role": "user", "content": "x"}]},
    "/v1/responses": {"model": "scripted", "input": "x"},
    "/v1/messages": {
        "model": "scripted",
        "max_tokens": 1,
        "messages": [{"role": "user", "content": "x"}],
    },
    "/generate": {"inputs": "x"},
    "/generate_stream": {"inputs": "x"},
    "/tgi-v0/generate": {"inputs": "x"},
    "/inference": {"text": "x"},
}


async def post(service: Service, path: str, body: Any, headers: dict[str, str]) -> httpx.Response:
    return await service.client.post(path, json=body, headers=headers)


async def test_each_dialect_refuses_in_its_own_shape_and_says_when_the_month_ends(
    closed: Service, spending: Spending, connection: asyncpg.Connection
) -> None:
    sent = await post(closed, "/results/", NATIVE | {"idempotency_key": "one"}, RED)
    assert sent.status_code == 202
    await connection.execute(USE, "red", today(), "r")
    await spending.set(Budget("red", WHOLE_TEAM, 100, None))
    await check(spending, closed)
    ends = (today().replace(day=1) + timedelta(days=32)).replace(day=1)
    for path, body in REQUESTS.items():
        refused = await post(closed, path, body, RED)
        assert_refusal(path, refused, 429, "budget_exhausted")
        for part in (f"{ends}T00:00:00Z", "100 of", "100 tokens", "app budget set red --tokens"):
            assert part in refused.text or part == "100 of", (path, refused.text)
        assert 0 < int(refused.headers["retry-after"]) <= 31 * 86_400
        assert refused.headers.get("x-should-retry") == ("false" if path[:3] == "/v1" else None)
    problem = (await post(closed, "/results/", [NATIVE], RED)).json()
    assert (problem["limit"], problem["allowed"], problem["used"]) == ("tokens", 100, 100)
    assert problem["ends_at"] == f"{ends}T00:00:00Z"
    # Reads, repetitions of accepted requests, and other teams go on.
    assert (await closed.client.get("/results/", headers=RED)).status_code == 200
    again = await post(closed, "/results/", NATIVE | {"idempotency_key": "one"}, RED)
    assert again.json()["id"] == sent.json()["id"]
    assert (await post(closed, "/results/", NATIVE, BLUE)).status_code == 202
    # Until it is raised.
    await spending.set(Budget("red", WHOLE_TEAM, 101, None))
    await check(spending, closed)
    assert (await post(closed, "/results/", NATIVE, RED)).status_code == 202


async def test_the_budget_of_a_key_refuses_no_other_key_and_may_be_a_cost(
    closed: Service, spending: Spending, connection: asyncpg.Connection
) -> None:
    await connection.execute(USE, "red", today(), "r")
    await connection.execute("INSERT INTO model_prices VALUES ('*', '2020-01-01', 0, 0, 1.5)")
    await spending.set(Budget("red", "r", 1_000, 3.0))
    await check(spending, closed)
    refused = await post(closed, "/results/", NATIVE, RED)
    assert refused.status_code == 429
    for part in ("Key 'r'", "3 USD", "budget set red --key r --cost"):
        assert part in refused.json()["detail"]
    assert (await post(closed, "/results/", NATIVE, OTHER_KEY)).status_code == 202
    listed = await closed.client.get("/usage/budgets", headers=OTHER_KEY)
    assert listed.json() == [
        {"team": "red", "key": "r", "max_tokens": 1000, "used_tokens": 100, "max_cost": 3.0,
         "used_cost": 3.0, "currency": "USD", "month": f"{today():%Y-%m}"}
    ]  # fmt: skip
    assert (await closed.client.get("/usage/budgets", headers=BLUE)).json() == []
    all_teams = await closed.client.get("/usage/budgets?team=*", headers=OPERATOR)
    assert len(all_teams.json()) == 1
    forbidden = await closed.client.get("/usage/budgets?team=red", headers=BLUE)
    assert forbidden.status_code == 403


async def test_a_request_costs_no_statement_and_an_unavailable_database_changes_nothing(
    closed: Service, spending: Spending, connection: asyncpg.Connection
) -> None:
    await connection.execute(USE, "red", today(), "r")
    await spending.set(Budget("red", WHOLE_TEAM, 1, None))
    await check(spending, closed)

    class Unreachable:
        async def fetch(self, *_: object) -> None:
            raise DatabaseUnavailableError("as a test wants it")

    guard = closed.services.budgets
    guard._database = Unreachable()  # type: ignore[assignment]
    for headers, status in ((RED, 429), (BLUE, 202)) * 5:
        assert (await post(closed, "/results/", NATIVE, headers)).status_code == status
    guard._database = closed.services.database


async def test_a_budget_that_the_month_before_used_up_is_open(
    closed: Service, spending: Spending, connection: asyncpg.Connection
) -> None:
    await spending.set(Budget("red", WHOLE_TEAM, 1, None))
    await connection.execute(
        "UPDATE budgets SET month = $1, used_tokens = 9, checked_at = now()",
        (today().replace(day=1) - timedelta(days=1)).replace(day=1),
    )
    await closed.services.budgets.refresh()
    assert (await post(closed, "/results/", NATIVE, RED)).status_code == 202
    await connection.execute("UPDATE budgets SET month = $1", today().replace(day=1))
    await closed.services.budgets.refresh()
    assert (await post(closed, "/results/", NATIVE, RED)).status_code == 429
    # The month ends before the next look.
    found = closed.services.budgets._exhausted["red", WHOLE_TEAM]
    object.__setattr__(found, "ends_at", datetime.now(UTC).timestamp() - 1)
    assert (await post(closed, "/results/", NATIVE, RED)).status_code == 202


@pytest.mark.parametrize(
    ("max_tokens", "max_cost"), [(400, None), (None, 10.0), (400, 10.5), (401, 10.0)]
)
async def test_each_threshold_is_one_signed_message_and_a_failed_call_is_repeated(
    settings: Settings, spending: Spending, connection: asyncpg.Connection,
    max_tokens: int | None, max_cost: float | None,
) -> None:  # fmt: skip
    await connection.execute("INSERT INTO model_prices VALUES ('*', '2020-01-01', 25e3, 25e3, 0)")
    settings = settings.model_copy(update={"webhook_allow_private": True})
    async with receiving(answer(500)) as receiver, open_services(settings, "test") as services:
        await spending.set(Budget("red", "r", max_tokens, max_cost, receiver.url))
        sender = Sender(settings)
        alerts = BudgetAlerts(services.database, services.outbox, sender, settings, SHORT)
        others = Spending(services.database)
        async with sender:
            for use, count in ((1, 0), (2, 1), (3, 1), (4, 3)):
                await connection.execute(USE, "red", today(), "r")
                await connection.execute("UPDATE budgets SET checked_at = NULL")
                await asyncio.gather(*(one.check() for one in (spending, others) * 3))
                rows = await connection.fetch("SELECT threshold FROM budget_alerts")
                assert len(rows) == count, use

            async def is_delivered() -> bool:
                await alerts.deliver()
                return not await connection.fetchval(
                    "SELECT count(*) FROM budget_alerts WHERE state <> 'delivered'"
                )

            await until(is_delivered)
        secret = (await services.outbox.secret("red")).secret
    events = {call.id: call.verify(secret) for call in receiver.calls}
    assert len(receiver.calls) == 4  # the first one failed
    assert sorted(one["data"]["threshold_percent"] for one in events.values()) == [50, 80, 100]
    first = next(one for one in events.values() if one["data"]["threshold_percent"] == 50)
    assert first["type"] == "budget.threshold"
    assert first["data"] == {
        "team": "red", "key": "r", "month": f"{today():%Y-%m}", "threshold_percent": 50,
        "max_tokens": max_tokens, "used_tokens": 200, "max_cost": max_cost, "used_cost": 5.0,
        "currency": "USD",
    }  # fmt: skip


@pytest.mark.trial
async def test_a_service_with_a_worker_counts_refuses_and_calls_by_itself(
    settings: Settings, connection: asyncpg.Connection
) -> None:
    settings = settings.model_copy(update={"webhook_allow_private": True})
    async with receiving() as receiver, run_service(settings, with_worker=True) as service:
        budget = Budget("default", WHOLE_TEAM, 3, None, receiver.url)
        await service.services.spending.set(budget)
        await finish(service, "one {{chunks=3}}")

        async def is_refused() -> bool:
            answer = await service.client.post("/results/", json=NATIVE)
            return answer.status_code == 429

        await until(is_refused, 60)

        async def is_called() -> bool:
            return len({call.id for call in receiver.calls}) == 3

        await until(is_called, 30)


def test_the_command_sets_lists_and_removes_budgets(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_database(settings, monkeypatch)
    hook = "https://example.org/hook"
    assert main(["budget", "set", "red", "--tokens", "1000000", "--webhook", hook]) == 0
    assert main(["budget", "set", "red", "--key", "k", "--cost", "12.5"]) == 0
    assert main(["budget", "list"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1:] == [
        ["red", "-", "-", "0", "1000000", "0.00", "-", hook],
        ["red", "k", "-", "0", "-", "0.00", "12.5", "-"],
    ]
    assert main(["budget", "unset", "red", "--key", "k"]) == 0
    assert main(["budget", "unset", "red", "--key", "k"]) == 1
    assert main(["budget", "set", "red"]) == 2
    assert main(["budget", "set", "red", "--tokens", "1", "--webhook", "ftp://x"]) == 2
    for wrong in ("0", "-1", "nan", "1e99", "x"):
        with pytest.raises(SystemExit):
            main(["budget", "set", "red", f"--cost={wrong}"])
    assert main(["budget", "list"]) == 0
    assert "1000000" in capsys.readouterr().out
