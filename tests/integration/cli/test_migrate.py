"""`python -m app migrate` as a program: up, back, and refusals in one line."""

import os
import subprocess
import sys

import asyncpg
import pytest

from app.core import schema_version
from app.core.settings import Settings
from tests.conftest import ROOT, make_settings
from tests.integration.cli.test_token import environment_of
from tests.postgres import PostgresServer

NEWEST = schema_version.expected()


@pytest.fixture
def settings(postgres_server: PostgresServer, database_name: str) -> Settings:
    return make_settings(postgres_server, database_name)


def migrate(
    settings: Settings, *arguments: str, **changes: str
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "app", "migrate", *arguments],
        cwd=ROOT, env=os.environ | environment_of(settings) | changes,
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def assert_refused(ended: "subprocess.CompletedProcess[str]", *words: str) -> None:
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.count("\n") == 1, ended.stderr
    for word in words:
        assert word in ended.stderr


@pytest.mark.trial
async def test_back_and_up_again(settings: Settings, connection: asyncpg.Connection) -> None:
    former = schema_version.revisions()[-3]
    for arguments, revision in ((("--to", former), former), ((), NEWEST), (("--to", NEWEST), NEWEST)):  # fmt: skip
        ended = migrate(settings, *arguments)
        assert ended.returncode == 0, ended.stderr
        assert await schema_version.read(connection) == revision
        assert f"schema is at {revision}" in ended.stderr


@pytest.mark.trial
async def test_a_loss_needs_force(settings: Settings, connection: asyncpg.Connection) -> None:
    await connection.execute(
        "INSERT INTO revoked_tokens (team_id, token_id) VALUES ('red', 'ci-7')"
    )
    ended = migrate(settings, "--to", "0002")
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].endswith("Add --force to accept that.")
    assert "Traceback" not in ended.stderr
    assert migrate(settings, "--to", "0002", "--force").returncode == 0
    assert await schema_version.read(connection) == "0002"


async def test_a_newer_schema_is_left_to_its_version(
    settings: Settings, connection: asyncpg.Connection
) -> None:
    await connection.execute("UPDATE alembic_version SET version_num = '9999'")
    for arguments in ((), ("--to", "0002")):
        refused = migrate(settings, *arguments)
        assert_refused(refused, "at 9999", f"migrate --to {NEWEST}")
    assert await schema_version.read(connection) == "9999"


@pytest.mark.parametrize("revision", ["9999", "head", "1"])
def test_an_unknown_revision_is_refused(settings: Settings, revision: str) -> None:
    assert_refused(migrate(settings, "--to", revision), "--to", f"0001 to {NEWEST}")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("LLM_DATABASE_URL", "127.0.0.1:1"),
        ("LLM_DATABASE_URL", "database.invalid"),
        ("LLM_DATABASE_ADMIN_USER", "stranger"),
        ("LLM_DATABASE_DB", "nowhere"),
    ],
)
def test_a_database_that_cannot_be_used_is_named_by_its_setting(
    settings: Settings, name: str, value: str
) -> None:
    assert_refused(migrate(settings, **{name: value}), name)
