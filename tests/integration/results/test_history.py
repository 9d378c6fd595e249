"""GET /history and GET /system: figures of one's own team, and of the whole service."""

from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import pytest

from app import __version__
from app.core import schema_version
from app.core.settings import Settings
from app.results.stats import histogram
from app.results.stats.history import HistoryStore
from tests.conftest import Service, run_service
from tests.integration.auth.test_auth import bearer, guarded
from tests.integration.support import assert_problem, finish, send, until
from tests.unit.auth.test_jwt import sign

__all__ = ["guarded"]

ADD = """
INSERT INTO minute_stats VALUES
  ($1, date_trunc('minute', now() - make_interval(mins => $2)), $3, $4, $5, 10, 20, $6, $6, $6)
"""


def taking(*seconds: float) -> list[int]:
    counts = [0] * histogram.SIZE
    for one in seconds:
        counts[histogram.bucket_of(one)] += 1
    return counts


async def read(service: Service, path: str = "/history", **query: str | int) -> Any:
    answer = await service.client.get(path, params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_what_ended_is_in_the_history(service: Service) -> None:
    await finish(service, "{{chunks=3}}")
    await finish(service, "late", deadline_seconds=0.0001)

    async def both() -> list[dict[str, Any]] | None:
        points = await read(service)
        done = sum(point["completed"] + point["failed"] for point in points)
        return points if done == 2 else None

    points = await until(both)
    assert sum(point["completed"] for point in points) == 1
    (point,) = (point for point in points if point["completed"])
    assert (point["model_name"], point["minutes"]) == ("scripted", 1)
    assert point["completion_tokens"] > 0
    for name in ("ttft", "seconds", "queue"):
        assert 0 <= point[f"{name}_p50"] <= point[f"{name}_p95"] < 60
    minute = datetime.fromisoformat(point["minute"])
    assert timedelta(0) <= datetime.now(UTC) - minute < timedelta(minutes=3)


async def test_points_are_summed_by_step_and_model(
    api: Service, connection: asyncpg.Connection
) -> None:
    for minutes, model, ended_as, results, seconds in (
        (1, "a", "completed", 2, (0.1, 0.1)), (1, "a", "cancelled", 3, (100.0,) * 3),
        (1, "b", "completed", 1, ()), (50, "a", "completed", 5, (0.3,) * 5),
        (700, "a", "completed", 7, (0.3,) * 7), (1500, "a", "completed", 9, (0.3,) * 9),
    ):  # fmt: skip
        await connection.execute(
            ADD, "default", minutes, model, ended_as, results, taking(*seconds)
        )
    points = await read(api, minutes=30)
    by_model = {point["model_name"]: point for point in points}
    assert by_model.keys() == {"a", "b"}
    assert (by_model["a"]["completed"], by_model["a"]["failed"]) == (2, 3)
    assert by_model["a"]["prompt_tokens"] == 20
    assert by_model["a"]["seconds_p95"] == pytest.approx(0.1, rel=0.5)  # of the completed ones
    assert by_model["b"]["seconds_p50"] is None
    for minutes, completed in ((1, 0), (60, 8), (119, 8), (720, 15), (1440, 15)):
        points = await read(api, minutes=minutes)
        expected = completed or sum(point["completed"] for point in points)
        assert sum(point["completed"] for point in points) == expected
        assert [point["minute"] for point in points] == sorted(p["minute"] for p in points)
    assert sum(p["completed"] for p in await read(api, minutes=60, model_name="b")) == 1
    assert await read(api, minutes=60, model_name="none") == []


@pytest.mark.parametrize(
    ("minutes", "step"),
    [(1, 1), (120, 1), (121, 2), (600, 5), (601, 10), (1200, 10), (1201, 15), (1440, 15)],
)
async def test_steps_are_few_and_whole(api: Service, minutes: int, step: int) -> None:
    history = HistoryStore(api.services.database)
    window = await history.window(minutes)
    now = datetime.now(UTC)
    assert window.step == step
    assert window.since.minute % step == 0
    steps = (now - window.since) / timedelta(minutes=step)
    assert minutes / step - 1 <= steps <= 121


async def test_minutes_are_bounded(api: Service) -> None:
    for path in ("/history", "/system"):
        for minutes in (0, 1441, "x"):
            answer = await api.client.get(path, params={"minutes": minutes})
            assert_problem(answer, 422, "invalid_request", "query.minutes")


async def test_a_team_sees_its_own_minutes_and_operators_all(
    guarded: Settings, connection: asyncpg.Connection
) -> None:
    for team, results in (("red", 3), ("blue", 5)):
        await connection.execute(ADD, team, 1, "m", "completed", results, taking(1))
        await connection.execute(ADD, team, 1, "m", "cancelled", results, taking(1))
    async with run_service(guarded, with_worker=False) as service:
        for team, results in (("red", 3), ("blue", 5), ("", 0)):
            token = sign({"team_id": team or "nobody", "token_id": "t"})
            answer = await service.client.get("/history", headers=bearer(token))
            assert [point["completed"] for point in answer.json()] == [results] * bool(results)
            refused = await service.client.get("/system", headers=bearer(token))
            assert_problem(refused, 403, "forbidden")
        token = sign({"team_id": "ops", "token_id": "t", "scopes": ["operate"]})
        system = (await service.client.get("/system", headers=bearer(token))).json()
        assert [point["completed"] for point in system["history"]] == [8]
        assert system["failures"] == [{"code": "cancelled", "count": 8}]


async def test_the_system_tells_its_state(service: Service, connection: asyncpg.Connection) -> None:
    await finish(service, "{{chunks=1}}")
    system = await read(service, "/system")
    assert (system["version"], system["schema_version"]) == (__version__, schema_version.expected())
    assert system["database"]["size_bytes"] > 0
    tables = {table["name"]: table for table in system["database"]["tables"]}
    assert tables["results"]["size_bytes"] > 0
    (worker,) = system["workers"]
    assert worker["is_alive"] is True
    assert worker["host"]
    # The cached state is returned for a moment.
    await connection.execute("UPDATE workers SET host = 'elsewhere'")
    again = await read(service, "/system")
    assert again["now"] == system["now"]


async def test_queues_are_told_with_their_oldest(
    api: Service, connection: asyncpg.Connection
) -> None:
    for priority in (0, -5, -1):
        await send(api, "waits", priority=priority)
    oldest = "01890000-0000-7000-8000-000000000000"
    await connection.execute(
        "UPDATE results SET id = $1, team_id = 'other' WHERE priority = -5", oldest
    )
    await connection.execute(
        """INSERT INTO results (id, context_id, model_name, parameters, deadline_at)
           SELECT gen_random_uuid(), id, 'another', '{}', now() + '1 h' FROM contexts LIMIT 1"""
    )
    await connection.execute(
        "INSERT INTO queue_samples SELECT date_trunc('minute', now()), 'scripted', 3, 1"
    )
    system = await read(api, "/system", minutes=5)
    queues = {queue["name"]: queue for queue in system["queues"]}
    assert queues.keys() == {"scripted", "another"}
    assert queues["scripted"]["oldest_seconds"] > 1_000_000
    (sample,) = system["queue_history"]
    assert (sample["name"], sample["queued"], sample["running"]) == ("scripted", 3, 1)
