"""GET /usage and `python -m app usage`: sums by any grouping, and no other team's."""

import asyncio
import csv
import io
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import asyncpg
import pytest

from app.cli.main import main
from app.core.settings import Settings
from app.results.usage import report
from tests.conftest import Service, connect, run_service
from tests.integration.auth.test_auth import bearer, guarded
from tests.integration.support import assert_problem, until
from tests.unit.auth.test_jwt import sign

__all__ = ["guarded"]

RED = bearer(sign({"team_id": "red", "token_id": "r"}))
BLUE = bearer(sign({"team_id": "blue", "token_id": "b"}))
OPERATOR = bearer(sign({"team_id": "ops", "token_id": "o", "scopes": ["use", "operate"]}))
PERIOD = "from=2026-10-01&to=2026-11-30"

DAYS = """INSERT INTO usage_days VALUES
  ('red', '2026-10-31', 'k1', 'm', '', 'completed', 3, 30, 0, 300, 0, 1500000),
  ('red', '2026-11-01', 'k1', 'm', '', 'completed', 1, 10, 0, 100, 0, 500000),
  ('red', '2026-11-01', 'k2', 'n', '', 'cancelled', 2, 5, 0, 7, 0, 250000),
  ('blue', '2026-11-01', 'secret-key', 'private', '', 'model_error', 9, 9, 0, 9, 0, 9000000);
INSERT INTO usage_entries (team_id, day, token_id, model_name, adapter, ended_as, results, prompt_tokens,
    cached_prompt_tokens, completion_tokens, reasoning_tokens, engine_microseconds) VALUES
  ('red', '2026-11-01', 'k1', 'm', '', 'completed', 1, 1, 2, 3, 4, 1)"""


@pytest.fixture
async def closed(guarded: Settings, connection: asyncpg.Connection) -> AsyncIterator[Service]:
    await connection.execute(DAYS)
    async with run_service(guarded, with_worker=False) as service:
        yield service


async def rows(service: Service, query: str, headers: dict[str, str] = RED) -> Any:
    answer = await service.client.get(f"/usage?{PERIOD}&{query}", headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()["rows"]


async def test_sums_by_each_group(closed: Service) -> None:
    answer = await closed.client.get(f"/usage?{PERIOD}", headers=RED)
    assert answer.json() == {
        "from": "2026-10-01",
        "to": "2026-11-30",
        "group_by": ["model"],
        "currency": "USD",
        "rows": [
            {"model": "m", "results": 5, "completed": 5, "cancelled": 0, "failed": 0,
             "prompt_tokens": 41, "cached_prompt_tokens": 2, "completion_tokens": 403,
             "reasoning_tokens": 4, "engine_seconds": 2.000001, "cost": None},
            {"model": "n", "results": 2, "completed": 0, "cancelled": 2, "failed": 0,
             "prompt_tokens": 5, "cached_prompt_tokens": 0, "completion_tokens": 7,
             "reasoning_tokens": 0, "engine_seconds": 0.25, "cost": None},
        ],
        "total": {"results": 7, "completed": 5, "cancelled": 2, "failed": 0,
                  "prompt_tokens": 46, "cached_prompt_tokens": 2, "completion_tokens": 410,
                  "reasoning_tokens": 4, "engine_seconds": 2.250001, "cost": None},
    }  # fmt: skip
    for group, values in {
        "team": ["red"],
        "key": ["k1", "k2"],
        "adapter": [""],
        "day": ["2026-10-31", "2026-11-01"],
        "month": ["2026-10", "2026-11"],
        "outcome": ["cancelled", "completed"],
    }.items():
        found = await rows(closed, f"group_by={group}")
        assert [row[group] for row in found] == values
        assert sum(row["results"] for row in found) == 7
    found = await rows(closed, "group_by=month,key")
    assert [(row["month"], row["key"], row["results"]) for row in found] == [
        ("2026-10", "k1", 3),
        ("2026-11", "k1", 2),
        ("2026-11", "k2", 2),
    ]
    assert [row["results"] for row in await rows(closed, "group_by=")] == [7]
    assert [row["results"] for row in await rows(closed, "group_by=team&key=k2")] == [2]
    assert [row["results"] for row in await rows(closed, "group_by=team&model=m")] == [5]
    assert await rows(closed, "model=private") == []


async def test_a_period_has_both_of_its_days_and_defaults_to_this_month(closed: Service) -> None:
    for first, last, count in (
        ("2026-10-31", "2026-10-31", 3),
        ("2026-10-31", "2026-11-01", 7),
        ("2026-11-02", "2026-11-30", 0),
    ):
        path = f"/usage?from={first}&to={last}"
        answer = await closed.client.get(path, headers=RED)
        assert answer.json()["total"]["results"] == count
    answer = await closed.client.get("/usage?to=2026-10-31", headers=RED)
    assert (answer.json()["from"], answer.json()["total"]["results"]) == ("2026-10-01", 3)


PRICES = """INSERT INTO model_prices VALUES
  ('m', '2026-10-01', 1000000, 0, 0), ('m', '2026-11-01', 0, 2000000, 10),
  ('m', '2026-12-01', 9e9, 9e9, 9e9), ('*', '2026-10-15', 0, 0, 7), ('*', '2026-10-31', 0, 0, 1000)"""


async def test_costs_are_by_the_prices_of_each_day_and_model(
    closed: Service, connection: asyncpg.Connection
) -> None:
    await connection.execute("INSERT INTO model_prices VALUES ('other', '2026-01-01', 1, 1, 1)")
    assert [row["cost"] for row in await rows(closed, "group_by=day")] == [None, None]
    # A model's own price counts, also where that of all models is newer, and the newest of each.
    await connection.execute(PRICES)
    for group, costs in (
        ("day", [30, 2 * 103 + 5.00001 + 250]),
        ("model", [30 + 2 * 103 + 5.00001, 250]),
        ("outcome", [250, 30 + 2 * 103 + 5.00001]),
        ("", [30 + 2 * 103 + 5.00001 + 250]),
    ):
        found = await rows(closed, f"group_by={group}")
        assert [row["cost"] for row in found] == pytest.approx(costs), group
        assert sum(row["results"] for row in found) == 7
    answer = await closed.client.get(f"/usage?{PERIOD}", headers=RED)
    assert answer.json()["total"]["cost"] == pytest.approx(491.00001)


async def test_as_csv(closed: Service) -> None:
    path = f"/usage?{PERIOD}&group_by=day,model&format=csv"
    answer = await closed.client.get(path, headers=RED)
    assert answer.headers["content-type"] == "text/csv; charset=utf-8"
    assert "usage-2026-10-01-2026-11-30.csv" in answer.headers["content-disposition"]
    table = list(csv.DictReader(io.StringIO(answer.text)))
    assert [(row["day"], row["model"], row["results"]) for row in table] == [
        ("2026-10-31", "m", "3"),
        ("2026-11-01", "m", "2"),
        ("2026-11-01", "n", "2"),
    ]
    assert table[1]["engine_seconds"] == "0.500001"


async def test_another_team_is_for_operators(closed: Service) -> None:
    for name in ("blue", "*", "nobody"):
        for query in (f"team={name}", f"te%61m={name}", f"group_by=team&team={name}"):
            answer = await closed.client.get(f"/usage?{PERIOD}&{query}", headers=RED)
            assert_problem(answer, 403, "forbidden")
    assert len(await rows(closed, "team=red")) == 2
    found = await rows(closed, "group_by=team&team=*", OPERATOR)
    assert [(row["team"], row["results"], row["failed"]) for row in found] == [
        ("blue", 9, 9),
        ("red", 7, 0),
    ]
    assert [row["key"] for row in await rows(closed, "group_by=key&team=blue", OPERATOR)] == [
        "secret-key"
    ]
    assert await rows(closed, "group_by=key", OPERATOR) == []


async def test_unbounded_and_unknown_queries_are_refused(
    closed: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    for query, field in (
        ("from=2026-11-02&to=2026-11-01", "to"),
        ("from=2025-01-01&to=2026-11-01", "from"),
        ("from=0001-01-01&to=9999-12-31", "from"),
        ("group_by=model,model", "group_by"),
        ("group_by=secrets", "group_by"),
        ("group_by=model,", "group_by"),
        ("format=xml", "format"),
        ("from=yesterday", "from"),
        ("key=%00", "key"),
    ):
        answer = await closed.client.get(f"/usage?{query}", headers=RED)
        problem = assert_problem(answer, 422, "invalid_request")
        assert field in problem["errors"][0]["field"], query
    monkeypatch.setattr(report, "MAX_ROWS", 1)
    answer = await closed.client.get(f"/usage?{PERIOD}", headers=RED)
    assert "narrow" in assert_problem(answer, 422, "invalid_request")["detail"]


async def test_each_result_has_the_token_of_its_request(
    guarded: Settings, connection: asyncpg.Connection
) -> None:
    """All dialects, retries, groups and batches."""
    async with run_service(guarded, with_worker=True) as service:
        post = service.client.post
        native = {"model": "scripted", "content": "{{chunks=1}}"}
        first = (await post("/results/", json=native, headers=RED)).json()
        ended = await service.client.get(f"/results/{first['id']}?wait=30", headers=RED)
        assert ended.json()["state"] == "completed"
        context = (await post("/contexts/", json={"content": "x"}, headers=RED)).json()
        for path, body in (
            ("/results/", [native, native]),
            (f"/models/send/scripted/{context['id']}", None),
            (f"/results/{first['id']}/retry", None),
            ("/generate", {"inputs": "{{chunks=1}}"}),
            ("/inference", {"text": "{{chunks=1}}"}),
            ("/v1/completions", {"model": "scripted", "prompt": "{{chunks=1}}", "n": 2}),
            ("/v1/responses", {"model": "scripted", "input": "{{chunks=1}}"}),
        ):
            answer = await post(path, json=body, headers=RED)
            assert answer.status_code in (200, 202), answer.text
        body = {"model": "scripted", "prompt": "x", "max_tokens": 1}
        line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
        file = await post(
            "/v1/files",
            files={"file": ("a.jsonl", json.dumps(line))},
            data={"purpose": "batch"},
            headers=BLUE,
        )
        batch = {"endpoint": "/v1/completions", "completion_window": "24h"}
        made = await post(
            "/v1/batches", json=batch | {"input_file_id": file.json()["id"]}, headers=BLUE
        )
        assert made.status_code == 200, made.text
        of_batch = "SELECT count(*) FROM results WHERE team_id = 'blue'"
        await until(lambda: connection.fetchval(of_batch))
    found = await connection.fetch(
        "SELECT team_id, token_id, count(*)::int AS n FROM results GROUP BY 1, 2 ORDER BY 1"
    )
    assert [tuple(row) for row in found] == [("blue", "b", 1), ("red", "r", 10)]


def use_database(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    ((host, port),) = settings.database_addresses()
    for name, value in {
        "LLM_DATABASE_URL": f"{host}:{port}",
        "LLM_DATABASE_ADMIN_USER": settings.database_user,
        "LLM_DATABASE_PASSWORD": settings.database_password.get_secret_value(),
        "LLM_DATABASE_DB": settings.database_name,
    }.items():
        monkeypatch.setenv(name, value)


def test_prices_are_set_from_a_day_on(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_database(settings, monkeypatch)
    for options in (
        ["m", "--prompt", "1", "--since", "2026-01-01"],
        ["m", "--prompt", "0.5", "--completion", "1.5", "--since", "2026-02-01"],
        ["m", "--completion", "2", "--since", "2026-02-01"],
        ["*", "--engine-second", "0.001"],
    ):
        assert main(["price", "set", *options]) == 0
    assert main(["price", "list"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1] == ["*", str(datetime.now(UTC).date()), "0", "0", "0.001"]
    assert lines[2:] == [
        ["m", "2026-02-01", "0", "2", "0"],
        ["m", "2026-01-01", "1", "0", "0"],
    ]
    assert main(["price", "unset", "m", "--since", "2026-02-01"]) == 0
    assert main(["price", "unset", "m", "--since", "2026-02-01"]) == 1
    assert main(["price", "set", "m"]) == 2
    for wrong in ("-1", "nan", "inf", "1e10", "x"):
        with pytest.raises(SystemExit):
            main(["price", "set", "m", f"--prompt={wrong}"])


def test_the_command_shows_all_teams_as_a_table_and_as_csv(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def fill() -> None:
        connection = await connect(settings)
        await connection.execute(DAYS)
        await connection.close()

    asyncio.run(fill())
    use_database(settings, monkeypatch)
    period = ["usage", "--from", "2026-10-01", "--to", "2026-11-30"]
    assert main(period) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[:3] for line in lines] == [
        ["team", "model", "results"],
        ["blue", "private", "9"],
        ["red", "m", "5"],
        ["red", "n", "2"],
    ]
    assert main([*period, "--csv", "--group-by", "key", "--team", "red", "--model", "m"]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("k1,5,5,0,0,41,2,403,4,2.000001")
    assert main(["usage", "--from", "2020-01-01", "--to", "2026-11-30"]) == 1
    assert "366 days" in capsys.readouterr().err
    for wrong in (["--group-by", "secrets"], ["--group-by", "key,key"], ["--from", "x"]):
        with pytest.raises(SystemExit):
            main(["usage", *wrong])
