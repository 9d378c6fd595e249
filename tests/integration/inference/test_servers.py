"""Several Triton servers: registered, shared by their models' results, drained, lost, removed."""

import asyncio
import re
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import asyncpg
import pytest

from app.cli.up.triton import EmbeddedTriton
from app.core.errors import UnknownModelError
from app.core.settings import Settings
from app.core.settings.fields import split_address
from app.inference import server_pool, triton_client, triton_errors
from app.inference.triton_access import new_secret
from app.worker import attempt_executor
from app.worker.attempt import Attempt
from app.worker.backends import engine_health
from tests.chaos.stack import MortalTriton
from tests.conftest import SCRIPTED, TRITON_SECRET, Service, make_settings, run_service, run_triton
from tests.integration.support import assert_problem, finish, read, send, until
from tests.postgres import PostgresServer
from tests.silent_proxy import SilentProxy

LONG = "long {{chunks=2000 delay_ms=20}}"
NOWHERE = "127.0.0.1:1"


@pytest.fixture(scope="module")
def mortal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MortalTriton]:
    """A second server with the same model, which tests may kill and start again."""
    with run_triton(MortalTriton, tmp_path_factory.mktemp("second")) as server:
        yield server


@pytest.fixture
async def second(mortal: MortalTriton) -> MortalTriton:
    """The second server, up."""
    await mortal.start()
    return mortal


@pytest.fixture
async def both(settings: Settings, second: MortalTriton) -> AsyncIterator[Service]:
    """A service with the session's server and the second one, eight results at a time on each."""
    few = settings.model_copy(update={"worker_slots": 8})
    async with run_service(few, with_worker=True) as service:
        await register(service, "second", grpc=second.address("grpc"), secret=TRITON_SECRET)
        yield service


async def register(service: Service, name: str, **members: Any) -> dict[str, Any]:
    answer = await service.client.post("/servers", json={"name": name} | members)
    assert answer.status_code == 201, answer.text
    registered: dict[str, Any] = answer.json()
    return registered


async def server(service: Service, name: str) -> dict[str, Any]:
    answer = await service.client.get(f"/servers/{name}")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def running(service: Service) -> dict[str, int]:
    """Running results of this process by server."""
    return {one.name: one.running.total() for one in service.services.server_pool.servers}


async def until_running_on(service: Service, **wanted: int) -> None:
    async def is_so() -> bool:
        return running(service).items() >= wanted.items()

    await until(is_so)


async def claimed_with_another(service: Service, connection: asyncpg.Connection) -> int:
    """Free a place. How many results a worker has once a waiting one has begun there.

    The claim that takes this one takes all that may run, as its worker counts them.
    """
    before = set(service.services.hub._running)
    ended = next(iter(before))
    await cancel(service, [{"id": str(ended)}])

    async def has_begun() -> bool:
        return not service.services.hub._running.keys() <= before

    await until(has_begun)
    count: int = await connection.fetchval(
        "SELECT count(*) FROM results WHERE state = 'pending' AND worker_id IS NOT NULL AND id <> $1",
        ended,
    )
    return count


async def cancel(service: Service, sent: list[dict[str, Any]]) -> None:
    for result in sent:
        answer = await service.client.post(f"/results/{result['id']}/cancel")
        assert answer.status_code == 200, answer.text


_WAITING = "SELECT count(*) FROM pg_locks WHERE relation = 'servers'::regclass AND NOT granted"
_SHORT, _WITH_BLANKS = "s" * 7, "a b c d e f"


# --- registering ------------------------------------------------------------------------------------


async def test_servers_are_registered_listed_and_removed(
    service: Service, triton: EmbeddedTriton
) -> None:
    first = await server(service, "default")
    assert first["grpc"] == triton.address("grpc")
    assert (first["state"], first["registered"], first["healthy"]) == ("active", False, True)
    assert [(one["name"], one["ready"]) for one in first["models"]] == [("scripted", True)]

    registered = await register(service, "away", grpc=NOWHERE, http="[::1]:8000", slots=3)
    assert (registered["slots"], registered["http"]) == (3, "[::1]:8000")
    assert (registered["healthy"], registered["models"]) == (False, [])
    assert NOWHERE in registered["error"]
    again = await register(service, "away", grpc=NOWHERE, http="[::1]:8000", slots=3)
    assert again == registered
    twin = await service.client.post("/servers", json={"name": "twin", "grpc": NOWHERE})
    assert "'away'" in assert_problem(twin, 409, "conflict")["detail"]
    taken = await service.client.post("/servers", json={"name": "away", "grpc": "other:1"})
    assert NOWHERE in assert_problem(taken, 409, "conflict")["detail"]

    assert (await finish(service, "x"))[
        "state"
    ] == "completed"  # an unreachable server does no harm
    await register(service, "again", grpc="127.0.0.1:2")
    await register(service, "Also", grpc="127.0.0.1:3")
    listed = (await service.client.get("/servers")).json()
    assert [one["name"] for one in listed] == ["default", "Also", "again", "away"]
    assert (await service.client.delete("/servers/away")).status_code == 204
    assert_problem(await service.client.get("/servers/away"), 404, "not_found")
    assert_problem(await service.client.delete("/servers/away"), 404, "not_found")


async def test_a_server_is_reached_with_its_secret_alone(
    postgres_server: PostgresServer, database_name: str, triton: EmbeddedTriton
) -> None:
    settings = make_settings(postgres_server, database_name, triton_grpc="")
    address = triton.address("grpc")
    async with run_service(settings, with_worker=True) as service:
        wrong = await register(service, "only", grpc=address, secret=new_secret())
        assert "LLM_TRITON_SECRET" in str(wrong["error"])
        body = {"name": "only", "grpc": address, "secret": TRITON_SECRET}
        assert_problem(await service.client.post("/servers", json=body), 409, "conflict")
        # In one moment: a process that reads the table after it finds the name with another secret.
        await service.services.server_pool.store.remove("only")
        right = await register(service, "only", grpc=address, secret=TRITON_SECRET)
        assert right["healthy"]
        assert TRITON_SECRET not in str(right) + (await service.client.get("/servers")).text
        assert (await finish(service, "x"))["state"] == "completed"


async def test_servers_of_the_settings_are_changed_there(service: Service) -> None:
    first = await server(service, "default")
    for answer in (
        await service.client.delete("/servers/default"),
        await service.client.post("/servers/default/drain"),
        await service.client.post("/servers", json={"name": "twin", "grpc": first["grpc"]}),
    ):
        assert "TRITON_GRPC_SERVICE" in assert_problem(answer, 409, "conflict")["detail"]


@pytest.mark.parametrize(
    ("members", "field"),
    [
        ({"name": "", "grpc": NOWHERE}, "name"),
        ({"name": "a/b", "grpc": NOWHERE}, "name"),
        ({"name": "../a", "grpc": NOWHERE}, "name"),
        ({"name": "a\n", "grpc": NOWHERE}, "name"),
        ({"name": "-oProxyCommand=x", "grpc": NOWHERE}, "name"),
        ({"name": "a" * 64, "grpc": NOWHERE}, "name"),
        ({"name": "default", "grpc": NOWHERE}, "name"),
        ({"name": "default-2", "grpc": NOWHERE}, "name"),
        ({"name": "a"}, "grpc"),
        ({"name": "a", "grpc": "host"}, "grpc"),
        ({"name": "a", "grpc": "host:0"}, "grpc"),
        ({"name": "a", "grpc": "host:65536"}, "grpc"),
        ({"name": "a", "grpc": "unix:/run/x"}, "grpc"),
        ({"name": "a", "grpc": "$(id):1"}, "grpc"),
        ({"name": "a", "grpc": "a:1\n"}, "grpc"),
        ({"name": "a", "grpc": "dns:///a:1"}, "grpc"),
        ({"name": "a", "grpc": NOWHERE, "http": "http://a:1"}, "http"),
        ({"name": "a", "grpc": NOWHERE, "metrics": ":1"}, "metrics"),
        ({"name": "a", "grpc": NOWHERE, "slots": 0}, "slots"),
        ({"name": "a", "grpc": NOWHERE, "slots": 10_001}, "slots"),
        ({"name": "a", "grpc": NOWHERE, "secret": _SHORT}, "secret"),
        ({"name": "a", "grpc": NOWHERE, "secret": _WITH_BLANKS}, "secret"),
        ({"name": "a", "grpc": NOWHERE, "more": 1}, "more"),
    ],
)
async def test_a_wrong_server_is_not_registered(
    api: Service, members: dict[str, Any], field: str
) -> None:
    answer = await api.client.post("/servers", json=members)
    assert_problem(answer, 422, "invalid_request", field)
    assert len((await api.client.get("/servers")).json()) == 1


@pytest.mark.trial
async def test_without_a_server_nothing_is_ready(
    postgres_server: PostgresServer, database_name: str, triton: EmbeddedTriton
) -> None:
    settings = make_settings(postgres_server, database_name, triton_grpc="")
    async with run_service(settings, with_worker=True) as service:
        ready = (await service.client.get("/health/ready")).json()
        assert "TRITON_GRPC_SERVICE" in ready["triton"]
        assert (await service.client.get("/models/")).json() == []
        await register(service, "first", grpc=triton.address("grpc"), secret=TRITON_SECRET)
        assert (await finish(service, "x"))["state"] == "completed"


async def test_the_settings_may_name_several(
    postgres_server: PostgresServer,
    database_name: str,
    triton: EmbeddedTriton,
    second: MortalTriton,
) -> None:
    addresses = f"{triton.address('grpc')}, {second.address('grpc')}"
    settings = make_settings(postgres_server, database_name, triton_grpc=addresses)
    async with run_service(settings, with_worker=True) as service:
        sent = [await send(service, LONG) for _ in range(4)]
        await until_running_on(service, **{"default": 2, "default-2": 2})
        await cancel(service, sent)


async def test_a_change_is_not_forgotten_when_its_reader_leaves(
    api: Service, connection: asyncpg.Connection
) -> None:
    servers = api.services.server_pool
    async with connection.transaction():
        await connection.execute("LOCK TABLE servers IN ACCESS EXCLUSIVE MODE")
        await connection.execute("INSERT INTO servers (name, grpc) VALUES ('away', $1)", NOWHERE)
        servers.outdate()
        reading = asyncio.create_task(servers.refresh())
        await until(lambda: connection.fetchval(_WAITING))
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    await servers.refresh()
    assert servers.find("away") is not None


async def test_requests_do_not_wait_long_for_a_server_that_is_known_to_hang(
    api: Service, triton: EmbeddedTriton, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, port = split_address(triton.address("grpc"), 0)
    async with SilentProxy(host, port) as proxy:
        await register(api, "frozen", grpc=f"127.0.0.1:{proxy.port}", secret=TRITON_SECRET)
        frozen = api.services.server_pool.get("frozen")
        proxy.freeze_the_open()
        frozen.error = "as if it had not answered"
        monkeypatch.setattr(server_pool, "_QUERY_TIMEOUT_SECONDS", 600.0)
        query = frozen.query_index()
        await api.services.registry.refresh()
        assert_problem(await api.client.get("/models/unknown"), 404, "unknown_model")
        assert not query.done()  # Triton's client gives it up after 10 s
        assert api.services.registry.ready() == ["scripted"]


async def test_those_who_miss_a_model_at_one_moment_ask_once(api: Service) -> None:
    """However many they are: with a server that hangs, each question takes seconds."""
    registry = api.services.registry
    registry._refreshed_at = float("-inf")

    async def miss() -> float:
        with pytest.raises(UnknownModelError):
            await registry.find("unknown")
        return registry._refreshed_at

    assert len(set(await asyncio.gather(*(miss() for _ in range(20))))) <= 2


@pytest.mark.parametrize("name", ["a%00b", "a%ED%A0%80b", "a%FFb", "%F0%9F%99%82", "a" * 1000])
async def test_a_name_that_no_server_can_have(api: Service, name: str) -> None:
    path = f"/servers/{name}"
    for answer in (
        await api.client.get(path),
        await api.client.delete(path),
        await api.client.post(f"{path}/drain"),
        await api.client.post(f"{path}/resume"),
    ):
        assert_problem(answer, 404, "not_found")


# --- sharing ----------------------------------------------------------------------------------------


@pytest.mark.trial
async def test_a_model_on_two_servers_has_twice_the_places(
    both: Service, connection: asyncpg.Connection
) -> None:
    # At once: results that are stored beside a claim may exceed the places for a moment.
    answer = await both.client.post("/results/", json=[{"model": "scripted", "content": LONG}] * 20)
    assert answer.status_code == 202, answer.text
    sent = answer.json()
    await until_running_on(both, default=8, second=8)
    assert await claimed_with_another(both, connection) == 16
    await until_running_on(both, default=8, second=8)

    async def is_told() -> bool:
        return [(await server(both, name))["running"] for name in ("default", "second")] == [8, 8]

    await until(is_told)
    await cancel(both, sent)


async def test_the_least_busy_server_is_next(both: Service) -> None:
    sent = [await send(both, LONG) for _ in range(6)]
    await until_running_on(both, default=3, second=3)
    place = {
        str(attempt.claim.id): attempt.target[0]
        for attempt in both.services.hub._running.values()
        if isinstance(attempt, Attempt)
    }
    first = both.services.server_pool.get("default").address.grpc
    on_first = [result for result in sent if place[result["id"]] == first]
    await cancel(both, on_first)
    await until_running_on(both, default=0)
    more = [await send(both, LONG) for _ in range(3)]
    await until_running_on(both, default=3, second=3)
    await cancel(both, sent + more)


async def test_slots_are_a_servers_own(service: Service, second: MortalTriton) -> None:
    await register(service, "second", grpc=second.address("grpc"), secret=TRITON_SECRET, slots=2)
    assert (await server(service, "default"))["slots"] == 256
    sent = [await send(service, LONG) for _ in range(8)]
    # By their load, relative to their slots: a large server takes more.
    await until_running_on(service, default=7, second=1)
    await cancel(service, sent)


@pytest.mark.trial
async def test_a_drained_server_ends_what_it_has(both: Service) -> None:
    sent = [await send(both, "{{chunks=100 delay_ms=40}}") for _ in range(4)]
    await until_running_on(both, default=2, second=2)
    drained = await both.client.post("/servers/second/drain")
    assert drained.json()["state"] == "draining"
    more = [await send(both, "{{chunks=2}}") for _ in range(6)]
    for result in sent + more:
        ended = await read(both, result["id"], wait=30)
        assert (ended["state"], ended["attempt"]) == ("completed", 1)
    sent = [await send(both, LONG) for _ in range(4)]
    await until_running_on(both, default=4, second=0)
    assert (await both.client.post("/servers/second/resume")).json()["state"] == "active"
    sent += [await send(both, LONG) for _ in range(4)]
    await until_running_on(both, default=4, second=4)
    await cancel(both, sent)


@pytest.mark.trial
async def test_a_removed_server_ends_what_it_has(both: Service) -> None:
    sent = [await send(both, "{{chunks=100 delay_ms=40}}") for _ in range(4)]
    await until_running_on(both, default=2, second=2)
    assert (await both.client.delete("/servers/second")).status_code == 204
    for result in sent:
        ended = await read(both, result["id"], wait=30)
        assert (ended["state"], ended["attempt"]) == ("completed", 1)

    async def is_closed() -> bool:
        return not both.services.server_pool._leaving

    await until(is_closed)


async def test_the_last_server_drained_leaves_the_model_known_but_not_ready(
    postgres_server: PostgresServer, database_name: str, triton: EmbeddedTriton
) -> None:
    settings = make_settings(postgres_server, database_name, triton_grpc="")
    async with run_service(settings, with_worker=True) as service:
        await register(service, "only", grpc=triton.address("grpc"), secret=TRITON_SECRET)
        await service.client.post("/servers/only/drain")
        model = (await service.client.get("/models/scripted")).json()
        assert (model["ready"], model["reason"]) == (False, "its server is drained")
        sent = await send(service, "x")
        assert sent["model_ready"] is False
        await service.client.post("/servers/only/resume")
        assert (await read(service, sent["id"], wait=30))["state"] == "completed"


@pytest.fixture
async def with_two_models(
    postgres_server: PostgresServer, database_name: str, second: MortalTriton
) -> AsyncIterator[Service]:
    """A service with one server, which has two models: `scripted`, and `another`."""
    settings = make_settings(postgres_server, database_name, triton_grpc="")
    async with run_service(settings, with_worker=True) as service:
        shutil.copytree(SCRIPTED["scripted"], second._repository / "another", dirs_exist_ok=True)
        await register(service, "only", grpc=second.address("grpc"), secret=TRITON_SECRET, slots=1)
        assert (await service.client.post("/models/another/load")).json()["ready"] is True
        yield service
        await service.services.server_pool.get("only").client.unload("another")
    shutil.rmtree(second._repository / "another")


@pytest.mark.trial
async def test_no_model_starves_beside_one_without_requests(with_two_models: Service) -> None:
    """With fewer slots than models: a slot that one has no use for is the other's."""
    for model in ("scripted", "another"):
        sent = [await send(with_two_models, "{{chunks=2}}", model=model) for _ in range(3)]
        for result in sent:
            assert (await read(with_two_models, result["id"], wait=60))["state"] == "completed"
        # Also where they come while the slot is in use.
        busy = await send(with_two_models, LONG, model=model)
        await until_running_on(with_two_models, only=1)
        waiting = await send(with_two_models, "{{chunks=2}}", model=model)
        await cancel(with_two_models, [busy])
        assert (await read(with_two_models, waiting["id"], wait=60))["state"] == "completed"


async def test_a_server_that_comes_back_has_no_more_slots_than_before(
    both: Service, connection: asyncpg.Connection
) -> None:
    """Removed, and registered again, while results run on it."""
    sent = [await send(both, LONG) for _ in range(16)]
    await until_running_on(both, default=8, second=8)
    address = both.services.server_pool.get("second").address.grpc
    assert (await both.client.delete("/servers/second")).status_code == 204
    await register(both, "again", grpc=address, secret=TRITON_SECRET)
    more = [await send(both, LONG) for _ in range(4)]
    await until_running_on(both, default=8, again=8)
    assert await claimed_with_another(both, connection) == 16
    await until_running_on(both, default=8, again=8)
    await cancel(both, sent + more)


# --- losing -----------------------------------------------------------------------------------------


@pytest.mark.trial
async def test_a_killed_server_fails_no_result(both: Service, second: MortalTriton) -> None:
    """Its results run again on the other server; later results go there at once."""
    sent = [await send(both, f"{number} {{{{chunks=40 delay_ms=40}}}}") for number in range(40)]
    await until_running_on(both, second=8)
    second.kill_server()
    ended = [await read(both, result["id"], wait=60) for result in sent]
    assert Counter(result["state"] for result in ended) == {"completed": 40}
    attempt_executor = Counter(result["attempt"] for result in ended)
    assert attempt_executor[2] >= 1
    assert set(attempt_executor) == {1, 2}

    async def is_seen() -> bool:
        return not (await server(both, "second"))["healthy"]

    await until(is_seen)
    assert (await finish(both, "x"))["attempt"] == 1
    await second.start()
    sent = [await send(both, LONG) for _ in range(12)]  # more than the other one takes

    async def is_used_again() -> bool:
        return running(both)["second"] > 0

    await until(is_used_again)
    await cancel(both, sent)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models that have been silent for a moment are asked whether they live."""
    monkeypatch.setattr(attempt_executor, "_SILENCE_CHECK_SECONDS", 0.1)
    monkeypatch.setattr(engine_health, "_SILENT_SHARE", 0.02)
    monkeypatch.setattr(triton_client, "_CANCEL_TIMEOUT_SECONDS", 0.5)


@pytest.mark.usefixtures("impatient")
@pytest.mark.trial
async def test_a_model_that_dies_on_a_removed_server_is_noticed(
    both: Service, triton: EmbeddedTriton, second: MortalTriton
) -> None:
    """Also where another server has its name by then."""
    sent = [await send(both, LONG) for _ in range(4)]
    await until_running_on(both, default=2, second=2)
    assert (await both.client.delete("/servers/second")).status_code == 204
    host, port = split_address(triton.address("grpc"), 0)
    async with SilentProxy(host, port) as proxy:
        await register(both, "second", grpc=f"127.0.0.1:{proxy.port}", secret=TRITON_SECRET)
        sent += [await send(both, LONG)]
        await until_running_on(both, default=2, second=1)
        second.kill_stub()

        async def all_run() -> bool:
            return sum(running(both).values()) == 5

        await until(all_run)
        await cancel(both, sent)


@pytest.mark.usefixtures("impatient")
@pytest.mark.trial
async def test_a_server_that_hangs_hides_no_dead_model_of_another(
    postgres_server: PostgresServer,
    database_name: str,
    triton: EmbeddedTriton,
    second: MortalTriton,
) -> None:
    mortal = second.address("grpc")
    settings = make_settings(postgres_server, database_name, triton_grpc=mortal)
    host, port = split_address(triton.address("grpc"), 0)
    async with (
        SilentProxy(host, port) as proxy,
        run_service(settings, with_worker=True) as service,
    ):
        await register(service, "a-frozen", grpc=f"127.0.0.1:{proxy.port}", secret=TRITON_SECRET)
        sent = [await send(service, LONG) for _ in range(2)]
        await until_running_on(service, **{"a-frozen": 1, "default": 1})
        assert proxy.freeze_the_open() == 1
        second.kill_stub()
        await until_running_on(service, default=0)
        await cancel(service, sent)


@pytest.mark.trial
async def test_text_of_one_server_is_never_the_beginning_of_anothers(
    settings: Settings, second: MortalTriton, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any error of Triton in the middle of a text: it took the request, and the attempt counts."""
    monkeypatch.setattr(triton_errors, "_CODED", re.compile(r"(never): (.*)"))
    rule = (re.compile("the script failed").search, triton_errors.NotTakenError)
    monkeypatch.setattr(triton_errors, "_RULES", [rule])
    changes = {"max_attempts": 2, "continue_lost_attempts": False}
    twice = settings.model_copy(update=changes)
    async with run_service(twice, with_worker=True) as service:
        await register(service, "second", grpc=second.address("grpc"), secret=TRITON_SECRET)
        ended = await finish(service, "{{chunks=6 fail_at=3}}")
    assert (ended["state"], ended["attempt"]) == ("failed", 2)
    assert ended["error"]["code"] == "triton_lost"
    assert len(ended["result"].split()) == 3


@pytest.mark.trial
async def test_what_a_server_does_not_take_the_next_one_does(
    both: Service, second: MortalTriton
) -> None:
    """Also before a process has noticed that it is gone: in the same attempt."""
    lost = both.services.server_pool.get("second")
    models = dict(lost.models)
    second.kill_server()
    await second.wait()  # one that is dying still takes what comes
    sent = [await send(both, "{{chunks=2}}") for _ in range(3)]
    for _ in range(20):
        lost.models = dict(models)  # as if it had not been asked yet
        sent.append(await send(both, "{{chunks=2}}"))
        await asyncio.sleep(0.02)  # so they meet several refreshes of the models
    for result in sent:
        ended = await read(both, result["id"], wait=30)
        assert (ended["state"], ended["attempt"]) == ("completed", 1)
    await second.start()


@pytest.mark.trial
async def test_loading_and_unloading_reach_all_who_have_the_model(
    both: Service, second: MortalTriton
) -> None:
    await both.client.post("/servers/second/drain")
    lost = both.services.server_pool.get("second")
    await lost.client.unload("scripted")
    assert (await both.client.get("/models/scripted")).json()["ready"] is True
    loaded = await both.client.post("/models/scripted/load")
    assert loaded.json()["ready"] is True
    assert lost.models["scripted"].ready


@pytest.mark.trial
async def test_loading_goes_on_when_a_server_leaves_meanwhile(
    both: Service, second: MortalTriton
) -> None:
    lost = both.services.server_pool.get("second")
    assert (await both.client.post("/models/scripted/unload")).json()["ready"] is False

    async def is_gone() -> bool:
        await lost.query_index()
        return not lost.models

    async def is_loading() -> bool:
        return (await lost.client.index())[0].reason != "unloaded"

    loading = asyncio.create_task(both.client.post("/models/scripted/load"))
    await until(is_loading)
    assert not loading.done()  # to start a model's process takes longer
    second.kill_server()
    await until(is_gone)
    answer = await loading
    assert (answer.status_code, answer.json()["ready"]) == (200, True)


@pytest.mark.trial
async def test_removing_a_server_that_loads_a_model_is_reported(
    both: Service, second: MortalTriton
) -> None:
    address = second.address("grpc")
    async with second.client() as client:

        async def is_unloaded() -> bool:
            return (await client.index())[0].reason == "unloaded"

        async def is_loading() -> bool:
            return not await is_unloaded()

        await client.unload("scripted")
        await until(is_unloaded)
        loading = asyncio.create_task(both.client.post("/models/scripted/load"))
        await until(is_loading)
        assert (await both.client.delete("/servers/second")).status_code == 204
        assert address in assert_problem(await loading, 503, "triton_unavailable")["detail"]
        await client.load("scripted")
