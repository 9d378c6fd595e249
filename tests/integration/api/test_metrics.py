"""/metrics: what is counted, for whom, and that no flood of names is a flood of series."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from uuid import UUID

import asyncpg
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import CollectorRegistry

from app.api.metrics_server import MetricsServer
from app.cli.up import processes
from app.core import metrics
from app.core.settings import Settings
from app.results.indexer import ResultIndexer
from app.results.retention.erasure import Erasure
from tests.conftest import Service
from tests.integration.auth.test_auth import bearer, closed, guarded
from tests.integration.support import finish, send, serve, until
from tests.unit.auth.test_jwt import sign

__all__ = ["closed", "guarded"]

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def parse(text: str) -> Samples:
    """Each sample by its name and labels; the text must be what Prometheus' own parser takes."""
    return {
        (_as_written(sample.name), frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def _as_written(name: str) -> str:
    """The parser adds `_total` to the counters that lack it."""
    return name.removesuffix("_total") if name.startswith("tgi_") else name


async def scrape(service: Service) -> Samples:
    service.services.metrics_collector._expires = 0.0
    answer = await service.client.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == metrics.CONTENT_TYPE
    return parse(answer.text)


def value(samples: Samples, name: str, **labels: str) -> float:
    """The sum of the samples that have these labels."""
    wanted = set(labels.items())
    return sum(number for (key, has), number in samples.items() if key == name and wanted <= has)


@pytest.mark.trial
async def test_a_result_is_counted_from_its_acceptance_to_its_end(service: Service) -> None:
    before = await scrape(service)
    await finish(service, "Go. {{chunks=4 delay_ms=5}}", parameters={"max_tokens": 16})
    failed = await finish(service, "{{chunks=3 fail_at=0}}")
    refused = await service.client.post("/results/", json={"model": "no-such", "content": "x"})
    assert (failed["state"], refused.status_code) == ("failed", 404)

    async def grown() -> Samples | None:
        after = await scrape(service)
        names = {"model": "scripted"}
        ended = value(after, "llm_results_total", **names)
        return after if ended - value(before, "llm_results_total", **names) == 2 else None

    after = await until(grown)

    def growth(name: str, **labels: str) -> float:
        return value(after, name, **labels) - value(before, name, **labels)

    model = {"model": "scripted"}
    code = failed["error"]["code"]
    assert growth("llm_submissions_total", **model) == 2
    assert growth("llm_results_total", code="completed", **model) == 1
    assert growth("llm_results_total", code=code, **model) == 1
    assert growth("llm_triton_errors_total", **model) == 1
    assert growth("llm_attempts_total", outcome="completed", **model) == 1
    assert growth("llm_refusals_total", code="unknown_model") == 1
    for name in ("llm_result_seconds", "llm_queue_wait_seconds", "llm_inference_seconds"):
        assert growth(f"{name}_count", **model) == 2, name
    for name in ("llm_time_to_first_token_seconds", "llm_inter_token_seconds"):
        assert growth(f"{name}_count", **model) == 1, name
    assert growth("llm_completion_tokens_total", team="default", **model) >= 4
    assert growth("llm_prompt_tokens_total", team="default", **model) > 0
    assert growth("llm_group_commit_batch_size_count", lane="enqueue") >= 2
    assert growth("llm_database_pool_wait_seconds_count") > 0
    assert after["llm_database_up", frozenset()] == 1
    assert value(after, "llm_workers") >= 1
    assert value(after, "llm_model_ready", **model) == 1
    assert not [labels for _, labels in after if ("model", "no-such") in labels]

    # The same under text-generation-inference's names.
    for ours, theirs in (
        ("llm_submissions_total", "tgi_request_count"),
        ("llm_result_seconds_sum", "tgi_request_duration_sum"),
        ("llm_queue_wait_seconds_count", "tgi_request_queue_duration_count"),
        ("llm_result_completion_tokens_sum", "tgi_request_generated_tokens_sum"),
        ("llm_queue_depth", "tgi_queue_size"),
    ):
        assert value(after, theirs, **model) == value(after, ours, **model), theirs
    assert growth("tgi_request_success", **model) == 1
    assert growth("tgi_request_failure", err=code, **model) == 1


async def test_a_result_that_the_walk_meets_first_is_counted_once(
    api: Service, connection: asyncpg.Connection
) -> None:
    """Results that ended between the check for due ones and the walk; older ones are history."""
    digest = ResultIndexer(api.services.database, api.services.depth, api.services.settings)
    new, old = [(await send(api, "x"))["id"] for _ in range(2)]
    await api.client.post("/results/cancel", params={"model_name": "scripted"})
    await connection.execute(
        "UPDATE results SET finished_at = now() - interval '1 hour' WHERE id = $1", old
    )
    before = value(await scrape(api), "llm_results_total")
    while await digest.index_older():
        pass
    assert value(await scrape(api), "llm_results_total") == before + 1
    await digest.index()
    assert value(await scrape(api), "llm_results_total") == before + 1
    assert new != old


async def test_an_erased_chat_is_counted_as_one(
    api: Service, connection: asyncpg.Connection
) -> None:
    """By OpenTelemetry's conventions: a result without `store` may lose its texts before its count."""
    digest = ResultIndexer(api.services.database, api.services.depth, api.services.settings)
    chat, _ = [(await send(api, "x"))["id"] for _ in range(2)]
    await connection.execute("UPDATE results SET prompt = 'x', store = false WHERE id = $1", chat)
    await api.client.post("/results/cancel", params={"model_name": "scripted"})
    await Erasure(api.services.database).erase([UUID(chat)])
    before = await scrape(api)
    while await digest.index():
        pass
    after = await scrape(api)
    for operation in ("chat", "text_completion"):
        labels = {"gen_ai_operation_name": operation, "error_type": "cancelled"}
        name = "gen_ai_server_request_duration_seconds_count"
        assert value(after, name, **labels) - value(before, name, **labels) == 1, operation


@pytest.mark.trial
async def test_what_waits_is_told_with_its_age(api: Service) -> None:
    for _ in range(3):
        await send(api, "waits")

    async def reported() -> Samples | None:
        samples = await scrape(api)
        return samples if value(samples, "llm_queue_depth", model="scripted") == 3 else None

    samples = await until(reported)
    assert 0 <= value(samples, "llm_queue_oldest_seconds", model="scripted") < 60
    assert value(samples, "llm_workers") == 0
    assert value(samples, "llm_running", model="scripted") == 0


async def test_who_scrapes_often_asks_the_database_no_more(api: Service) -> None:
    exposition = api.services.metrics_collector
    texts = await asyncio.gather(*(exposition.text() for _ in range(100)))
    assert all(text is texts[0] for text in texts)


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> CollectorRegistry:
    """Names of this test alone."""
    monkeypatch.setattr(metrics, "_names", {label: set() for label in metrics._MAX_NAMES})
    registry = CollectorRegistry()
    monkeypatch.setattr(metrics, "_registry", registry)
    return registry


def test_a_flood_of_names_is_no_flood_of_series(own_registry: CollectorRegistry) -> None:
    tokens = metrics._counter("t_total", "x", "team", "model")
    for team in range(1_000):
        for model in range(0, 300, 60):
            tokens.of(f"team {team}", f"model {model}").inc()
    for model in range(10_000):
        tokens.of("team 1", f'm"\n{{}} {model}').inc()
    samples = parse(metrics.render().decode())
    assert len(samples) <= 2_000 + 1
    assert len(tokens._series) <= 2_000
    assert sum(samples.values()) == 5_000 + 10_000
    assert len({labels for _, labels in samples if ("model", "other") in labels}) > 0


def test_hostile_names_break_no_line(own_registry: CollectorRegistry) -> None:
    hostile = 'a"} 1\nllm_results_total{code="completed",model="b\\'
    results = metrics._counter("llm_results_total", "x", "model", "code")
    results.of(hostile, "completed").inc()
    results.of(hostile, "model_error").inc(2)
    samples = parse(metrics.render().decode())
    assert samples["llm_results_total", frozenset({("model", hostile), ("code", "completed")})] == 1
    assert samples["tgi_request_success", frozenset({("model", hostile)})] == 1
    assert (
        samples["tgi_request_failure", frozenset({("model", hostile), ("err", "model_error")})] == 2
    )


class Fixed:
    async def text(self) -> bytes:
        return b"llm_x 1\n"


FIXED = Fixed()


class Large:
    """More than a socket's buffers hold."""

    async def text(self) -> bytes:
        return b"llm_x 1\n" * 1_000_000


@contextlib.asynccontextmanager
async def metrics_port(settings: Settings, exposition: Fixed | Large = FIXED) -> AsyncIterator[str]:
    port = processes.free_port()
    changed = settings.model_copy(update={"metrics_port": port})
    serving = asyncio.create_task(MetricsServer(changed, exposition.text).run())

    async def is_up() -> bool:
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
            return True
        return False

    await until(is_up)
    yield f"http://127.0.0.1:{port}"
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)


async def test_the_own_port_needs_no_token_and_answers_no_foreign_page(settings: Settings) -> None:
    async with metrics_port(settings) as url, httpx.AsyncClient(base_url=url) as client:
        answer = await client.get("/metrics?x=1")
        assert (answer.status_code, answer.text) == (200, "llm_x 1\n")
        assert (await client.head("/metrics")).content == b""
        assert (await client.get("/health/live")).status_code == 200
        assert (await client.get("/results/")).status_code == 404
        assert (await client.post("/metrics")).status_code == 405
        for host in ("evil.example", "localhost.evil.example:80", "127.0.0.1.evil.example"):
            assert (await client.get("/metrics", headers={"host": host})).status_code == 403
        for host in ("localhost:9", "[::1]:80", "127.0.0.1"):
            assert (await client.get("/metrics", headers={"host": host})).status_code == 200


async def test_what_is_no_request_ends_nothing(settings: Settings) -> None:
    async with metrics_port(settings) as url:
        host, port = url.removeprefix("http://").split(":")
        idle = [await asyncio.open_connection(host, int(port)) for _ in range(40)]
        for sent in (
            b"\x00" * 20_000,
            b"GET /metrics HTTP/1.1\r\n" + b"a: b\r\n" * 4_000,
            b"\r\n\r\n",
        ):
            reader, writer = await asyncio.open_connection(host, int(port))
            with contextlib.suppress(ConnectionError):
                writer.write(sent)
                await writer.drain()
                await reader.read()
            writer.close()
        for _, writer in idle:
            writer.close()
        async with httpx.AsyncClient(base_url=url) as client:

            async def answers() -> bool:
                with contextlib.suppress(httpx.TransportError):
                    return (await client.get("/metrics")).status_code == 200
                return False

            await until(answers)


async def test_a_scrape_gets_through_a_flood(settings: Settings) -> None:
    """Idle connections, connections that do not read, and requests with foreign names."""
    async with metrics_port(settings, exposition=Large()) as url, httpx.AsyncClient() as client:
        host, port = url.removeprefix("http://").split(":")
        flood = [await asyncio.open_connection(host, int(port)) for _ in range(150)]
        for _, writer in flood[:50]:
            writer.write(b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        for _, writer in flood[50:80]:
            writer.write(b"GET /metrics HTTP/1.1\r\nHost: foreign.example\r\n\r\n")
        # Each asked once: none is refused.
        for path in ("/metrics", "/health/live"):
            assert (await client.get(url + path)).status_code == 200
        for _, writer in flood:
            writer.close()


async def test_the_api_is_scraped_in_a_flood(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.api.connection._HEAD_SECONDS", 0.5)
    async with serve(settings) as api:
        address = str(api.client.base_url.host), api.client.base_url.port
        flood = [await asyncio.open_connection(*address) for _ in range(150)]
        for _, writer in flood[:50]:
            writer.write(b"GET /metrics HTTP/1.1\r\nHost: 127.0")
        for _, writer in flood[50:80]:
            writer.write(b"GET /health HTTP/1.1\r\nHost: x.example\r\nConnection: close\r\n\r\n")
        for path in ("/metrics", "/health", "/health/ready"):
            assert (await api.client.get(path)).status_code == 200
        # Those that ask nothing, or never to the end, are rid of: they would hold descriptors.
        async with asyncio.timeout(30):
            for reader, writer in flood:
                await reader.read()
                writer.close()


@pytest.mark.trial
async def test_a_flood_of_requests_by_names_is_no_flood_of_series(closed: Service) -> None:
    """Models, teams, paths, hosts, methods and ids that do not exist."""
    operator = bearer(sign({"team_id": "red", "token_id": "t", "scopes": ["use", "operate"]}))

    async def count() -> int:
        closed.services.metrics_collector._expires = 0.0
        answer = await closed.client.get("/metrics", headers=operator)
        return len(answer.text.splitlines())

    async def ask(name: str) -> None:
        as_team, client = bearer(sign({"team_id": name, "token_id": name})), closed.client
        await client.post("/results/", json={"model": name, "content": "x"}, headers=as_team)
        await client.get(f"/models/{name}", headers=as_team)
        await client.get(f"/{name}", headers=as_team | {"X-Request-Id": name})
        await client.get("/models/", headers=as_team | {"Host": f"{name}.example"})
        await client.request(name.upper().replace("-", ""), "/models/", headers=as_team)
        await client.get("/models/", headers={"Authorization": f"Bearer {name}"})

    for number in range(25):  # too many wrong tokens have a code of their own
        await ask(f"name-{number}")
    before = await count()
    for number in range(25, 75):
        await ask(f"name-{number}")
    assert await count() == before


async def test_the_port_is_taken_over_when_it_is_free(
    settings: Settings, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.api.metrics_server._RETRY_SECONDS", 0.02)
    async with metrics_port(settings) as url:
        port = int(url.rpartition(":")[2])
        second = settings.model_copy(update={"metrics_port": port})
        waiting = asyncio.create_task(MetricsServer(second, FIXED.text).run())

        async def said() -> bool:
            return "metrics wait for" in caplog.text

        await until(said)

    async with httpx.AsyncClient(base_url=url) as client:

        async def answers() -> bool:
            with contextlib.suppress(httpx.TransportError):
                return (await client.get("/metrics")).status_code == 200
            return False

        await until(answers)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert caplog.text.count("metrics wait for") == 1
