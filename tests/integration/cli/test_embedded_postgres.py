"""The embedded PostgreSQL: real clusters, real kills."""

import asyncio
import os
import signal
import stat
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import psutil
import pytest

from app.cli.up.postgres import EmbeddedPostgres
from app.cli.up.processes import StartError


@pytest.fixture
async def postgres(tmp_path: Path) -> AsyncIterator[EmbeddedPostgres]:
    server = EmbeddedPostgres(tmp_path / "postgres", tmp_path / "postgres.log")
    try:
        await server.start()
        yield server
    finally:
        await server.stop()


async def query(server: EmbeddedPostgres, sql: str) -> object:
    connection = await asyncpg.connect(
        host="127.0.0.1",
        port=server.port,
        user=server.environment["LLM_DATABASE_ADMIN_USER"],
        password=server.password,
        database=server.environment["LLM_DATABASE_DB"],
    )
    try:
        return await connection.fetchval(sql)
    finally:
        await connection.close()


def postmaster(directory: Path) -> psutil.Process:
    pid_file = directory / "cluster" / "postmaster.pid"
    return psutil.Process(int(pid_file.read_text().split()[0]))


async def test_is_durable_unicode_and_private(postgres: EmbeddedPostgres) -> None:
    for name, value in {
        "fsync": "on",
        "synchronous_commit": "on",
        "data_checksums": "on",
        "server_encoding": "UTF8",
        "listen_addresses": "127.0.0.1",
        "unix_socket_directories": "",
        "password_encryption": "scram-sha-256",
        "TimeZone": "UTC",
    }.items():
        assert await query(postgres, f"SHOW {name}") == value
    directory = postgres.directory
    assert stat.S_IMODE((directory / "password").stat().st_mode) == 0o600
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert stat.S_IMODE((directory / "cluster").stat().st_mode) == 0o700


async def test_wrong_password_is_refused(postgres: EmbeddedPostgres) -> None:
    with pytest.raises(asyncpg.InvalidPasswordError):
        await asyncpg.connect(
            host="127.0.0.1", port=postgres.port, user="postgres", password="guess"
        )


async def test_never_runs_as_root(postgres: EmbeddedPostgres) -> None:
    uids = postmaster(postgres.directory).uids()
    assert set(uids) == ({65_534} if os.geteuid() == 0 else {os.geteuid()})


async def test_data_survives_stop_and_start_on_the_same_port(postgres: EmbeddedPostgres) -> None:
    port = postgres.port
    await query(postgres, "CREATE TABLE kept AS SELECT 42 AS answer")
    await postgres.stop()
    await postgres.start()
    assert postgres.port == port
    assert await query(postgres, "SELECT answer FROM kept") == 42


async def test_comes_back_at_once_after_kill_9(postgres: EmbeddedPostgres) -> None:
    await query(postgres, "CREATE TABLE kept AS SELECT 42 AS answer")
    postmaster(postgres.directory).kill()
    assert await postgres.wait() == "was ended by SIGKILL"
    await postgres.start()
    assert await query(postgres, "SELECT answer FROM kept") == 42


async def test_a_cluster_left_unfinished_is_made_anew(tmp_path: Path) -> None:
    unfinished = tmp_path / "postgres" / "cluster.unfinished"
    unfinished.mkdir(parents=True)
    (unfinished / "PG_VERSION").write_text("18\n")
    server = EmbeddedPostgres(tmp_path / "postgres", tmp_path / "log")
    await server.start()
    try:
        assert await query(server, "SELECT 1") == 1
        assert not unfinished.exists()
    finally:
        await server.stop()


async def test_a_pid_file_of_a_stranger_is_ignored(postgres: EmbeddedPostgres) -> None:
    await postgres.stop()
    pid_file = postgres.directory / "cluster" / "postmaster.pid"
    stranger = subprocess.Popen(["sleep", "60"])
    try:
        pid_file.write_text(f"{stranger.pid}\n{pid_file.parent}\n")
        await postgres.start()
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


async def test_a_broken_cluster_is_told_with_its_log(postgres: EmbeddedPostgres) -> None:
    await postgres.stop()
    (postgres.directory / "cluster" / "global" / "pg_control").unlink()
    with pytest.raises(StartError, match=r"pg_control.*postgres\.log"):
        await postgres.start()


@pytest.mark.trial
async def test_ends_with_its_parent(tmp_path: Path) -> None:
    script = f"""
        import asyncio, pathlib, time
        from app.cli.up.postgres import EmbeddedPostgres
        base = pathlib.Path({str(tmp_path)!r})
        asyncio.run(EmbeddedPostgres(base / "postgres", base / "log").start())
        print("up", flush=True)
        time.sleep(600)
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    with parent.stdout:
        assert await asyncio.to_thread(parent.stdout.readline) == "up\n"
        server = postmaster(tmp_path / "postgres")
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    await asyncio.to_thread(psutil.wait_procs, [server], timeout=10)
    assert not server.is_running() or server.status() == psutil.STATUS_ZOMBIE
    # A new run does not trip over what is left of it.
    successor = EmbeddedPostgres(tmp_path / "postgres", tmp_path / "log")
    await successor.start()
    await successor.stop()
