"""Fixtures: a real PostgreSQL with a fresh database per test, a real Triton, the service.

Servers are started once a session. Each test has a database of its own, copied from a migrated
template, so that LISTEN/NOTIFY and SKIP LOCKED meet real commits.

With `-n 4` four processes share the tests, each with servers of its own: most tests wait for others
half of their time (tests/scheduling.py).
"""

import asyncio
import contextlib
import gc
import logging
import os
from argparse import Namespace
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from uuid import NAMESPACE_URL, uuid5

import asyncpg
import httpx
import pytest
from alembic import command
from alembic.config import Config
from fastapi import FastAPI
from fastapi.dependencies import models as dependencies_models
from hypothesis import HealthCheck, settings as hypothesis_settings
from pydantic import BaseModel

from app.api.app import create_app
from app.api.container import Services
from app.cli.up.triton import EmbeddedTriton
from app.core import logs, metrics
from app.core.settings import Settings
from tests.database_copies import DatabaseCopies, open_copies
from tests.postgres import PostgresServer, start_postgres
from tests.servers import TEMPLATE, RunningTriton, running_servers

pytest_plugins = ["tests.hangs", "tests.scheduling", "tests.shards", "tests.tiers"]

ROOT = Path(__file__).resolve().parent.parent
TRITON_VENV = ROOT / ".venv-triton"
SCRIPTED = {"scripted": ROOT / "triton" / "models" / "scripted"}
# All servers that fixtures start have it, in each process: a service may have several of them.
TRITON_SECRET = uuid5(NAMESPACE_URL, "triton").hex
_Triton = TypeVar("_Triton", bound=EmbeddedTriton)
# Tests start hundreds of processes: each of them would compile all its modules again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Tests speak TLS only with servers of their own: hundreds of clients would each read the
# certificates of all authorities (20 ms).
os.environ["SSL_CERT_FILE"] = str(ROOT / "tests" / "no_authority.pem")
# The same examples each time, however slow the machine is; others with FUZZ.
hypothesis_settings.register_profile(
    "suite",
    derandomize="FUZZ" not in os.environ,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
hypothesis_settings.load_profile("suite")
# A test machine may stall for seconds: with such a lease that fences no worker.
_LEASE_SECONDS = 15.0
_UNLOAD_SECONDS = 60.0
# For tests in which a lease runs out, or that wait for heartbeats.
short_lease = pytest.mark.parametrize("lease_seconds", [5.0], ids=["short_lease"])


def pytest_collection_finish() -> None:
    """Leave thousands of tests and modules out of each later garbage collection (0.5 s)."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Free the services of the file: FastAPI keeps the functions of thousands of apps, and with each the app."""
    if nextitem is not None and nextitem.path != item.path:
        for one in vars(dependencies_models).values():
            if hasattr(one, "cache_clear"):
                one.cache_clear()


@pytest.fixture(scope="session")
def postgres_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgresServer]:
    """PostgreSQL for the session: a container where Docker has the image, else the embedded one."""
    if servers := running_servers():
        yield servers.postgres
        return
    with start_postgres(tmp_path_factory.mktemp("postgres")) as server:
        yield server


@pytest.fixture(scope="session")
def template(postgres_server: PostgresServer) -> str:
    """The name of a database migrated to the newest schema, to copy from."""
    if not running_servers():
        asyncio.run(postgres_server.execute(f"CREATE DATABASE {TEMPLATE}"))
        migrate(make_settings(postgres_server, TEMPLATE))
    return TEMPLATE


@pytest.fixture(scope="session")
def database_copies(postgres_server: PostgresServer, template: str) -> Iterator[DatabaseCopies]:
    """Copies of the template, one for each test."""
    with open_copies(postgres_server, template) as copies:
        yield copies


@pytest.fixture
async def database_name(database_copies: DatabaseCopies) -> AsyncIterator[str]:
    """A database of the test's own."""
    async with database_copies.one() as name:
        yield name


@pytest.fixture(scope="session")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedTriton]:
    """A real tritonserver with the scripted model."""
    if servers := running_servers():
        yield RunningTriton(servers.triton)
        return
    with run_triton(EmbeddedTriton, tmp_path_factory.mktemp("triton")) as server:
        yield server
        if not server.is_down:
            asyncio.run(_unload_all(server))


async def _unload_all(server: EmbeddedTriton) -> None:
    """All models unload after all tests.

    A model never does while a call holds it that was cancelled at the wrong time, which no test notices by itself.
    """
    held = list(server.models)
    try:
        async with server.client() as client, asyncio.timeout(_UNLOAD_SECONDS):
            for model in server.models:
                await client.unload(model)
            # Triton responds before they are unloaded.
            while held := [one.name for one in await client.index() if one.reason != "unloaded"]:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
    except TimeoutError:
        pytest.fail(f"Triton does not unload {', '.join(held)}: a call of some test holds it.")


@pytest.fixture(autouse=True)
def triton_is_up(request: pytest.FixtureRequest) -> None:
    """A crash of the shared Triton fails the test that it comes in, and none of the next."""
    if "triton" in request.fixturenames:
        server: EmbeddedTriton = request.getfixturevalue("triton")
        if server.is_down:
            asyncio.run(server.start())


@pytest.fixture
def lease_seconds() -> float:
    """The lease of the test's worker; `short_lease` changes it."""
    return _LEASE_SECONDS


@pytest.fixture
def settings(
    postgres_server: PostgresServer,
    database_name: str,
    triton: EmbeddedTriton,
    lease_seconds: float,
) -> Settings:
    """Settings of a service on the test's database, with times short enough for tests."""
    return make_settings(postgres_server, database_name, triton, lease_seconds=lease_seconds)


@dataclass
class Service:
    """A running service: its client, and its parts for tests that look inside."""

    client: httpx.AsyncClient
    services: Services
    app: FastAPI


@pytest.fixture
async def service(settings: Settings) -> AsyncIterator[Service]:
    """API and worker in this process."""
    async with run_service(settings, with_worker=True) as running:
        yield running


@pytest.fixture
async def api(settings: Settings) -> AsyncIterator[Service]:
    """An API without a worker: what is enqueued stays."""
    async with run_service(settings, with_worker=False) as running:
        yield running


@pytest.fixture
async def connection(settings: Settings) -> AsyncIterator[asyncpg.Connection]:
    """A connection of the test's own to its database."""
    connection = await connect(settings)
    yield connection
    await connection.close()


@contextlib.contextmanager
def run_triton(
    kind: type[_Triton], directory: Path, models: Mapping[str, Path] = SCRIPTED
) -> Iterator[_Triton]:
    """A Triton with these models, for fixtures wider than one test."""
    server = kind(TRITON_VENV, directory / "work", models, directory / "triton.log")
    server.secret = TRITON_SECRET
    asyncio.run(server.start())
    try:
        yield server
    finally:
        asyncio.run(server.stop())


@pytest.fixture(autouse=True)
def room_for_names_in_metrics() -> None:
    """Tests before this one may have named as many models as a process has series for."""
    for names in metrics._names.values():
        names.clear()


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """Commands that a test runs in this process configure its logging, to the test's own stderr."""
    root, loggers = logging.getLogger(), [logging.getLogger(name) for name in ("", "app", "httpx")]
    handlers, levels = root.handlers[:], [logger.level for logger in loggers]
    yield
    for handler in root.handlers[:]:
        if handler not in handlers and type(handler) is logging.StreamHandler:
            root.removeHandler(handler)
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)
    logs._shows_content = False


@contextlib.asynccontextmanager
async def run_service(settings: Settings, *, with_worker: bool) -> AsyncIterator[Service]:
    """Run the app's lifespan, and a client that speaks to it without a socket."""
    app = create_app(settings, with_worker=with_worker)
    async with app.router.lifespan_context(app):
        services: Services = app.state.services
        await services.registry.refresh()
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://localhost", timeout=90
        ) as client:
            yield Service(client, services, app)


def make_settings(
    server: PostgresServer, database: str, triton: EmbeddedTriton | None = None, **changes: object
) -> Settings:
    """Settings by their field names; `changes` overrides any."""
    values: dict[str, object] = {
        "database_host": f"{server.host}:{server.port}",
        "database_user": server.user,
        "database_password": server.password,
        "database_name": database,
        "database_pool_size": 4,
        "triton_secret": TRITON_SECRET,
        "triton_refresh_seconds": 0.5,
        "model_repository": ROOT / "triton" / "models",
        "lease_seconds": _LEASE_SECONDS,
        "poll_seconds": 0.2,
        "shutdown_grace_seconds": 5.0,
    }
    if triton is not None:
        values["triton_grpc"] = triton.address("grpc")
        values["triton_secret"] = triton.secret
    settings = Settings.__new__(Settings)
    # Past BaseSettings, which reads the environment and .env: a third of a small test's time.
    BaseModel.__init__(settings, **(values | changes))
    return settings


def migrate(
    settings: Settings, revision: str = "head", *, down: bool = False, force: bool = False
) -> None:
    """Run migrations; must not be called inside an event loop."""
    config = Config(cmd_opts=Namespace(x=["force=yes"] if force else None))
    config.set_main_option("script_location", str(ROOT / "db"))
    config.attributes["settings"] = settings
    (command.downgrade if down else command.upgrade)(config, revision)


async def connect(settings: Settings) -> asyncpg.Connection:
    """Connect to a service's database."""
    ((host, port),) = settings.database_addresses()
    connection: asyncpg.Connection = await asyncpg.connect(
        host=host,
        port=port,
        user=settings.database_user,
        password=settings.database_password.get_secret_value(),
        database=settings.database_name,
    )
    return connection
