"""`python -m app token` as a program, on a real database that a service is running on."""

import asyncio
import os
import re
import shutil
import subprocess
import sys

import pytest

from app.core.settings import Settings
from tests.conftest import ROOT, make_settings
from tests.integration.support import serve, until
from tests.postgres import PostgresServer


def environment_of(settings: Settings) -> dict[str, str]:
    return os.environ | {
        "LLM_DATABASE_URL": settings.database_host,
        "LLM_DATABASE_ADMIN_USER": settings.database_user,
        "LLM_DATABASE_PASSWORD": settings.database_password.get_secret_value(),
        "LLM_DATABASE_DB": settings.database_name,
    }


def token(settings: Settings, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "app", "token", *arguments],
        cwd=ROOT, env=environment_of(settings), capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.trial
async def test_from_making_a_key_to_its_end(settings: Settings) -> None:
    guarded = settings.model_copy(update={"auth": "on"})
    made = token(
        guarded, "create", "--team", "red", "--name", "laptop", "--scopes", "operate,use",
        "--expires", "90d", "--max-priority", "5",
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    key = made.stdout.strip()
    other = token(guarded, "create", "--team", "blue").stdout.strip()
    assert key not in made.stderr
    async with serve(guarded) as service:

        async def status(text: str) -> int:
            answer = await service.client.get(
                "/results/", headers={"Authorization": f"Bearer {text}"}
            )
            return answer.status_code

        assert await status(key) == await status(other) == 200
        await service.services.authenticator.write_uses()
        listed = token(guarded, "list")
        assert listed.returncode == 0
        head, *lines = listed.stdout.splitlines()
        assert head.split()[:3] == ["ID", "PREFIX", "TEAM"]
        assert len(lines) == 2
        blue, red = lines
        for word in (key[:16], "red", "laptop", "use,operate", " 5 "):
            assert word in red
        assert other[:16] in blue
        assert key not in listed.stdout
        assert len(token(guarded, "list", "--team", "red").stdout.splitlines()) == 2

        # A leaked key is known as a whole; the output has only its prefix.
        ended = token(guarded, "revoke", key)
        assert ended.returncode == 0
        assert key not in ended.stdout + ended.stderr

        async def is_refused() -> bool:
            return await status(key) == 401

        await until(is_refused)
        assert await status(other) == 200
        identifier = blue.split()[0]
        assert token(guarded, "revoke", identifier).returncode == 0
    assert "blue" in token(guarded, "list").stdout


@pytest.mark.skipif(not shutil.which("curl"), reason="needs curl")
async def test_the_calls_of_the_readme(settings: Settings) -> None:
    text = (ROOT / "README.md").read_text()
    (block,) = [b for b in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) if "app token" in b]
    async with serve(settings.model_copy(update={"auth": "on"})) as service:
        api = str(service.client.base_url).rstrip("/")
        program = block.replace("http://127.0.0.1:8887", api).replace(
            ".venv/bin/python ", f"{sys.executable} "
        )
        process = await asyncio.create_subprocess_exec(
            "/bin/sh", "-euc", program, cwd=ROOT, env=environment_of(settings),
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        output, _ = await process.communicate()
    assert process.returncode == 0
    assert b'"name":"scripted"' in output


@pytest.mark.trial
async def test_revoking_a_jwt_and_what_is_not_there(settings: Settings) -> None:
    ended = token(settings, "revoke", "--team", "red", "--token-id", "t1")
    assert ended.returncode == 0, ended.stderr
    assert "t1" in token(settings, "list").stdout
    unknown = token(settings, "revoke", "llm_0123456789ab")
    assert (unknown.returncode, unknown.stdout) == (1, "")
    assert "llm_0123456789ab" in unknown.stderr


async def test_a_database_without_the_tables(postgres_server: PostgresServer) -> None:
    answer = token(make_settings(postgres_server, "postgres"), "list")
    assert answer.returncode == 1
    assert "migrate" in answer.stderr


async def test_a_database_that_refuses(settings: Settings) -> None:
    answer = token(settings.model_copy(update={"database_name": "test_nowhere"}), "list")
    assert (answer.returncode, answer.stdout) == (1, "")
    assert answer.stderr.startswith("PostgreSQL does not have LLM_DATABASE_DB: ")


@pytest.mark.parametrize(
    "changes",
    [
        {"LLM_HOST": "0.0.0.0"},  # noqa: S104
        {"LLM_HOST": "0.0.0.0", "JWT_SECRET": "changeme"},  # noqa: S104
        {"LLM_HOST": "0.0.0.0", "LLM_AUTH": "off", "JWT_SECRET": "x" * 40},  # noqa: S104
    ],
)
async def test_serve_refuses_to_start(settings: Settings, changes: dict[str, str]) -> None:
    started = subprocess.run(
        [sys.executable, "-m", "app", "serve"],
        cwd=ROOT, env=environment_of(settings) | {"LLM_PORT": "0"} | changes,
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert started.returncode == 2
    assert "changeme" not in started.stderr
    assert "LLM_HOST" in started.stderr
