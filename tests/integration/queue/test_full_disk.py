"""A full disk: writes are refused in words, reads go on, and with room again nothing is missing.

The database of these tests is in a tablespace on a file system of a few megabytes, which a file fills
up: PostgreSQL meets ENOSPC as it would on its own disk. Where mounting is not permitted, a trigger
raises the same error instead (53100) in the same server.
"""

import asyncio
import contextlib
import math
import os
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import asyncpg
import httpx
import pytest

from app.cli.up.postgres import HOST, NOBODY, USER, EmbeddedPostgres
from app.cli.up.triton import EmbeddedTriton
from app.core.database import Retry
from app.core.errors import DatabaseFullError
from app.core.settings import Settings
from tests.conftest import connect, make_settings, migrate, run_service
from tests.integration.support import (
    assert_openai_error,
    assert_problem,
    finish,
    read,
    send,
    until,
    until_running,
)
from tests.postgres import PostgresServer

_MEGABYTES = 40
_LONG = "{{chunks=300 delay_ms=5}}"
_REFUSE = """
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
  RAISE EXCEPTION 'could not extend file: No space left on device' USING ERRCODE = '53100'; END $$
"""
_USE_UP = """
INSERT INTO contexts (id, content)
SELECT gen_random_uuid(), repeat('x', $1) FROM generate_series(1, $2::int)
"""


@dataclass
class Disk:
    """The disk of a database: `fill` leaves no room, `free` makes it again."""

    settings: Settings
    mounted: Path | None

    async def fill(self) -> None:
        connection = await connect(self.settings)
        if self.mounted is None:
            await connection.execute(_REFUSE)
            for table in ("contexts", "results", "result_chunks"):
                await connection.execute(
                    f"CREATE TRIGGER refuse BEFORE INSERT OR UPDATE ON {table} "
                    "EXECUTE FUNCTION refuse()"
                )
        else:
            file = (self.mounted / "ballast").open("wb", buffering=0)
            with file, contextlib.suppress(OSError):
                while file.write(bytes(4_096)) == 4_096:
                    pass
            # And the room within the pages that there are.
            for size, count in ((1_900, 50), (400, 50), (20, 20), (20, 1)):
                with contextlib.suppress(asyncpg.DiskFullError):
                    while True:
                        await connection.execute(_USE_UP, size, count)
        await connection.close()

    async def free(self) -> None:
        if self.mounted is not None:
            (self.mounted / "ballast").unlink()
            return
        connection = await connect(self.settings)
        await connection.execute("DROP FUNCTION refuse CASCADE")
        await connection.close()


@contextlib.contextmanager
def _mount() -> Iterator[Path | None]:
    """A small file system, below a folder open to every user; None where none can be mounted."""
    path = Path(tempfile.mkdtemp(prefix="llm-disk-"))
    options = f"size={_MEGABYTES}m,mode=0700"
    if os.geteuid() == 0:
        options += f",uid={NOBODY},gid={NOBODY}"
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)]
    is_mounted = subprocess.run(command, check=False, capture_output=True).returncode == 0
    try:
        yield path if is_mounted else None
    finally:
        if is_mounted:
            subprocess.run(["umount", str(path)], check=True)
        path.rmdir()


@pytest.fixture
async def disk(tmp_path: Path, triton: EmbeddedTriton) -> AsyncIterator[Disk]:
    """A server of the test's own, whose database is on a small disk; its log is elsewhere."""
    with _mount() as mounted:
        postgres = EmbeddedPostgres(tmp_path / "data", tmp_path / "postgres.log", durable=False)
        await postgres.start()
        server = PostgresServer(HOST, postgres.port, USER, postgres.password, "postgres")
        if mounted is not None:
            await server.execute(f"CREATE TABLESPACE small LOCATION '{mounted}'")
        tablespace = "" if mounted is None else " TABLESPACE small"
        await server.execute(f"CREATE DATABASE tested{tablespace}")
        settings = make_settings(server, "tested", triton)
        try:
            await asyncio.to_thread(migrate, settings)
            yield Disk(settings, mounted)
        finally:
            await postgres.stop()


@pytest.mark.trial
async def test_writes_are_refused_reads_go_on_and_nothing_is_lost(disk: Disk) -> None:
    async with run_service(disk.settings, with_worker=True) as service:
        client = service.client
        before = await finish(service, "{{chunks=3}}")
        running = await send(service, _LONG)
        await until_running(service, running["id"])
        connection = await connect(disk.settings)
        counted = await connection.fetchval("SELECT count(*) FROM results")
        await disk.fill()

        body = {"model": "scripted", "content": "word " * 2_000}
        refused = await client.post("/results/", json=body)
        problem = assert_problem(refused, 503, "database_full")
        assert "disk" in problem["detail"]
        assert int(refused.headers["Retry-After"]) > 0
        chat = {"model": "scripted", "prompt": "word " * 2_000}
        assert_openai_error(await client.post("/v1/completions", json=chat), 503, "database_full")
        assert_problem(
            await client.post("/contexts/", json={"content": "word " * 2_000}), 503, "database_full"
        )
        # Reads go on, and nothing of what was refused is there.
        assert (await read(service, before["id"]))["result"] == before["result"]
        assert await connection.fetchval("SELECT count(*) FROM results") == counted
        assert (await client.get("/results/")).status_code == httpx.codes.OK
        assert (await client.get("/health/live")).status_code == httpx.codes.OK

        await disk.free()
        assert (await finish(service, "{{chunks=3}}"))["state"] == "completed"
        ended = await read(service, running["id"], wait=30)
        assert (ended["state"], ended["attempt"]) == ("completed", 1)
        assert len(ended["result"]) > len(before["result"])
        await until(lambda: connection.fetchval("SELECT count(*) = 0 FROM undigested_results"))
        assert not await connection.fetchval("SELECT count(*) FROM result_chunks")
        assert await connection.fetchval("SELECT sum(results) FROM minute_stats") == counted + 1
        await connection.close()


async def test_who_waits_for_ever_waits_for_room_too(settings: Settings) -> None:
    error = asyncpg.DiskFullError("could not extend file")
    patient, caller = Retry(math.inf), Retry(settings.database_timeout_seconds)

    async def pause_often(retry: Retry) -> None:
        for _ in range(20):
            await retry.pause(error)

    waiting = asyncio.create_task(pause_often(patient))
    with pytest.raises(DatabaseFullError):
        await pause_often(caller)
    assert not waiting.done()
    waiting.cancel()
