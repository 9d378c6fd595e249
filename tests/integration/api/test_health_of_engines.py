"""LLM_HEALTH: /health by the process, or by the engines; with a real Triton that loses its model."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.chaos.stack import MortalTriton
from tests.conftest import SCRIPTED, Service, make_settings, run_service, run_triton
from tests.integration.support import assert_problem, finish, read, send, until, write_model
from tests.postgres import PostgresServer

PATHS = ("/health", "/ping", "/")
MODEL = "scripted"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MortalTriton]:
    with run_triton(MortalTriton, tmp_path_factory.mktemp("triton"), SCRIPTED) as running:
        yield running


@pytest.fixture
async def mortal(server: MortalTriton) -> MortalTriton:
    """The module's server, with its model loaded."""
    await server.start()
    return server


@contextlib.asynccontextmanager
async def serving(
    postgres: PostgresServer, database: str, triton: MortalTriton, **changes: Any
) -> AsyncIterator[Service]:
    with_worker = changes.pop("with_worker", False)
    settings = make_settings(postgres, database, triton, **{"health": "engine"} | changes)
    async with run_service(settings, with_worker=with_worker) as service:
        yield service


@pytest.fixture
async def service(
    postgres_server: PostgresServer, database_name: str, mortal: MortalTriton
) -> AsyncIterator[Service]:
    async with serving(postgres_server, database_name, mortal) as running:
        yield running


async def statuses(service: Service) -> list[int]:
    return [(await service.client.get(path)).status_code for path in PATHS]


async def until_health_is(service: Service, status: int) -> None:
    async def is_so() -> bool:
        return await statuses(service) == [status] * len(PATHS)

    await until(is_so)


async def unload(triton: MortalTriton) -> None:
    async with triton.client() as client:
        await client.unload(MODEL)


async def load(triton: MortalTriton) -> None:
    async with triton.client() as client:
        await client.load(MODEL)


async def test_by_default_health_is_that_of_the_process(
    postgres_server: PostgresServer, database_name: str, mortal: MortalTriton
) -> None:
    default = make_settings(postgres_server, database_name, mortal)
    async with run_service(default, with_worker=False) as service:
        await unload(mortal)
        await service.services.registry.refresh()
        assert not service.services.registry.ready()
        assert await statuses(service) == [200, 200, 200]


@pytest.mark.trial
async def test_health_follows_the_model(service: Service, mortal: MortalTriton) -> None:
    assert await statuses(service) == [200, 200, 200]
    await unload(mortal)
    await until_health_is(service, 503)
    await load(mortal)
    await until_health_is(service, 200)


@pytest.mark.trial
async def test_an_ill_service_answers_in_the_shape_of_each_path(
    service: Service, mortal: MortalTriton
) -> None:
    await unload(mortal)
    await until_health_is(service, 503)
    answer = await service.client.get("/health")
    problem = assert_problem(answer, 503, "model_not_ready")
    assert problem["detail"] == "No model can generate: none is ready."
    assert answer.headers["retry-after"] == "5"
    for path in ("/ping", "/"):
        answer = await service.client.get(path)
        assert answer.json() == {"error": "unhealthy", "error_type": "healthcheck"}
        assert answer.headers["retry-after"] == "5"
    for path in PATHS:
        assert (await service.client.head(path)).status_code == 503


@pytest.mark.trial
async def test_liveness_and_readiness_do_not_depend_on_the_engine(
    service: Service, mortal: MortalTriton
) -> None:
    await unload(mortal)
    await until_health_is(service, 503)
    for method in ("GET", "HEAD"):
        answer = await service.client.request(method, "/health/live")
        assert (answer.status_code, answer.content) == (200, b"")
    ready = await service.client.get("/health/ready")
    assert (ready.status_code, ready.json()["models_ready"]) == (200, [])
    assert (await send(service, "waits"))["state"] == "pending"


@pytest.mark.trial
async def test_a_killed_server_and_its_return(service: Service, mortal: MortalTriton) -> None:
    mortal.kill_server()
    await until_health_is(service, 503)
    detail = (await service.client.get("/health")).json()["detail"]
    assert mortal.address("grpc") in detail
    await mortal.start()
    await until_health_is(service, 200)


@pytest.mark.trial
async def test_an_engine_that_is_dead_behind_a_ready_model(
    postgres_server: PostgresServer, database_name: str, mortal: MortalTriton
) -> None:
    async with serving(postgres_server, database_name, mortal, with_worker=True) as service:
        assert (await finish(service, "hi {{chunks=2}}"))["state"] == "completed"
        mortal.kill_stub()
        sent = await send(service, "later {{chunks=2}}")
        await until_health_is(service, 503)
        mortal.kill_server()
        await mortal.wait()
        await mortal.start()
        await until_health_is(service, 200)
        assert (await read(service, sent["id"], wait=60))["state"] == "completed"


async def test_a_pooling_model_alone_generates_nothing(
    postgres_server: PostgresServer, database_name: str, mortal: MortalTriton, tmp_path: Path
) -> None:
    write_model(tmp_path, MODEL)
    engine = {"model": f"models/{MODEL}/1", "runner": "pooling"}
    (tmp_path / MODEL / "1" / "model.json").write_bytes(orjson.dumps(engine))
    async with serving(
        postgres_server, database_name, mortal, model_repository=tmp_path
    ) as service:
        assert service.services.registry.ready() == [MODEL]
        assert await statuses(service) == [503, 503, 503]


@pytest.mark.trial
async def test_a_call_sends_nothing_to_triton(
    postgres_server: PostgresServer, database_name: str, mortal: MortalTriton
) -> None:
    """The last refresh decides, also while Triton is frozen: any request to it would wait."""
    async with serving(
        postgres_server, database_name, mortal, triton_refresh_seconds=60
    ) as service:
        mortal.send_signal(signal.SIGSTOP)
        try:
            async with asyncio.timeout(30):
                for _ in range(100):
                    assert await statuses(service) == [200, 200, 200]
        finally:
            mortal.send_signal(signal.SIGCONT)
        await unload(mortal)
        assert await statuses(service) == [200, 200, 200]
        await service.services.registry.refresh()
        await load(mortal)
        assert await statuses(service) == [503, 503, 503]
        await service.services.registry.refresh()
        assert await statuses(service) == [200, 200, 200]
