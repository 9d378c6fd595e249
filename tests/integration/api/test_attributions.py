"""Attributions as results: awaited, kept with a result, followed, cancelled, cached."""

import asyncio
import ctypes
import fcntl
import json
import os
import signal
import struct
import sys
import termios
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import UUID

import asyncpg
import httpx
import psutil
import pytest
from pydantic import SecretStr

from app.cli.up import processes
from app.cli.up.service import ServicePart
from app.core.settings import Settings
from app.worker.backends.attribution_backend import AttributionBackend
from tests.attribution_workers import (
    DOCUMENTS,
    INDEX,
    QUEUE,
    SENTENCE,
    attribution_worker,
    build_index,
    environment_of,
)
from tests.conftest import Service, connect, run_service, short_lease
from tests.integration.auth.test_auth import bearer
from tests.integration.core.test_tracing import CALL, CLIENT, TRACE_ID, collector
from tests.integration.results.test_erasure import BLOCKED
from tests.integration.support import assert_problem, until
from tests.otlp import Collector, attributes
from tests.unit.api.test_startup_checks import STRONG
from tests.unit.auth.test_jwt import sign

__all__ = ["collector"]

# Seconds of work.
LONG_TEXT = f"{SENTENCE} and " * 330
ALL_OF_IT = {
    "maximumSpanDensity": 1,
    "allowSpansWithPartialWords": True,
    "maximumFrequency": 10_000,
    "maximumContextLength": 10_000,
}
_PIDFD_GETFD = 438  # the system call of this name, on every processor
JSON = {"Content-Type": "application/json"}
TEXT = f"He wrote: {SENTENCE} again."


@pytest.fixture(scope="module")
def declarations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_index(tmp_path_factory.mktemp("index"))


@pytest.fixture
def settings(settings: Settings, declarations: Path) -> Settings:
    return settings.model_copy(update={"indexes_file": declarations, "max_attempts": 3})


@pytest.fixture
async def worker(settings: Settings, tmp_path: Path) -> AsyncIterator[ServicePart]:
    async with attribution_worker(settings, tmp_path / "worker.log") as running:
        yield running


async def attribute(service: Service, text: str = TEXT, **members: Any) -> httpx.Response:
    return await service.client.post(f"/{INDEX}/attribution", json={"response": text, **members})


async def generate(service: Service, text: str = TEXT, **members: Any) -> dict[str, Any]:
    """A result whose text is `text` and a space; awaited."""
    answer = await service.client.post(
        "/results/",
        json={"model": "scripted", "content": f"{{{{text={text}}}}}", **members},
        headers={"Prefer": "wait=30"},
    )
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def read(service: Service, result_id: str) -> dict[str, Any]:
    answer = await service.client.get(f"/results/{result_id}", params={"wait": 30})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def assert_found(attribution: dict[str, Any]) -> None:
    """The sentence was found, whole, in the document that has it."""
    assert attribution["index"] == INDEX
    longest = max(attribution["spans"], key=lambda span: span["length"])
    assert SENTENCE in longest["text"]
    (document,) = longest["documents"]
    assert document["metadata"]["metadata"]["source"] == "tale"
    assert SENTENCE in document["text"]


# --- of a text ------------------------------------------------------------------------------------


@pytest.mark.trial
async def test_a_text_is_attributed(service: Service, worker: ServicePart) -> None:
    answer = await attribute(service, maximumSpanDensity=1)
    assert answer.status_code == 200, answer.text
    assert_found(answer.json())
    assert "".join(answer.json()["inputTokens"]) == TEXT
    result = await read(service, answer.headers["x-result-id"])
    assert (result["kind"], result["model_name"], result["state"]) == (
        "attribution",
        QUEUE,
        "completed",
    )
    assert result["result"] == answer.json()
    assert result["parameters"] == {"maximumSpanDensity": 1.0}
    assert result["usage"]["prompt_tokens"] == len(TEXT)
    listed = (await service.client.get("/results/", params={"model_name": QUEUE})).json()
    (row,) = listed
    assert (row["id"], row["result"], row["truncated"]) == (result["id"], None, True)
    full = await service.client.get("/results/", params={"model_name": QUEUE, "full": True})
    assert full.json()[0]["result"] == answer.json()
    assert "truncated" not in full.json()[0]


@pytest.mark.trial
async def test_requests_of_the_originals_load_test(service: Service, worker: ServicePart) -> None:
    """load-test/locustfile.py of infini-gram API, with the members that later versions ignore."""
    members: dict[str, Any] = {
        "prompt": "Who wrote?", "delimiters": ["\n", "."], "allowSpansWithPartialWords": True,
        "minimumSpanLength": 1, "maximumFrequency": 1_000_000, "maximumSpanDensity": 0.05,
        "spanRankingMethod": "unigram_logprob_sum", "includeDocuments": True,
        "maximumDocumentsPerSpan": 10, "maximum_document_context_length_retrieved": 250,
        "maximum_document_context_length_displayed": 40, "filterMethod": "bm25",
        "filterBm25FieldsConsidered": "prompt|response", "filterBm25RatioToKeep": 1.0,
        "includeInputAsTokens": True,
    }  # fmt: skip
    answer = await attribute(service, **members)
    assert answer.status_code == 200, answer.text
    spans = answer.json()["spans"]
    assert 1 <= len(spans) <= 0.05 * len(TEXT) + 1
    assert all(1 <= len(span["documents"]) <= 10 for span in spans)
    refused = await attribute(service, **{**members, "maximumFrequency": 1_000_001})
    assert_problem(refused, 422, "invalid_request", "maximumFrequency")


@pytest.mark.trial
async def test_the_same_text_again_has_the_same_answer(
    service: Service, worker: ServicePart, connection: asyncpg.Connection
) -> None:
    expiry = "SELECT extract(epoch FROM expires_at - now()) FROM idempotency_keys"
    first = await attribute(service)
    assert 3500 < await connection.fetchval(expiry) <= 3600
    again = await attribute(service, prompt="ignored")
    assert again.content == first.content
    assert again.headers["x-result-id"] == first.headers["x-result-id"]
    assert again.headers["idempotent-replayed"] == "true"
    assert 43_100 < await connection.fetchval(expiry) <= 43_200
    other = await attribute(service, maximumFrequency=3)
    assert other.headers["x-result-id"] != first.headers["x-result-id"]
    # Nor is one of another version of the index, which a worker had open, an answer.
    version = "UPDATE results SET model_version = model_version + 1 WHERE id = $1"
    await connection.execute(version, UUID(other.headers["x-result-id"]))
    renewed = await attribute(service, maximumFrequency=3)
    assert renewed.headers["x-result-id"] != other.headers["x-result-id"]
    assert renewed.json() == other.json()
    # One that is deleted is found no more.
    await service.client.delete(f"/results/{first.headers['x-result-id']}")
    anew = await attribute(service)
    assert anew.headers["x-result-id"] != first.headers["x-result-id"]
    assert anew.json() == first.json()


@pytest.mark.trial
async def test_those_who_ask_the_same_at_once_share_one(
    service: Service, worker: ServicePart, connection: asyncpg.Connection
) -> None:
    answers = await asyncio.gather(*(attribute(service) for _ in range(20)))
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.content for answer in answers}) == 1
    assert await connection.fetchval("SELECT count(*) FROM results") == 1


@pytest.mark.trial
async def test_a_cancelled_attribution_is_replaced_for_another_client(
    service: Service, settings: Settings, tmp_path: Path, connection: asyncpg.Connection
) -> None:
    async def waiters(count: int) -> bool:
        return service.services.hub._waiters.count == count

    first = asyncio.create_task(attribute(service))
    await until(lambda: waiters(1))
    result_id = await until(lambda: connection.fetchval("SELECT id FROM results"))
    second = asyncio.create_task(attribute(service))
    await until(lambda: waiters(3))  # for its own id, and for the one of the key
    await service.client.post(f"/results/{result_id}/cancel")
    assert (await first).status_code >= 400
    async with attribution_worker(settings, tmp_path / "worker.log"):
        answer = await second
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-result-id"] != str(result_id)


async def test_what_takes_too_long_is_cancelled_and_says_so(settings: Settings) -> None:
    short = settings.model_copy(update={"attribution_seconds": 0.3})
    async with run_service(short, with_worker=False) as api:
        answer = await attribute(api)
        assert answer.status_code == 503
        problem = answer.json()
        assert (problem["type"], problem["title"]) == ("server-overloaded", "Server overloaded")
        assert int(answer.headers["retry-after"]) > 0
        result = await read(api, answer.headers["x-result-id"])
        assert (result["state"], result["error"]["code"]) == ("failed", "cancelled")
        # A failure is no answer for the next one, even to the same request.
        again = await attribute(api)
        assert again.headers["x-result-id"] != answer.headers["x-result-id"]


@pytest.mark.trial
async def test_a_key_lets_it_go_on(settings: Settings, tmp_path: Path) -> None:
    short = settings.model_copy(update={"attribution_seconds": 0.3})
    async with run_service(short, with_worker=False) as api:
        headers = {"Idempotency-Key": "mine"}
        url = f"/{INDEX}/attribution"
        first = await api.client.post(url, json={"response": TEXT}, headers=headers)
        assert first.status_code == 503
        result_id = first.headers["x-result-id"]
        other = await api.client.post(url, json={"response": "other"}, headers=headers)
        assert_problem(other, 409, "idempotency_conflict")
        async with attribution_worker(settings, tmp_path / "worker.log"):
            assert (await read(api, result_id))["state"] == "completed"
        again = await api.client.post(url, json={"response": TEXT}, headers=headers)
        assert (again.status_code, again.headers["x-result-id"]) == (200, result_id)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "response"),
        ({"response": 7}, "response"),
        ({"response": "a" * 200_001}, "response"),
        ({"response": "a\x00b"}, "body.response"),
        ({"response": "a\ud800b"}, "body"),
        ({"response": "a", "minimumSpanLength": 0}, "minimumSpanLength"),
        ({"response": "a", "maximum_frequency": -1}, "maximum_frequency"),
        ({"response": "a", "maximumSpanDensity": 0}, "maximumSpanDensity"),
        ({"response": "a", "spanRankingMethod": "best"}, "spanRankingMethod"),
        ({"response": "a", "delimiters": [1]}, "delimiters"),
    ],
)
async def test_bad_requests_store_nothing(
    api: Service, connection: asyncpg.Connection, body: dict[str, Any], field: str
) -> None:
    answer = await api.client.post(f"/{INDEX}/attribution", content=json.dumps(body), headers=JSON)
    assert_problem(answer, 422, "invalid_request", field)
    assert await connection.fetchval("SELECT count(*) FROM results") == 0


async def test_an_index_that_is_not_there_is_told(api: Service) -> None:
    answer = await api.client.post("/nothing/attribution", json={"response": "a"})
    assert_problem(answer, 404, "unknown_index")
    answer = await api.client.post(
        "/results/", json={"model": "scripted", "content": "a", "attribute": "nothing"}
    )
    assert_problem(answer, 404, "unknown_index")


@pytest.mark.trial
async def test_a_key_outlives_an_index_that_is_built_anew(
    settings: Settings, tmp_path: Path, connection: asyncpg.Connection
) -> None:
    short = settings.model_copy(update={"attribution_seconds": 0.3})
    anew = short.model_copy(update={"indexes_file": build_index(tmp_path, DOCUMENTS[:2])})
    headers: dict[str, str] = {"Idempotency-Key": "mine"}
    ids = set()
    for of_index in (short, anew):
        async with run_service(of_index, with_worker=False) as api:
            answer = await api.client.post(
                f"/{INDEX}/attribution", json={"response": TEXT}, headers=headers
            )
            assert answer.status_code == 503, answer.text
            ids.add(answer.headers["x-result-id"])
    assert len(ids) == 1


# --- of a result ----------------------------------------------------------------------------------


async def test_who_attributes_what_is_being_erased_is_refused(
    service: Service, connection: asyncpg.Connection
) -> None:
    source = await generate(service)
    async with connection.transaction():
        await connection.execute("SELECT FROM contexts FOR UPDATE")
        url = f"/results/{source['id']}/attribution?index={INDEX}"
        sent = asyncio.create_task(service.client.post(url))
        await _until_blocked(service)
        await connection.execute("UPDATE results SET erased_at = now(), output = NULL")
        await connection.execute("UPDATE contexts SET erased_at = now(), content = ''")
    assert_problem(await sent, 410, "erased")


@pytest.mark.parametrize("headers", [{}, {"Idempotency-Key": "mine"}])
async def test_who_attributes_what_is_being_deleted_is_refused(
    service: Service, connection: asyncpg.Connection, headers: dict[str, str]
) -> None:
    source = await generate(service)
    async with connection.transaction():
        await connection.execute("SELECT FROM results FOR UPDATE")
        url = f"/results/{source['id']}/attribution?index={INDEX}"
        sent = asyncio.create_task(service.client.post(url, headers=headers))
        await _until_blocked(service)
        await connection.execute("DELETE FROM results")
    assert_problem(await sent, 404, "not_found")
    assert await connection.fetchval("SELECT count(*) FROM results") == 0


async def _until_blocked(service: Service) -> None:
    """Return when the statement that stores results waits for a lock."""
    watcher = await connect(service.services.settings)
    await until(lambda: watcher.fetchval(BLOCKED, "key_seconds"))
    await watcher.close()


@pytest.mark.trial
async def test_a_result_is_attributed_once(service: Service, worker: ServicePart) -> None:
    source = await generate(service)
    url = f"/results/{source['id']}/attribution"
    none = await service.client.get(url, params={"index": INDEX})
    assert_problem(none, 404, "not_found")
    body = {"maximumSpanDensity": 1}
    first = await service.client.post(url, params={"index": INDEX}, json=body)
    assert first.status_code == 202, first.text
    assert first.headers["location"] == f"/results/{first.json()['id']}"
    assert first.json()["source_id"] == source["id"]
    result = await read(service, first.json()["id"])
    assert (result["state"], result["kind"]) == ("completed", "attribution")
    assert (result["source_id"], result["context_id"]) == (source["id"], source["context_id"])
    assert_found(result["result"])
    again = await service.client.post(url, params={"index": INDEX}, json=body)
    assert (again.status_code, again.json()["id"]) == (200, result["id"])
    other = await service.client.post(url, params={"index": INDEX}, headers={"Prefer": "wait=30"})
    assert (other.status_code, other.json()["state"]) == (200, "completed")
    newest = await service.client.get(url, params={"index": INDEX})
    assert newest.json()["id"] == other.json()["id"] != result["id"]
    # The attributed result is deleted, and its attribution with it.
    await service.client.delete(f"/results/{source['id']}")
    assert_problem(await service.client.get(f"/results/{result['id']}"), 404, "not_found")


@pytest.mark.trial
async def test_a_result_is_sent_with_its_attribution(service: Service, worker: ServicePart) -> None:
    await until(lambda: _is_served(service))
    sent = await service.client.post(
        "/results/",
        json={
            "model": "scripted",
            "content": f"{{{{delay_ms=20 text={TEXT}}}}}",
            "attribute": {"index": INDEX, "maximumSpanDensity": 1},
        },
    )
    assert sent.json()["attribution"] == {"index": INDEX, "id": None}
    source = await read(service, sent.json()["id"])
    assert source["attribution"]["index"] == INDEX
    result = await read(service, source["attribution"]["id"])
    assert (result["source_id"], result["state"], result["model_ready"]) == (
        source["id"],
        "completed",
        True,
    )
    assert_found(result["result"])
    assert "".join(result["result"]["inputTokens"]) == source["result"]


@pytest.mark.trial
async def test_an_attribution_that_follows_is_of_the_same_trace(
    settings: Settings, collector: Collector, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    traced = settings.model_copy(update={"otlp_endpoint": collector.url})
    async with (
        run_service(traced, with_worker=True) as service,
        attribution_worker(traced, tmp_path / "worker.log"),
    ):
        await until(lambda: _is_served(service))
        sent = await service.client.post(
            "/results/",
            json={"model": "scripted", "content": f"{{{{text={TEXT}}}}}", "attribute": INDEX},
            headers={"traceparent": CLIENT},
        )
        source = await read(service, sent.json()["id"])
        await read(service, source["attribution"]["id"])
    about = {
        (span.name, attributes(span)["llm.result_id"])
        for span in collector.spans
        if span.trace_id.hex() == TRACE_ID and span.kind != span.SPAN_KIND_SERVER
    }
    assert {one for one in about if one[0] != "flush"} == {
        *((name, source["attribution"]["id"]) for name in ("queue", "finish")),
        *((name, source["id"]) for name in ("queue", CALL, "finish")),
    }
    assert collector.services == {"llm-api", "llm-attribution"}


async def _is_served(service: Service) -> bool:
    await service.services.registry.refresh()
    return service.services.registry.is_ready(QUEUE)


async def test_a_failed_generation_has_no_attribution(service: Service) -> None:
    sent = await service.client.post(
        "/results/", json={"model": "scripted", "content": "{{fail_at=1}}", "attribute": INDEX}
    )
    source = await read(service, sent.json()["id"])
    assert (source["state"], source["attribution"]) == ("failed", {"index": INDEX, "id": None})


@pytest.mark.trial
async def test_an_attribution_is_streamed_and_retried_like_any_result(
    service: Service, worker: ServicePart
) -> None:
    source = await generate(service)
    answer = await service.client.post(
        f"/results/{source['id']}/attribution",
        params={"index": INDEX},
        headers={"Accept": "text/event-stream"},
    )
    text, ended = "", ""
    for block in answer.text.split("\n\n"):
        event = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line)
        if event.get("event") == "delta":
            text += json.loads(event["data"])["text"]
        ended = event.get("event", ended)
    assert ended == "completed"
    result_id = answer.headers["location"].rsplit("/", 1)[1]
    result = await read(service, result_id)
    assert json.loads(text) == result["result"]
    retried = await service.client.post(
        f"/results/{result_id}/retry", headers={"Prefer": "wait=30"}
    )
    again = retried.json()
    assert (again["retry_of"], again["source_id"]) == (result_id, source["id"])
    assert again["result"] == result["result"]


async def test_what_has_no_text_yet_is_not_attributed(api: Service, service: Service) -> None:
    sent = await service.client.post(
        "/results/", json={"model": "scripted", "content": "{{chunks=50 delay_ms=200}}"}
    )
    url = f"/results/{sent.json()['id']}/attribution"
    answer = await service.client.post(url, params={"index": INDEX})
    assert_problem(answer, 409, "conflict")
    await service.client.post(f"/results/{sent.json()['id']}/cancel")
    refused = await service.client.post(
        "/results/",
        json={"model": "scripted", "content": "{{refuse}}"},
        headers={"Prefer": "wait=30"},
    )
    url = f"/results/{refused.json()['id']}/attribution"
    answer = await service.client.post(url, params={"index": INDEX})
    assert_problem(answer, 409, "conflict")


async def test_an_attribution_of_a_result_names_an_index(service: Service) -> None:
    url = f"/results/{(await generate(service))['id']}/attribution"
    answer = await service.client.post(url, params={"index": "../x"})
    assert_problem(answer, 404, "unknown_index")
    answer = await service.client.post(url)
    assert_problem(answer, 422, "invalid_request", "index")


@pytest.mark.trial
async def test_one_team_neither_sees_nor_uses_anothers_attributions(
    settings: Settings, tmp_path: Path
) -> None:
    guarded = settings.model_copy(update={"jwt_secret": SecretStr(STRONG)})
    red, blue = (bearer(sign({"team_id": team, "token_id": team})) for team in ("red", "blue"))
    async with (
        run_service(guarded, with_worker=True) as service,
        attribution_worker(settings, tmp_path / "worker.log"),
    ):
        client = service.client
        body = {"response": TEXT}
        answers = [
            await client.post(f"/{INDEX}/attribution", json=body, headers=team)
            for team in (red, blue, red)
        ]
        ids = [answer.headers["x-result-id"] for answer in answers]
        assert ids[0] == ids[2] != ids[1]
        assert_problem(await client.get(f"/results/{ids[0]}", headers=blue), 404, "not_found")
        text = {"model": "scripted", "content": "a", "attribute": INDEX}
        sent = await client.post("/results/", json=text, headers=red | {"Prefer": "wait=30"})
        following = sent.json()["attribution"]["id"]
        for path in (f"/results/{following}", f"/results/{sent.json()['id']}/attribution"):
            for method in ("GET", "POST"):
                if method == "POST" and path.endswith(following):
                    continue
                answer = await client.request(method, path, params={"index": INDEX}, headers=blue)
                assert_problem(answer, 404, "not_found")
        assert (await client.get(f"/results/{following}", headers=red)).status_code == 200
        assert_problem(
            await client.post(f"/{INDEX}/attribution", json=body), 401, "unauthenticated"
        )


# --- workers that die -----------------------------------------------------------------------------


@pytest.mark.trial
async def test_a_killed_engine_is_started_anew_and_the_work_done_again(
    service: Service, worker: ServicePart
) -> None:
    (engine,) = _engines(worker)
    engine.suspend()
    sent = asyncio.create_task(attribute(service))
    await until(lambda: _has_been_asked(engine))
    engine.kill()
    answer = await sent
    assert answer.status_code == 200
    attempts = await service.client.get(f"/results/{answer.headers['x-result-id']}/attempts")
    first, second = attempts.json()
    assert "killed by signal 9" in first["error"]["message"]
    assert (second["attempt"], second["error"]) == (2, None)


@pytest.mark.trial
async def test_what_kills_every_engine_fails_with_a_code(
    service: Service, worker: ServicePart, connection: asyncpg.Connection
) -> None:
    sent = asyncio.create_task(attribute(service, LONG_TEXT, **ALL_OF_IT))
    while not sent.done():
        if await _is_running(connection):
            for engine in _engines(worker):
                engine.kill()
        await asyncio.sleep(0.05)
    answer = await sent
    assert_problem(answer, 502, "engine_crashed")
    result = await read(service, answer.headers["x-result-id"])
    assert (result["state"], result["error"]["retryable"]) == ("failed", False)
    assert (await attribute(service)).status_code == 200  # the others are none the worse


@short_lease
@pytest.mark.trial
async def test_a_killed_worker_loses_nothing(
    service: Service, settings: Settings, tmp_path: Path, connection: asyncpg.Connection
) -> None:
    async with attribution_worker(settings, tmp_path / "first.log") as first:
        (engine,) = _engines(first)
        engine.suspend()
        sent = asyncio.create_task(attribute(service))
        await until(lambda: _is_running(connection))
        assert first._process is not None
        first._process.send_signal(signal.SIGKILL)
        await asyncio.to_thread(engine.wait, 10)  # it dies with its worker
    async with attribution_worker(settings, tmp_path / "second.log"):
        answer = await sent
    assert answer.status_code == 200, answer.text


@pytest.mark.trial
async def test_a_cancelled_attribution_frees_its_engine(
    service: Service, worker: ServicePart
) -> None:
    (engine,) = _engines(worker)
    engine.suspend()
    source = await generate(service)
    sent = await service.client.post(f"/results/{source['id']}/attribution?index={INDEX}")
    await until(lambda: _has_been_asked(engine))
    cancelled = await service.client.post(f"/results/{sent.json()['id']}/cancel")
    assert cancelled.json()["error"]["code"] == "cancelled"
    assert (await attribute(service)).status_code == 200


@pytest.mark.trial
async def test_signals_to_all_of_a_group_leave_an_engine_at_work(
    service: Service, worker: ServicePart, connection: asyncpg.Connection
) -> None:
    (engine,) = _engines(worker)
    engine.suspend()
    sent = asyncio.create_task(attribute(service))
    await until(lambda: _is_running(connection))
    for number in (signal.SIGINT, signal.SIGTERM):  # of Ctrl-C, and of systemd
        engine.send_signal(number)
    engine.resume()
    answer = await sent
    assert answer.status_code == 200, answer.text
    result = await read(service, answer.headers["x-result-id"])
    assert result["attempt"] == 1


async def test_engines_leave_a_processor_to_others(worker: ServicePart) -> None:
    processors = sorted(os.sched_getaffinity(0))
    (engine,) = _engines(worker)
    assert engine.nice() == 19
    assert os.getsid(engine.pid) == engine.pid
    assert sorted(engine.cpu_affinity()) == (processors[1:] or processors)


async def test_a_worker_that_still_opens_its_index_stops_when_told(settings: Settings) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "app", "worker", "--kind", "attribution", "--index", INDEX),
        env=environment_of(settings),
    )

    async def engine() -> psutil.Process | None:
        found = processes.descendants(process.pid)
        return found[0] if found else None

    opening = await until(engine)
    opening.suspend()
    process.send_signal(signal.SIGTERM)
    assert await process.wait() == 0
    assert not opening.is_running()


async def test_nothing_is_claimed_for_an_engine_that_is_being_ended(declarations: Path) -> None:
    backend = AttributionBackend(declarations, INDEX, 1)
    await backend.open()
    running = asyncio.create_task(backend.run())
    with pytest.raises(ValueError, match="in use"):  # noqa: PT012 - what the context is left by
        async with backend.engine():
            assert backend.ready() == [QUEUE]
            raise ValueError("while it is in use")
    assert backend.ready() == []  # at once, and not when the process has ended
    async with backend.engine():  # another
        assert backend.ready() == [QUEUE]
    running.cancel()
    await asyncio.wait([running])


@pytest.mark.trial
async def test_a_worker_of_an_index_that_is_broken_says_why(
    settings: Settings, tmp_path: Path, declarations: Path
) -> None:
    copy = tmp_path / "indexes.toml"
    text = declarations.read_text().replace(INDEX, "other")
    copy.write_text(text)
    broken = settings.model_copy(update={"indexes_file": copy})
    for index in ("other", "unknown"):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "app", "worker", "--kind", "attribution", "--index", index),
            env=environment_of(broken),
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stderr is not None
        logged = (await process.stderr.read()).decode()
        assert await process.wait() == 2
        assert index in logged
        assert "Traceback" not in logged


def _engines(worker: ServicePart) -> list[psutil.Process]:
    assert worker._process is not None
    return processes.descendants(worker._process.pid)


async def _is_running(connection: asyncpg.Connection) -> bool:
    return bool(
        await connection.fetchval(
            "SELECT true FROM results WHERE kind = 'attribution' AND worker_id IS NOT NULL"
            " AND state = 'pending'"
        )
    )


async def _has_been_asked(engine: psutil.Process) -> bool:
    """True once a request waits on a suspended engine's stdin; a claim alone may precede that."""
    pidfd = os.pidfd_open(engine.pid)
    stdin = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, pidfd, 0, 0)
    os.close(pidfd)
    assert stdin >= 0, os.strerror(ctypes.get_errno())
    (size,) = struct.unpack("i", fcntl.ioctl(stdin, termios.FIONREAD, bytes(4)))
    os.close(stdin)
    return bool(size)
