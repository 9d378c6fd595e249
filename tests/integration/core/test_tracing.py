"""Traces, at a real collector's door: which spans one result leaves, and under whose trace."""

import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import asyncpg
import grpc
import pytest

from app.core import tracing
from app.core.settings import Settings
from app.inference.triton_access import grpc_headers
from tests.conftest import TRITON_SECRET, Service, run_service
from tests.integration.support import finish, until
from tests.otlp import Collector, attributes, collecting

CLIENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
TRACE_ID = CLIENT.split("-")[1]


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as found:
        yield found


@contextlib.asynccontextmanager
async def recording_proxy(address: str) -> AsyncIterator[tuple[str, list[dict[str, str]]]]:
    """A gRPC server that hands everything on to Triton, and notes the metadata of streams."""
    seen: list[dict[str, str]] = []
    async with grpc.aio.insecure_channel(address) as channel:

        class Everything(grpc.GenericRpcHandler):  # type: ignore[misc] # grpc ships no types
            def service(self, details: Any) -> Any:
                async def forward(requests: Any, context: Any) -> AsyncIterator[bytes]:
                    if details.method.endswith("ModelStreamInfer"):
                        seen.append(dict(context.invocation_metadata()))
                    call = channel.stream_stream(details.method)(
                        requests, metadata=grpc_headers(TRITON_SECRET)
                    )
                    async for answer in call:
                        yield answer

                return grpc.stream_stream_rpc_method_handler(forward)

        server = grpc.aio.server()
        server.add_generic_rpc_handlers([Everything()])
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        yield f"127.0.0.1:{port}", seen
        await server.stop(None)


REQUEST, CALL = "POST /results/", "text_completion scripted"
_SPANS = {REQUEST, "queue", CALL, "finish"}


async def test_one_result_is_one_trace(
    settings: Settings, collector: Collector, connection: asyncpg.Connection
) -> None:
    async with recording_proxy(settings.triton_grpc) as (address, seen):
        traced = settings.model_copy(
            update={
                "otlp_endpoint": collector.url,
                "triton_grpc": address,
                "flush_seconds": 0.05,
            }
        )
        async with run_service(traced, with_worker=True) as service:
            answer = await service.client.post(
                "/results/",
                json={"model": "scripted", "content": "Write it. {{chunks=10 delay_ms=30}}"},
                headers={"traceparent": CLIENT, "Prefer": "wait=30", "X-Request-Id": "mine"},
            )
            result = answer.json()
            assert result["state"] == "completed"
            untraced = await finish(service, "Write it.")
    # All is sent when the service ends.
    assert collector.paths == {"/v1/traces"}
    assert collector.services == {"llm-api"}
    assert collector.schemas == {tracing.SCHEMA}
    spans = collector.of(TRACE_ID)
    assert set(spans) == {*_SPANS, "flush"}
    request = spans[REQUEST]
    assert request.parent_span_id.hex() == CLIENT.split("-")[2]
    assert all(
        span.parent_span_id == request.span_id for name, span in spans.items() if name != REQUEST
    )
    for name in ("queue", CALL, "flush", "finish"):
        assert attributes(spans[name])["llm.result_id"] == result["id"], name
        assert spans[name].end_time_unix_nano >= spans[name].start_time_unix_nano
    assert spans[REQUEST].start_time_unix_nano <= spans["finish"].start_time_unix_nano
    assert attributes(request)["llm.request_id"] == "mine"
    assert attributes(request)["http.response.status_code"] == 200
    assert attributes(spans["flush"])["llm.flushes"] >= 1
    assert attributes(spans[CALL])["gen_ai.usage.output_tokens"] == 10
    # The row carries it to whichever worker; Triton receives the span around it.
    stored = await connection.fetchval("SELECT trace FROM results WHERE id = $1", result["id"])
    assert stored == f"00-{TRACE_ID}-{request.span_id.hex()}-01"
    span_id = spans[CALL].span_id.hex()
    assert f"00-{TRACE_ID}-{span_id}-01" in [one.get("traceparent") for one in seen]
    # One that no client began is a trace of its own.
    own = await connection.fetchval("SELECT trace FROM results WHERE id = $1", untraced["id"])
    assert own.split("-")[1] != TRACE_ID
    # Flushes are of texts that take longer than one.
    assert collector.of(own.split("-")[1]).keys() - {"flush"} == _SPANS
    assert "Write it" not in str(collector.spans)


async def test_another_process_goes_on_with_the_trace(
    settings: Settings, collector: Collector
) -> None:
    """Accepted by an API without a worker; run, and failed, later."""
    traced = settings.model_copy(update={"otlp_endpoint": collector.url})
    async with run_service(traced, with_worker=False) as api:
        answer = await api.client.post(
            "/results/",
            json={"model": "scripted", "content": "Write it. {{chunks=3 fail_at=1}}"},
            headers={"traceparent": CLIENT},
        )
        assert answer.status_code == 202
    assert set(collector.of(TRACE_ID)) == {REQUEST}
    async with run_service(traced, with_worker=True) as service:

        async def ended() -> bool:
            path = f"/results/{answer.json()['id']}"
            return bool((await service.client.get(path)).json()["state"] == "failed")

        await until(ended)
    spans = collector.of(TRACE_ID)
    assert spans.keys() - {"flush"} == _SPANS
    assert attributes(spans[CALL])["error.type"] == "ModelFailedError"
    assert attributes(spans["finish"])["error.type"] == "model_error"
    assert spans["finish"].status.code == 2  # STATUS_CODE_ERROR


@pytest.mark.parametrize(
    "given",
    [
        "",
        "00-0-0-01",
        f"ff-{'1' * 32}-{'1' * 16}-01",
        f"00-{'0' * 32}-{'1' * 16}-01",
        "x" * 10_000,
        "00-é",
    ],
)
async def test_what_is_no_context_begins_a_trace(collector: Collector, given: str) -> None:
    active = tracing.Tracing(collector.url, "x")
    span, traceparent = active.begin("GET", [(b"traceparent", given.encode())], {})
    active.end(span, {})
    await active.close()
    (found,) = collector.spans
    assert not found.parent_span_id
    assert traceparent.startswith(f"00-{found.trace_id.hex()}-{found.span_id.hex()}-0")
    assert found.trace_id.hex() not in ("0" * 32, "1" * 32)


async def test_a_collector_that_is_away_delays_nothing(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "_SHUTDOWN_SECONDS", 0.1)
    traced = settings.model_copy(update={"otlp_endpoint": "http://127.0.0.1:1"})
    async with run_service(traced, with_worker=True) as service:
        result = await finish(service, "Write it.")
        assert result["state"] == "completed"


async def test_without_an_endpoint_nothing_is_traced(
    service: Service, connection: asyncpg.Connection
) -> None:
    assert tracing.active is None
    answer = await service.client.post(
        "/results/",
        json={"model": "scripted", "content": "Write it."},
        headers={"traceparent": CLIENT},
    )
    assert answer.status_code == 202
    assert await connection.fetch("SELECT FROM results WHERE trace IS NOT NULL") == []
