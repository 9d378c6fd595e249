"""The PostgreSQL of a test session: testcontainers where Docker has an image, else embedded."""

import asyncio
import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import asyncpg
import psutil

from app.cli.up.postgres import DATABASE, HOST, USER, EmbeddedPostgres
from bench.pgbouncer import Address

IMAGE = "postgres:18"
# On a disk, making and dropping a test's database takes three times the processor time.
_MEMORY = Path("/dev/shm")  # noqa: S108 - the directory made in it is private
_MEMORY_BYTES = 4 << 30  # free, for the servers of four test processes: some 300 MB each
_PREFIX = "llm-tests-"  # and the id of the process that removes the directory


@dataclass(frozen=True)
class PostgresServer(Address):
    """A server for tests."""

    maintenance_database: str

    async def connect(self) -> asyncpg.Connection:
        """Connect outside any test's database."""
        connection: asyncpg.Connection = await asyncpg.connect(
            host=self.host,
            port=self.port,
            user=self.user,
            password=self.password,
            database=self.maintenance_database,
        )
        return connection

    async def execute(self, statement: str) -> None:
        """Run a statement outside any test's database."""
        connection = await self.connect()
        try:
            await connection.execute(statement)
        finally:
            await connection.close()


@contextlib.contextmanager
def start_postgres(directory: Path) -> Iterator[PostgresServer]:
    """A server for as long as the context lasts."""
    start = _container if _has_image() else _embedded
    with start(directory) as server:
        asyncio.run(_hash_once(server))
        yield server


async def _hash_once(server: PostgresServer) -> None:
    """Store the password with one round of its hash: tests connect some ten thousand times (2 ms each)."""
    await server.execute(
        f"SET scram_iterations = 1; ALTER ROLE {server.user} PASSWORD '{server.password}'"
    )


def _has_image() -> bool:
    """Return True if a Docker engine answers and already has the image: nothing is pulled."""
    if "DOCKER_HOST" not in os.environ and not Path("/var/run/docker.sock").exists():
        return False  # the client would leak a socket to find out
    import docker
    from docker.errors import DockerException

    try:
        client = docker.from_env(timeout=5)
    except DockerException:
        return False
    with contextlib.closing(client):
        try:
            client.images.get(IMAGE)
        except DockerException:
            return False
    return True


@contextlib.contextmanager
def _container(_directory: Path) -> Iterator[PostgresServer]:
    from testcontainers.community.postgres import PostgresContainer

    with PostgresContainer(IMAGE, driver=None) as container:
        yield PostgresServer(
            container.get_container_host_ip(),
            int(container.get_exposed_port(5432)),
            container.username,
            container.password,
            container.dbname,
        )


@contextlib.contextmanager
def _embedded(directory: Path) -> Iterator[PostgresServer]:
    with _data_directory(directory) as data:
        server = EmbeddedPostgres(data, directory / "postgres.log", durable=False)
        asyncio.run(server.start())
        try:
            yield PostgresServer(HOST, server.port, USER, server.password, DATABASE)
        finally:
            asyncio.run(server.stop())


@contextlib.contextmanager
def _data_directory(directory: Path) -> Iterator[Path]:
    """A directory for a cluster: in memory where there is enough, else in `directory`."""
    if not _MEMORY.is_dir() or shutil.disk_usage(_MEMORY).free < _MEMORY_BYTES:
        yield directory / "data"
        return
    for left in _MEMORY.glob(f"{_PREFIX}*"):  # by a test process that was killed
        if not psutil.pid_exists(int(left.name.removeprefix(_PREFIX).partition("-")[0])):
            shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{_PREFIX}{os.getpid()}-", dir=_MEMORY) as data:
        yield Path(data)
