"""/health/ready: which part is down, and what to do; and that nothing starts on another schema."""

import asyncio
import subprocess
import sys
from typing import Any

import asyncpg
import httpx
import pytest
from alembic.script import ScriptDirectory

from app.api.metrics_server import MetricsServer
from app.cli.up import processes
from app.core import schema_version
from app.core.database import Database
from app.core.errors import SchemaMismatchError
from app.core.settings import Settings
from tests.conftest import ROOT, Service, make_settings, run_service
from tests.integration.support import assert_problem, until
from tests.postgres import PostgresServer


async def ready(service: Service) -> httpx.Response:
    service.services.readiness._expires = 0.0
    return await service.client.get("/health/ready")


async def test_all_is_well(service: Service) -> None:
    async def well() -> dict[str, Any] | None:
        answer = await ready(service)
        assert answer.status_code == 200
        found: dict[str, Any] = answer.json()
        return None if found["to_do"] else found

    assert await until(well) == {
        "database": "ok",
        "schema": "ok",
        "triton": "ok",
        "models_ready": ["scripted"],
        "workers": "ok",
        "to_do": [],
    }


async def test_without_worker_and_triton_results_are_accepted(
    postgres_server: PostgresServer, database_name: str
) -> None:
    nowhere = make_settings(postgres_server, database_name, triton_grpc="127.0.0.1:1")
    async with run_service(nowhere, with_worker=False) as service:
        answer = await ready(service)
        assert answer.status_code == 200
        found = answer.json()
        assert found["workers"] == "none renews its lease"
        assert "127.0.0.1:1" in found["triton"]
        assert [line.split()[0:2] for line in found["to_do"]] == [
            ["Start", "a"],
            ["Start", "Triton,"],
        ]
        assert "python -m app worker" in found["to_do"][0]


async def test_without_a_database_each_part_is_told(
    postgres_server: PostgresServer, database_name: str
) -> None:
    nowhere = make_settings(
        postgres_server, database_name, database_host="127.0.0.1:1", database_timeout_seconds=0.2
    )
    async with run_service(nowhere, with_worker=False) as service:
        problem = assert_problem(await ready(service), 503, "database_unavailable")
        assert "Refused" in problem["database"]
        assert (problem["schema"], problem["workers"]) == ("unknown", "unknown")
        assert "LLM_DATABASE_URL" in problem["to_do"][0]


async def test_a_schema_that_was_never_made_or_is_old_is_not_ready(
    api: Service, connection: asyncpg.Connection
) -> None:
    await connection.execute("UPDATE alembic_version SET version_num = '0001'")
    problem = assert_problem(await ready(api), 503, "schema_mismatch")
    assert problem["database"] == "ok"
    assert "at 0001" in problem["schema"]
    assert "python -m app migrate" in problem["detail"]
    await connection.execute("DROP TABLE alembic_version")
    problem = assert_problem(await ready(api), 503, "schema_mismatch")
    assert "no schema" in problem["schema"]


async def test_while_a_newer_version_is_rolled_out_the_old_processes_go_on(
    api: Service, connection: asyncpg.Connection
) -> None:
    await connection.execute("UPDATE alembic_version SET version_num = '9999'")
    answer = await ready(api)
    assert answer.status_code == 200
    assert answer.json()["schema"] == "newer: 9999"


async def test_a_flood_asks_the_database_once_a_second(api: Service) -> None:
    await api.client.get("/health/ready")
    look = api.services.readiness._state
    answers = await asyncio.gather(*(api.client.get("/health/ready") for _ in range(50)))
    assert {answer.status_code for answer in answers} == {200}
    api.services.readiness._expires = float("inf")
    await api.client.get("/health/ready")
    assert api.services.readiness._state.workers == look.workers


async def test_a_worker_tells_it_on_its_own_port(service: Service, settings: Settings) -> None:
    port = processes.free_port()
    changed = settings.model_copy(update={"metrics_port": port})
    parts = service.services
    serving = asyncio.create_task(
        MetricsServer(changed, parts.metrics_collector.text, parts.readiness.report).run()
    )
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:

        async def answered() -> httpx.Response | None:
            try:
                return await client.get("/health/ready")
            except httpx.TransportError:
                return None

        answer = await until(answered)
        assert (answer.status_code, answer.json()["database"]) == (200, "ok")
        parts.readiness._expires = 0.0
        connection = await parts.database.connect()
        await connection.execute("UPDATE alembic_version SET version_num = '0001'")
        await connection.close()
        assert_problem(await client.get("/health/ready"), 503, "schema_mismatch")
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)


# --- starts ---------------------------------------------------------------------------------------


def test_the_expected_revision_is_the_last_migration() -> None:
    assert schema_version.expected() == ScriptDirectory(str(ROOT / "db")).get_current_head()
    assert schema_version.fault(schema_version.expected()) is None


@pytest.mark.parametrize(
    ("version", "advice"),
    [
        ("0011", "python -m app migrate"),
        ("9999", f"migrate --to {schema_version.expected()}"),
        (None, "app migrate"),
    ],
)
@pytest.mark.parametrize("command", [["serve"], ["worker"]])
async def test_nothing_starts_on_another_schema(
    settings: Settings,
    connection: asyncpg.Connection,
    version: str | None,
    advice: str,
    command: list[str],
) -> None:
    if version is None:
        await connection.execute("DROP TABLE alembic_version")
    else:
        await connection.execute("UPDATE alembic_version SET version_num = $1", version)
    if (command, version) not in (
        (["serve"], "0011"),
        (["worker"], "9999"),
    ):  # a process takes long
        async with Database(settings, "test") as database:
            with pytest.raises(SchemaMismatchError, match=advice):
                await schema_version.guard(database)
        return
    environment = {
        "LLM_DATABASE_URL": settings.database_host,
        "LLM_DATABASE_ADMIN_USER": settings.database_user,
        "LLM_DATABASE_PASSWORD": settings.database_password.get_secret_value(),
        "LLM_DATABASE_DB": settings.database_name,
        "LLM_PORT": str(processes.free_port()),
    }
    process = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "app", *command],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert process.returncode == 2, process.stderr
    assert advice in process.stderr
    assert "Traceback" not in process.stderr
