"""`python -m app doctor`: its findings and its advice."""

import subprocess
import sys
import time
from pathlib import Path

import asyncpg
import orjson
import pytest

from app.cli.doctor import database as database_checks, local
from app.cli.doctor.command import examine
from app.cli.doctor.findings import Finding, Level
from app.cli.up.triton import EmbeddedTriton
from app.core import schema_version
from app.core.settings import Settings
from tests.conftest import ROOT, make_settings, run_service
from tests.integration.support import until
from tests.postgres import PostgresServer


def of(findings: list[Finding], part: str) -> list[Finding]:
    return [one for one in findings if one.part == part]


def only(findings: list[Finding], part: str) -> Finding:
    (found,) = of(findings, part)
    return found


async def test_a_deployment_that_is_well(settings: Settings) -> None:
    async with run_service(settings, with_worker=True) as service:

        async def has_worker() -> bool:
            return bool((await service.services.depth.workers())["generation"])

        await until(has_worker)
        # Another Triton may listen on the default port.
        findings = await examine(settings.model_copy(update={"triton_http": "127.0.0.1:1"}))
    assert not [one for one in findings if one.level is Level.FAIL]
    # The tests' server keeps nothing over a crash of its machine, and reports that.
    warned = {one.part for one in findings if one.level is Level.WARN}
    assert warned <= {"durability", "disk", "database disk"}
    assert only(findings, "schema").found == schema_version.expected()
    assert only(findings, "models").found == "ready: scripted"
    assert only(findings, "workers").level is Level.OK
    assert only(findings, "clock").level is Level.OK
    assert "2 processes" in only(findings, "connections").found
    assert settings.database_password.get_secret_value() not in str(findings)


async def test_what_is_away_is_told(postgres_server: PostgresServer, database_name: str) -> None:
    settings = make_settings(
        postgres_server,
        database_name,
        database_host="127.0.0.1:1",
        triton_grpc="127.0.0.1:2",
    )
    findings = await examine(settings)
    assert only(findings, "database").level is Level.FAIL
    assert "LLM_DATABASE_URL" in only(findings, "database").to_do
    assert only(findings, "triton").level is Level.FAIL
    assert "127.0.0.1:2" in only(findings, "triton").found


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        ({"database_name": "no_such"}, "LLM_DATABASE_DB"),
        ({"database_user": "nobody"}, "LLM_DATABASE_ADMIN_USER"),
    ],
)
async def test_what_the_database_refuses_is_told(
    settings: Settings, change: dict[str, str], remedy: str
) -> None:
    findings = await examine(settings.model_copy(update=change))
    assert only(findings, "database").level is Level.FAIL
    assert remedy in only(findings, "database").to_do


async def test_an_old_schema_no_worker_no_model(
    settings: Settings, connection: asyncpg.Connection
) -> None:
    findings = await examine(settings)
    assert only(findings, "workers").level is Level.WARN
    assert "python -m app worker" in only(findings, "workers").to_do
    await connection.execute("UPDATE alembic_version SET version_num = '0003'")
    schema = only(await examine(settings), "schema")
    assert (schema.level, schema.to_do) == (Level.FAIL, "run `python -m app migrate`.")
    await connection.execute("DROP TABLE alembic_version")
    schema = only(await examine(settings), "schema")
    assert schema.level is Level.FAIL


async def test_servers_of_the_table_are_asked_too(
    settings: Settings, connection: asyncpg.Connection
) -> None:
    await connection.execute("INSERT INTO servers (name, grpc) VALUES ('gone', '127.0.0.1:3')")
    findings = of(await examine(settings), "triton")
    assert [one.level for one in findings] == [Level.OK, Level.WARN]
    assert "127.0.0.1:3" in findings[1].found
    none = await examine(settings.model_copy(update={"triton_grpc": ""}))
    assert [one.level for one in of(none, "triton")] == [Level.FAIL]
    await connection.execute("DELETE FROM servers")
    none = await examine(settings.model_copy(update={"triton_grpc": ""}))
    assert [one.level for one in of(none, "triton")] == [Level.WARN]


async def test_what_the_server_is_set_to_is_judged(
    settings: Settings, connection: asyncpg.Connection, database_name: str
) -> None:
    await connection.execute(f"ALTER DATABASE {database_name} SET synchronous_commit = off")
    await connection.execute(f"ALTER DATABASE {database_name} SET track_counts = off")
    findings = await examine(settings.model_copy(update={"database_pool_size": 200}))
    assert "synchronous_commit is off" in [one.found for one in of(findings, "durability")]
    assert only(findings, "autovacuum").level is Level.WARN
    assert only(findings, "connections").level is Level.WARN
    await connection.execute(
        f"ALTER DATABASE {database_name} SET default_transaction_read_only = on"
    )
    assert only(await examine(settings), "database").level is Level.FAIL


async def test_clocks_that_differ(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    for ahead, level in ((5.0, Level.WARN), (-100.0, Level.FAIL)):
        monkeypatch.setattr(database_checks, "_now", lambda ahead=ahead: time.time() - ahead)
        assert only(await examine(settings), "clock").level is level


async def test_little_space(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_MIN_FREE_BYTES", 10**18)
    # A small file system, such as a container's /tmp, is judged by its free share.
    for share, level in ((1.0, Level.WARN), (0.0, Level.OK)):
        monkeypatch.setattr(local, "_MIN_FREE_SHARE", share)
        findings = of(await examine(settings), "disk")
        assert {one.level for one in findings} == {level}


@pytest.mark.parametrize(
    ("change", "level", "word"),
    [
        ({"host": "0.0.0.0"}, Level.FAIL, "LLM_HOST"),  # noqa: S104 - judged, not bound
        ({"host": "0.0.0.0", "allow_unauthenticated": True}, Level.WARN, "every client"),  # noqa: S104
        ({"jwt_secret": "short"}, Level.WARN, "JWT_SECRET"),
        ({"default_deadline_seconds": 1e9}, Level.WARN, "LLM_MAX_DEADLINE_SECONDS"),
        ({"team_max_queued": 10, "max_queued": 5}, Level.WARN, "LLM_TEAM_MAX_QUEUED"),
        ({"flush_seconds": 5.0, "lease_seconds": 2.0}, Level.WARN, "LLM_FLUSH_SECONDS"),
        ({"metrics_port": 9464, "metrics_host": "10.0.0.1"}, Level.WARN, "metrics"),
        ({"webhook_allow_private": True}, Level.WARN, "LLM_WEBHOOK_ALLOW_PRIVATE"),
        ({"image_urls": "any"}, Level.WARN, "LLM_IMAGE_URLS"),
        ({"model_repository": Path("/no/such")}, Level.WARN, "LLM_MODEL_REPOSITORY"),
    ],
)
def test_settings_that_contradict_or_expose(
    postgres_server: PostgresServer, change: dict[str, object], level: Level, word: str
) -> None:
    settings = make_settings(postgres_server, "x", None, **change)
    found = [one for one in local.check_settings(settings) if one.level is level]
    assert word in " ".join(one.found for one in found), found
    assert all(one.to_do for one in found)


def run(environment: dict[str, str], *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "app", "doctor", *options],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.trial
def test_the_command(
    postgres_server: PostgresServer, template: str, triton: EmbeddedTriton
) -> None:
    environment = {
        "LLM_DATABASE_URL": f"{postgres_server.host}:{postgres_server.port}",
        "LLM_DATABASE_ADMIN_USER": postgres_server.user,
        "LLM_DATABASE_PASSWORD": postgres_server.password,
        "LLM_DATABASE_DB": template,
        "TRITON_GRPC_SERVICE": triton.address("grpc"),
        "LLM_TRITON_SECRET": triton.secret,
    }
    table = run(environment)
    assert table.returncode == 0, table.stdout + table.stderr
    assert table.stdout.splitlines()[0].split() == ["part", "found", "what", "to", "change"]
    assert "python -m app worker" in table.stdout
    assert postgres_server.password not in table.stdout
    assert triton.secret not in table.stdout
    reported_at = run(environment | {"TRITON_GRPC_SERVICE": "127.0.0.1:1"}, "--json")
    assert reported_at.returncode == 1
    levels = {one["part"]: one["level"] for one in orjson.loads(reported_at.stdout)}
    assert (levels["triton"], levels["database"], levels["schema"]) == ("fail", "ok", "ok")
    wrong = run({"LLM_DATABASE_URL": "x", "LLM_PORT": "99999"}, "--json")
    assert wrong.returncode == 1
    assert "LLM_PORT" in str(orjson.loads(wrong.stdout))
