"""Engines that die or hang behind a model that Triton calls ready: nothing is lost to them."""

import asyncio
import contextlib
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import pytest

from app.cli.up import processes
from app.core.errors import TritonUnavailableError
from app.core.settings import Settings
from app.core.settings.fields import split_address
from app.inference import server_pool
from app.inference.triton_errors import EngineDeadError, GenerationError
from app.queue.depth import QueueDepth
from app.worker import attempt_executor
from app.worker.backends import circuit_breaker
from app.worker.backends.triton_backend import TritonBackend
from tests.chaos.stack import MortalTriton
from tests.conftest import Service, make_settings, run_service, run_triton
from tests.integration.support import read, send, until
from tests.nvidia_like import nvidia_like
from tests.postgres import PostgresServer
from tests.silent_proxy import SilentProxy

pytestmark = pytest.mark.trial  # Tritons that die

MODEL = "nvidia"
SLOW = "{{chunks=40 delay_ms=100}}"
_ANSWER_SECONDS = 10.0  # for one token
LONG = "{{chunks=2000 delay_ms=20}}"


class NvidiaLike(MortalTriton):
    """Restarted by tests alone: its probe of a dead engine fails, as that of an operator would."""

    async def ensure_answers(self) -> None:
        """Restart a dead server, and one whose models hang: a cancelled call can do this to Triton 2.51."""
        if not self.is_down:
            try:
                await self._ensure_each_answers()
            except (TimeoutError, TritonUnavailableError):  # a thawed stub may crash its server
                await self.restart()
        await self.start()

    async def _ensure_each_answers(self) -> None:
        """Reload the models that answer with an error. Raises TimeoutError, TritonUnavailableError."""
        async with self.client() as client:
            for model in self.models:
                try:
                    async with asyncio.timeout(_ANSWER_SECONDS):
                        await client.run(model, "a", {"max_tokens": 1}, lambda _: None)
                except GenerationError:
                    await self.revive(model)

    def kill_engine_of(self, model: str) -> None:
        """Kill the engine of one model: the others go on."""
        engines = [
            child
            for stub in self.stubs()
            if f"/{model}/" in " ".join(stub.cmdline())
            for child in stub.children()
        ]
        assert engines, f"{model} has no engine"
        processes.kill(engines)

    async def revive(self, model: str) -> None:
        """Reload a model, with an engine that answers, in a fraction of a restart's time."""
        async with self.client() as client:
            await client.unload(model)
            await client.load(model)

    async def restart(self) -> None:
        """Kill the server and start it again, on the same ports."""
        self.kill_server()
        await self.wait()
        await self.start()


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[NvidiaLike, NvidiaLike]]:
    """Two servers: the first one also has a model with the health check, and one of strange words."""
    directory = tmp_path_factory.mktemp("nvidia_models")
    plain = nvidia_like(directory)
    checked = nvidia_like(directory, "checked", ENABLE_VLLM_HEALTH_CHECK="true")
    strange = nvidia_like(directory, "strange", ENGINE_DEAD="[Errno 32] Broken pipe")
    models = {**plain, **checked, **strange}
    with (
        run_triton(NvidiaLike, tmp_path_factory.mktemp("first"), models) as first,
        run_triton(NvidiaLike, tmp_path_factory.mktemp("second"), plain) as second,
    ):
        yield first, second
        for server in (first, second):  # what hangs there would delay their ends
            if not server.is_down:
                server.kill_server()


@pytest.fixture
async def first(servers: tuple[NvidiaLike, NvidiaLike]) -> NvidiaLike:
    """The first server, with engines that answer."""
    await servers[0].ensure_answers()
    return servers[0]


@pytest.fixture
async def second(servers: tuple[NvidiaLike, NvidiaLike]) -> NvidiaLike:
    """The second server, with an engine that answers."""
    await servers[1].ensure_answers()
    return servers[1]


@contextlib.asynccontextmanager
async def serving(
    postgres: PostgresServer, database: str, *tritons: str, **changes: Any
) -> AsyncIterator[Service]:
    """API and worker in this process before these servers: `default`, `default-2`."""
    settings = make_settings(postgres, database, triton_grpc=",".join(tritons), **changes)
    async with run_service(settings, with_worker=True) as service:
        yield service


@pytest.fixture
async def service(
    postgres_server: PostgresServer, database_name: str, first: NvidiaLike
) -> AsyncIterator[Service]:
    """Before the first server, 60 results at a time."""
    address = first.address("grpc")
    async with serving(postgres_server, database_name, address, worker_slots=60) as running:
        yield running


async def send_all(service: Service, prompts: Sequence[str], model: str = MODEL) -> list[str]:
    body = [{"model": model, "content": prompt, "parameters": {"max_tokens": 2000}}
            for prompt in prompts]  # fmt: skip
    answer = await service.client.post("/results/", json=body)
    assert answer.status_code == 202, answer.text
    return [result["id"] for result in answer.json()]


async def running(service: Service) -> int:
    (row,) = await service.services.database.fetch(
        "SELECT count(*) FROM results WHERE state = 'pending' AND worker_id IS NOT NULL"
    )
    return int(row[0])


async def hurry(service: Service) -> None:
    """From their next attempts on, slow results are fast."""
    await service.services.database.fetch(
        "UPDATE contexts SET content = replace(content, 'delay_ms=100', 'delay_ms=0')"
    )


async def until_running(service: Service, count: int) -> None:
    async def is_so() -> bool:
        return await running(service) == count

    await until(is_so)


async def served(service: Service, server: str = "default", model: str = MODEL) -> dict[str, Any]:
    answer = await service.client.get(f"/servers/{server}")
    missing = {"ready": False, "engine_dead_since": None}
    return next((one for one in answer.json()["models"] if one["name"] == model), missing)


async def until_dead(service: Service, server: str = "default", model: str = MODEL) -> None:
    async def is_so() -> bool:
        return (await served(service, server, model))["engine_dead_since"] is not None

    await until(is_so)


async def until_ready(service: Service) -> None:
    async def is_so() -> bool:
        return bool((await service.client.get(f"/models/{MODEL}")).json()["ready"])

    await until(is_so)


async def ended(service: Service, ids: Sequence[str]) -> list[dict[str, Any]]:
    return [await read(service, result_id, wait=60) for result_id in ids]


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dead engines are probed often."""
    monkeypatch.setattr(circuit_breaker, "_MAX_PAUSE_SECONDS", 0.25)


async def test_a_dead_engine_fails_no_result_and_gets_no_more(
    service: Service, first: NvidiaLike, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton calls the model ready: 60 results run, 140 wait, and the server is restarted later."""
    rounds = 0
    free = TritonBackend.free

    def counted(backend: TritonBackend, *arguments: Any) -> dict[str, int]:
        nonlocal rounds
        rounds += 1
        return free(backend, *arguments)

    monkeypatch.setattr(TritonBackend, "free", counted)
    ids = await send_all(service, [f"{number} {SLOW}" for number in range(200)])
    await until_running(service, 60)
    first.kill_engine()
    await until_dead(service)

    async def model_if_not_ready() -> dict[str, Any] | None:
        model: dict[str, Any] = (await service.client.get(f"/models/{MODEL}")).json()
        return None if model["ready"] else model

    model = await until(model_if_not_ready)
    assert "engine dead since" in model["reason"]
    assert "EngineCore encountered an issue" in model["reason"]
    await until_running(service, 0)
    requests = await first_requests(first)
    # All are due, and the worker has looked for its free slots some times.
    await service.services.database.fetch("UPDATE results SET not_before = NULL")
    after = rounds + 5
    await until(lambda: asyncio.sleep(0, rounds >= after))
    assert await first_requests(first) - requests < 10  # probes
    states = Counter(result["state"] for result in [await read(service, one) for one in ids])
    assert states == {"pending": 200}

    async def is_exposed() -> bool:
        metrics = (await service.client.get("/metrics")).text
        return f'llm_engines_dead{{model="{MODEL}"}} 1.0' in metrics

    await until(is_exposed)

    await hurry(service)
    await first.restart()
    results = await ended(service, ids)
    assert Counter(result["state"] for result in results) == {"completed": 200}
    assert Counter(result["attempt"] for result in results) == {2: 60, 1: 140}
    assert (await served(service))["engine_dead_since"] is None


async def first_requests(server: NvidiaLike) -> int:
    """The number of requests of the server's models."""
    async with server.client() as client:
        return await client.request_count(MODEL)


@pytest.mark.usefixtures("soon")
async def test_another_server_takes_the_results_of_a_dead_engine_at_once(
    postgres_server: PostgresServer, database_name: str, first: NvidiaLike, second: NvidiaLike
) -> None:
    addresses = [server.address("grpc") for server in (first, second)]
    async with serving(postgres_server, database_name, *addresses, worker_slots=20) as service:
        ids = await send_all(service, [f"{number} {SLOW}" for number in range(30)])
        await until_running(service, 30)
        first.kill_engine_of(MODEL)
        await hurry(service)
        results = await ended(service, ids)
        assert Counter(result["state"] for result in results) == {"completed": 30}
        assert Counter(result["attempt"] for result in results) == {1: 15, 2: 15}
        assert (await served(service, "default"))["engine_dead_since"] is not None
        assert (await served(service, "default-2"))["ready"]


@pytest.mark.usefixtures("soon")
async def test_an_engine_that_unloads_itself_is_waited_for(
    service: Service, first: NvidiaLike
) -> None:
    """With ENABLE_VLLM_HEALTH_CHECK: requests that it refused have not run."""
    ids = await send_all(service, [f"{number} {SLOW}" for number in range(70)], "checked")
    await until_running(service, 60)
    first.kill_engine_of("checked")

    async def is_unready() -> bool:
        return not (await service.client.get("/models/checked")).json()["ready"]

    await until(is_unready)
    await hurry(service)
    await first.revive("checked")
    results = await ended(service, ids)
    assert Counter(result["state"] for result in results) == {"completed": 70}
    assert Counter(result["attempt"] for result in results) == {2: 60, 1: 10}


@pytest.mark.usefixtures("soon")
async def test_an_unknown_error_of_a_dead_engine_loses_the_attempt(
    service: Service, first: NvidiaLike
) -> None:
    ids = await send_all(service, [f"{number} {SLOW}" for number in range(5)], "strange")
    await until_running(service, 5)
    first.kill_engine_of("strange")
    await until_dead(service, model="strange")
    await hurry(service)
    await first.revive("strange")
    results = await ended(service, ids)
    assert [(one["state"], one["attempt"]) for one in results] == [("completed", 2)] * 5


async def test_an_unknown_error_of_an_engine_that_answers_is_final(service: Service) -> None:
    (result_id,) = await send_all(service, ["x {{chunks=5 fail_at=2}}"])
    result = await read(service, result_id, wait=30)
    assert (result["state"], result["attempt"]) == ("failed", 1)
    assert result["error"]["code"] == "model_error"
    assert "the script failed" in result["error"]["message"]
    assert (await served(service))["ready"]


async def test_a_parameter_that_the_backend_cannot_read_is_refused(service: Service) -> None:
    (result_id,) = await send_all(service, ["x {{refuse}}"])
    result = await read(service, result_id, wait=30)
    assert (result["state"], result["attempt"]) == ("failed", 1)
    assert (result["error"]["code"], result["error"]["retryable"]) == ("invalid_request", False)
    assert "sampling parameters" in result["error"]["message"]


@pytest.mark.usefixtures("soon")
async def test_every_process_reports_a_dead_engine(
    service: Service, first: NvidiaLike, settings: Settings
) -> None:
    """Also an API without a worker, and a worker on which nothing runs."""
    same = settings.model_copy(update={"triton_grpc": first.address("grpc")})
    async with (
        run_service(same, with_worker=False) as api,
        run_service(same, with_worker=True) as idle,
    ):
        first.kill_engine_of(MODEL)
        place = (first.address("grpc"), MODEL)
        backend = service.services.queue.dispatcher._backend  # type: ignore[union-attr]
        backend.health.record(EngineDeadError("found by this worker"), place)
        for process in (service, api, idle):
            await until_dead(process)
        # The load of a worker that never ran the model counts as any other.
        depth = QueueDepth(api.services.database, settings)
        assert (await depth.by_model())[MODEL].running == 0
        answer = await api.client.post(
            "/v1/completions", json={"model": MODEL, "prompt": "x", "max_tokens": 1}
        )
        assert answer.status_code == 503, answer.text
        await first.revive(MODEL)
        for process in (service, api, idle):
            await until_ready(process)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence is looked for often."""
    monkeypatch.setattr(attempt_executor, "_SILENCE_CHECK_SECONDS", 0.1)


@pytest.mark.usefixtures("impatient", "soon")
@pytest.mark.parametrize("what", ["stub", "server"])
async def test_what_stands_still_is_left_and_heard_no_more(
    postgres_server: PostgresServer,
    database_name: str,
    first: NvidiaLike,
    second: NvidiaLike,
    what: str,
) -> None:
    """Also while new results keep coming, and none of its output is stored once it is thawed."""
    addresses = [server.address("grpc") for server in (first, second)]
    async with serving(
        postgres_server, database_name, *addresses, worker_slots=20, engine_silence_seconds=5
    ) as service:
        # Two servers of equal load: every other result runs on the first.
        ids = await send_all(service, [f"{number} {SLOW}" for number in range(10)])
        await until_running(service, 10)
        processes = first.stubs() if what == "stub" else first.family()
        for process in processes:
            process.send_signal(signal.SIGSTOP)
        try:
            for number in range(10):
                ids += await send_all(service, [f"later {number} {{{{chunks=2}}}}"])
                await asyncio.sleep(0.3)  # they come before and after it is found
            await hurry(service)
            await until_dead(service)
            results = await ended(service, ids)
        finally:
            for process in processes:
                process.send_signal(signal.SIGCONT)
        assert Counter(result["state"] for result in results) == {"completed": 20}
        assert {result["attempt"] for result in results} == {1, 2}

        await first.ensure_answers()  # Triton 2.51 may crash or hang as its stub is thawed
        await until_ready(service)
        again = await ended(service, ids)
        assert [one["result"] for one in again] == [one["result"] for one in results]


@pytest.mark.usefixtures("impatient", "soon")
async def test_a_connection_that_leads_nowhere_is_made_anew(
    postgres_server: PostgresServer, database_name: str, first: NvidiaLike
) -> None:
    host, port = split_address(first.address("grpc"), 0)
    async with (
        SilentProxy(host, port) as proxy,
        serving(
            postgres_server,
            database_name,
            f"127.0.0.1:{proxy.port}",
            engine_silence_seconds=4,
        ) as service,
    ):
        ids = await send_all(service, [f"{number} {SLOW}" for number in range(5)])
        await until_running(service, 5)
        assert proxy.freeze_the_open() == 1
        await hurry(service)
        results = await ended(service, ids)
        assert [(one["state"], one["attempt"]) for one in results] == [("completed", 2)] * 5


async def test_a_full_engine_is_not_dead(
    postgres_server: PostgresServer,
    database_name: str,
    first: NvidiaLike,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A probe without an answer proves nothing while other streams are answered."""
    async with serving(
        postgres_server, database_name, first.address("grpc"), engine_silence_seconds=1
    ) as service:
        (result_id,) = await send_all(service, [LONG])
        await until_running(service, 1)
        server = service.services.server_pool.servers[0]
        run = server.client.run

        async def probes_wait(model: str, _prompt: str, *arguments: Any) -> None:
            await run(model, "a {{first_delay_ms=60000}}", *arguments)

        monkeypatch.setattr(server.client, "run", probes_wait)
        backend = service.services.queue.dispatcher._backend  # type: ignore[union-attr]
        assert not await backend.is_dead((server.address.grpc, MODEL))
        monkeypatch.undo()
        assert (await served(service))["ready"]
        await service.client.post(f"/results/{result_id}/cancel")


async def test_a_frozen_server_is_not_ready(
    postgres_server: PostgresServer,
    database_name: str,
    first: NvidiaLike,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving(postgres_server, database_name, first.address("grpc")) as service:
        assert (await served(service))["ready"]
        # Long before the index's time-out, which would show it, too.
        monkeypatch.setattr(server_pool, "_QUERY_TIMEOUT_SECONDS", 0.5)
        monkeypatch.setattr(server_pool, "_LATE_SECONDS", 1.0)
        first.send_signal(signal.SIGSTOP)
        try:

            async def model_if_not_ready() -> dict[str, Any] | None:
                model = await served(service)
                return None if model["ready"] else model

            assert "no answer for 1 s" in (await until(model_if_not_ready))["reason"]
        finally:
            first.send_signal(signal.SIGCONT)
        sent = await send(service, "x {{chunks=2}}", model=MODEL)
        assert (await read(service, sent["id"], wait=30))["state"] == "completed"
