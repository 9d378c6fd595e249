"""Backup and restore as docs/backup.md describes it: real pg_dump and pg_restore, results in each state."""

import asyncio
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from app.cli.up.postgres import _binaries
from app.core.settings import Settings
from tests.conftest import ROOT, Service, run_service, short_lease
from tests.integration.support import finish, read, send, until, until_running
from tests.postgres import PostgresServer

SLOW = "{{chunks=400 delay_ms=50}}"  # 20 seconds


def documented(program: str) -> list[str]:
    """The document's command, its arguments as the test has them."""
    text = (ROOT / "docs" / "backup.md").read_text()
    found = re.search(rf"^{program} .*$", text, re.MULTILINE)
    assert found, program
    return found[0].split()


async def run(program: str, settings: Settings, directory: Path) -> None:
    ((host, port),) = settings.database_addresses()
    # The database, not the file.
    command = [
        re.sub(r"\bllm\b(?!\.)", settings.database_name, word) for word in documented(program)
    ]
    command[0] = str(_binaries() / program)
    done = await asyncio.to_thread(
        subprocess.run,
        command,
        cwd=directory,
        env={
            **os.environ,
            "PGHOST": host,
            "PGPORT": str(port),
            "PGUSER": settings.database_user,
            "PGPASSWORD": settings.database_password.get_secret_value(),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


async def all_results(service: Service) -> dict[str, dict[str, Any]]:
    listed = await service.client.get("/results/", params={"limit": 100, "full": True})
    return {result["id"]: result for result in listed.json()}


@short_lease
@pytest.mark.trial
async def test_what_is_restored_goes_on_and_nothing_runs_twice(
    settings: Settings, postgres_server: PostgresServer, tmp_path: Path
) -> None:
    settings = settings.model_copy(update={"worker_slots": 1, "shutdown_grace_seconds": 0.2})
    async with run_service(settings, with_worker=True) as service:
        key = {"Idempotency-Key": "sent-before-the-backup"}
        done = await finish(service, "done")
        refused = await finish(service, "{{refuse}}")
        running = await send(service, SLOW)
        await until_running(service, running["id"])
        body = {"model": "scripted", "content": "queued"}
        sent = await service.client.post("/results/", json=body, headers=key)
        queued = sent.json()
        stopped = await send(service, "stopped while it waited")
        await service.client.post(f"/results/{stopped['id']}/cancel")
        before = await all_results(service)
        tokens = service.services.tokens
        api_key = await tokens.create("red")
        await run("pg_dump", settings, tmp_path)
        after_backup = await send(service, "sent after the backup")

    states = {result["id"]: result["state"] for result in before.values()}
    assert states == {
        done["id"]: "completed", refused["id"]: "failed", stopped["id"]: "failed",
        running["id"]: "pending", queued["id"]: "pending",
    }  # fmt: skip

    restored = settings.model_copy(update={"database_name": f"{settings.database_name}_restored"})
    await run("createdb", restored, tmp_path)
    try:
        await run("pg_restore", restored, tmp_path)
        async with run_service(restored, with_worker=True) as service:
            at_first = await all_results(service)
            assert at_first.keys() == before.keys()
            assert after_backup["id"] not in before

            # Ended is ended, to the letter.
            for ended in (done, refused, stopped):
                assert at_first[ended["id"]] == before[ended["id"]]

            # The running one belonged to a worker that is not there: it is rescued, and runs again.
            attempts = f"/results/{running['id']}/attempts"

            async def is_rescued() -> bool:
                return "worker_lost" in (await service.client.get(attempts)).text

            await until(is_rescued)
            await service.client.post(f"/results/{running['id']}/cancel")
            assert (await read(service, running["id"], wait=30))["error"]["code"] == "cancelled"

            # The queued one runs, once; who sends it again under its key is given the same.
            assert (await read(service, queued["id"], wait=30))["state"] == "completed"
            assert (await read(service, queued["id"]))["attempt"] == 1
            again = await service.client.post("/results/", json=body, headers=key)
            assert again.json()["id"] == queued["id"]
            assert (await all_results(service)).keys() == before.keys()

            # Keys are there, and new results follow.
            assert (await service.services.tokens.list("red"))[0].prefix in api_key.text
            assert (await finish(service, "new"))["state"] == "completed"
    finally:
        await postgres_server.execute(f"DROP DATABASE {restored.database_name} WITH (FORCE)")
