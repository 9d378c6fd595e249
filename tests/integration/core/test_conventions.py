"""Spans of each dialect, held to OpenTelemetry's conventions at a collector's door."""

import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import ANY

import httpx
import pytest
import pytest_asyncio
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from app.cli.up.triton import EmbeddedTriton
from tests.conftest import Service
from tests.conventions import check_model_span, check_own_span, check_request_span
from tests.integration.support import CHAT_TEMPLATE, fresh_database, serve, until, write_model
from tests.otlp import Collector, attributes, collecting
from tests.postgres import PostgresServer

UNUSUAL = "Ypsilon"  # in each text of a request
TEXT = f"{UNUSUAL} {{{{chunks=4}}}}"
CHAT: dict[str, Any] = {"model": "scripted", "messages": [{"role": "user", "content": TEXT}]}
ANSWERED = {"gen_ai.response.id", "gen_ai.response.model", "gen_ai.usage.input_tokens"}
GENERATED = {
    *ANSWERED,
    *("gen_ai.usage.output_tokens", "gen_ai.response.finish_reasons"),
    "gen_ai.response.time_to_first_chunk",
}


@dataclass(frozen=True)
class Case:
    """A request, and what its spans have."""

    path: str
    body: dict[str, Any]
    operation: str
    requested: dict[str, Any] = field(default_factory=dict)  # of the model, if the request has them
    route: str | None = None
    calls: int = 1
    trace_id: str = field(default_factory=lambda: secrets.token_hex(16))


JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
# TGI's dialect chooses one.
OWN_SEED = {"gen_ai__request__seed": ANY}
CASES = [
    Case("/results/", {"model": "scripted", "content": TEXT}, "text_completion"),
    Case("/results/", CHAT, "chat"),
    Case("/v1/completions", {"model": "scripted", "prompt": TEXT}, "text_completion"),
    Case(
        "/v1/chat/completions",
        CHAT | {"seed": 7, "response_format": JSON_SCHEMA, "stop": [UNUSUAL], "temperature": 0},
        "chat",
        {"gen_ai__request__seed": 7, "gen_ai__output__type": "json"},
    ),
    Case("/v1/chat/completions", CHAT | {"stream": True}, "chat"),
    Case("/v1/chat/completions", CHAT | {"n": 2}, "chat", calls=2),
    Case("/v1/responses", {"model": "scripted", "input": TEXT}, "chat"),
    Case("/v1/messages", CHAT | {"max_tokens": 9}, "chat"),
    Case("/generate", {"inputs": TEXT}, "text_completion", OWN_SEED),
    Case("/generate_stream", {"inputs": TEXT}, "text_completion", OWN_SEED),
    Case("/inference/scripted", {"text": TEXT}, "text_completion", route="/inference/{model}"),
]
LOST = Case(
    "/results/", {"model": "scripted", "content": f"{UNUSUAL} {{{{fail_at=1}}}}"}, "text_completion"
)


@dataclass(frozen=True)
class Traced:
    collector: Collector
    answers: dict[str, httpx.Response]  # by trace id

    def spans(self, trace_id: str, kind: "Span.SpanKind.ValueType") -> list[Span]:
        return [span for span in self.collector.all_of(trace_id) if span.kind == kind]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def traced(
    postgres_server: PostgresServer,
    template: str,
    triton: EmbeddedTriton,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Traced]:
    """The traces of all cases, once the service has ended."""
    repository = tmp_path_factory.mktemp("repository")
    write_model(repository, "scripted", template=CHAT_TEMPLATE)
    answers: dict[str, httpx.Response] = {}
    with collecting() as collector:
        async with (
            fresh_database(
                *(postgres_server, template, triton),
                model_repository=repository,
                otlp_endpoint=collector.url,
            ) as settings,
            serve(settings, with_worker=True) as service,
        ):
            for case in (*CASES, LOST):
                headers = {"traceparent": f"00-{case.trace_id}-{'1' * 16}-01", "Prefer": "wait=30"}
                answers[case.trace_id] = await service.client.post(
                    case.path, json=case.body, headers=headers
                )
            for name, (method, path) in REFUSED.items():
                headers = {"traceparent": f"00-{name}-{'1' * 16}-01"}
                answers[name] = await service.client.request(method, path, headers=headers)
            await until(lambda: ended(service))
        yield Traced(collector, answers)


async def ended(service: Service) -> bool:
    rows = (await service.client.get("/results/", params={"limit": 100})).json()
    return all(row["state"] != "pending" for row in rows)


# Requests that no route answers, or whose path has an id, by trace ids.
REFUSED = {
    "1" * 32: ("GET", f"/nowhere/{UNUSUAL}"),
    "2" * 32: ("PROPFIND", "/results/"),
    "3" * 32: ("GET", "/results/01890000-0000-7000-8000-000000000000"),
    "4" * 32: ("GET", f"/results/?q={UNUSUAL}"),
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.path)
def test_each_dialect_follows_the_conventions(traced: Traced, case: Case) -> None:
    answer = traced.answers[case.trace_id]
    assert answer.is_success, answer.text
    (request,) = traced.spans(case.trace_id, Span.SPAN_KIND_SERVER)
    found = check_request_span(request, http__route=case.route or case.path)
    assert found["http.response.status_code"] == answer.status_code
    calls = traced.spans(case.trace_id, Span.SPAN_KIND_CLIENT)
    assert len(calls) == case.calls
    for call in calls:
        found = check_model_span(call, **case.requested)
        assert found["gen_ai.operation.name"] == case.operation
        assert found["gen_ai.request.model"] == found["gen_ai.response.model"] == "scripted"
        assert found["gen_ai.response.id"] == found["llm.result_id"]
        assert found.keys() >= GENERATED
        assert found["gen_ai.usage.output_tokens"] > 0
        assert 0 <= found["gen_ai.response.time_to_first_chunk"] < 60


def test_a_failed_call_has_its_error(traced: Traced) -> None:
    (call,) = traced.spans(LOST.trace_id, Span.SPAN_KIND_CLIENT)
    assert check_model_span(call)["error.type"] == "ModelFailedError"


def test_requests_without_a_result_are_named_by_their_route(traced: Traced) -> None:
    nowhere, other, unknown, searched = [
        traced.spans(trace_id, Span.SPAN_KIND_SERVER)[0] for trace_id in REFUSED
    ]
    check_request_span(nowhere)
    assert nowhere.name == "GET"
    found = check_request_span(
        other, http__request__method_original="PROPFIND", http__route="/results/"
    )
    assert found["http.request.method"] == "_OTHER"
    found = check_request_span(unknown, http__route="/results/{result_id}")
    assert found["http.response.status_code"] == 404
    check_request_span(searched, http__route="/results/", url__query="REDACTED")


def test_no_span_of_ours_is_a_call_of_a_model_and_none_has_a_text(traced: Traced) -> None:
    own = [span for span in traced.collector.spans if span.kind == Span.SPAN_KIND_INTERNAL]
    assert {span.name for span in own} >= {"queue", "finish"}
    for span in own:
        check_own_span(span)
    paths = {attributes(span).get("url.path") for span in traced.collector.spans}
    texts = str(traced.collector.spans).replace(f"/nowhere/{UNUSUAL}", "")
    assert f"/nowhere/{UNUSUAL}" in paths
    assert UNUSUAL not in texts
    # The scripted model's words.
    answer = next(iter(traced.answers.values())).json()["result"]
    assert answer.split()[0] not in texts
