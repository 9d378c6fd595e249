"""The dashboard and the alert rules: they parse, they name metrics that are there, and these have data."""

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import promql_parser
import pytest
import yaml
from promql_parser import MatchOp

from app.cli.up import processes
from app.cli.up.service import ServicePart
from app.cli.up.triton import EmbeddedTriton
from app.core import metrics
from app.core.settings import Settings
from app.inference.triton_errors import ERROR_KINDS
from tests.conftest import ROOT
from tests.integration.api.test_metrics import Samples, parse, value
from tests.integration.support import until
from tests.integration.webhook_receiver import receiving

MONITORING = ROOT / "monitoring"
_DURATION = re.compile(r"\d+(s|m|h|d)")


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((MONITORING / "grafana-dashboard.json").read_text())
    return found


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def expressions() -> list[str]:
    shown = [target["expr"] for panel in panels() for target in panel["targets"]]
    return [_filled(one) for one in [*shown, *(rule["expr"] for rule in rules())]]


def _filled(expression: str) -> str:
    """With Grafana's variables replaced, as it does."""
    return expression.replace("$__rate_interval", "5m").replace("$model", ".*")


def selectors(node: Any) -> Iterator[Any]:
    """The selectors of an expression."""
    if type(node).__name__ == "VectorSelector":
        yield node
        return
    for name in ("lhs", "rhs", "expr", "args", "vector_selector", "param"):
        inner = getattr(node, name, None)
        for one in inner if isinstance(inner, list) else [inner]:
            if one is not None and not isinstance(one, str):
                yield from selectors(one)


def is_met(matcher: Any, labels: dict[str, str]) -> bool:
    given = labels.get(matcher.name, "")
    equal = re.fullmatch(matcher.value, given) is not None
    if matcher.op in (MatchOp.Equal, MatchOp.NotEqual):
        equal = matcher.value == given
    return equal == (matcher.op in (MatchOp.Equal, MatchOp.Re))


def matching(selector: Any, samples: Samples) -> list[float]:
    return [
        number
        for (name, labels), number in samples.items()
        if name == selector.name
        and all(is_met(one, dict(labels)) for one in selector.matchers.matchers)
    ]


def test_every_expression_is_promql() -> None:
    assert len(expressions()) > 50
    for expression in expressions():
        assert list(selectors(promql_parser.parse(expression))), expression


class Target:
    """The samples that Prometheus would scrape: each with its job and instance, and `up`."""

    def __init__(self, job: str, address: str) -> None:
        self._labels = {("job", job), ("instance", address)}
        self._url = f"http://{address}/metrics"

    async def scrape(self, client: httpx.AsyncClient) -> Samples:
        answer = await client.get(self._url)
        assert answer.status_code == 200, (self._url, answer.text)
        found = parse(answer.text) | {("up", frozenset[tuple[str, str]]()): 1.0}
        return {(name, labels | self._labels): number for (name, labels), number in found.items()}


@dataclass
class Running:
    """API, worker and Triton as processes of their own."""

    client: httpx.AsyncClient
    targets: list[Target]

    async def scrape(self) -> Samples:
        found: Samples = {}
        for target in self.targets:
            found |= await target.scrape(self.client)
        return found


@pytest.fixture
async def running(
    settings: Settings, triton: EmbeddedTriton, connection: asyncpg.Connection, tmp_path: Path
) -> AsyncIterator[Running]:
    await connection.execute("INSERT INTO models (name, version) VALUES ('gone', 1)")
    port, metrics_port = processes.free_port(), processes.free_port()
    environment = os.environ | {
        "LLM_DATABASE_URL": settings.database_host,
        "LLM_DATABASE_ADMIN_USER": settings.database_user,
        "LLM_DATABASE_PASSWORD": settings.database_password.get_secret_value(),
        "LLM_DATABASE_DB": settings.database_name,
        "LLM_PORT": str(port),
        "LLM_FLUSH_SECONDS": "0.02",
        "LLM_TRITON_REFRESH_SECONDS": "0.5",
        "LLM_WEBHOOK_ALLOW_PRIVATE": "true",
        **triton.environment,
    }
    api = ServicePart(
        "API",
        "serve",
        environment,
        tmp_path / "api.log",
        ready_url=f"http://127.0.0.1:{port}/health/live",
        grace=10,
    )
    with_port = environment | {"LLM_METRICS_PORT": str(metrics_port)}
    worker = ServicePart("worker", "worker", with_port, tmp_path / "worker.log", grace=10)
    url = f"http://127.0.0.1:{port}"
    try:
        await asyncio.gather(api.start(), worker.start())
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            targets = [
                Target("llm-api", f"127.0.0.1:{port}"),
                Target("llm-worker", f"127.0.0.1:{metrics_port}"),
                Target("triton", triton.address("metrics")),
            ]
            yield Running(client, targets)
    finally:
        await asyncio.gather(api.stop(), worker.stop())


async def load_of_all_kinds(client: httpx.AsyncClient, webhook_url: str) -> int:
    """Results that complete, fail and are cancelled, a stream, refusals; how many results end."""

    async def send(content: str, **members: object) -> dict[str, Any]:
        body = {"model": "scripted", "content": content} | members
        answer = await client.post("/results/", json=body)
        assert answer.status_code == 202, answer.text
        accepted: dict[str, Any] = answer.json()
        return accepted

    await send(
        "Write it. {{chunks=6 delay_ms=20}}",
        parameters={"max_tokens": 16},
        webhook_url=webhook_url,
    )
    await send("Write it. {{chunks=3 fail_at=1}}")
    endless = await send("Write it. {{chunks=1000 delay_ms=50}}")
    await client.post(f"/results/{endless['id']}/cancel")
    streamed = await client.post(
        "/v1/completions", json={"model": "scripted", "prompt": "Write it.", "stream": True}
    )
    assert "[DONE]" in streamed.text
    assert (await client.get("/results/none")).status_code == 404
    gone = await client.post("/v1/completions", json={"model": "gone", "prompt": "x"})
    assert gone.status_code == 503
    await send("waits", model="gone")
    return 4


def names_without_data(samples: Samples) -> set[str]:
    return {line.split()[0] for line in without_data(samples)}


def without_data(samples: Samples) -> list[str]:
    """The selectors of dashboard and alerts that these samples leave empty, or without an event."""
    empty = []
    for expression in expressions():
        for selector in selectors(promql_parser.parse(expression)):
            found = matching(selector, samples)
            counts_events = selector.name.endswith(("_bucket", "_count"))
            if not found or (counts_events and not sum(found)):
                empty.append(f"{selector.name} in {expression}")
    return empty


@pytest.mark.trial
async def test_what_is_shown_has_data_after_a_load_of_all_kinds(running: Running) -> None:
    async def is_ready() -> bool:
        answer = await running.client.get("/models/scripted")
        return answer.status_code == 200 and bool(answer.json()["ready"])

    await until(is_ready)
    # Failures that have not occurred are reported as 0: a rate sees no growth of what was not there.
    quiet = {"model": "scripted", "content": "Write it. {{chunks=2}}"}
    assert (await running.client.post("/results/", json=quiet)).status_code == 202

    async def has_ended() -> Samples | None:
        samples = await running.scrape()
        return samples if value(samples, "llm_results_total") else None

    assert names_without_data(await until(has_ended)) <= {
        "llm_http_requests_total",  # of 5xx
        "llm_refusals_total",
        "llm_flush_seconds_bucket",
    }
    async with receiving() as receiver:
        ending = await load_of_all_kinds(running.client, receiver.url)

        async def counted() -> Samples | None:
            samples = await running.scrape()
            delivered = value(samples, "llm_webhook_calls_total", outcome="delivered")
            ended = value(samples, "llm_results_total")
            waits = value(samples, "llm_queue_depth", model="gone")
            return samples if delivered and ended > ending and waits else None

        samples = await until(counted)
    assert without_data(samples) == []


def test_each_metric_is_documented_and_each_documented_one_exists() -> None:
    text = (ROOT / "docs" / "observability.md").read_text()
    described = set(re.findall(r"`(llm_\w+)", text))
    exposed = {
        line.split()[2]
        for line in metrics.render().decode().splitlines()
        if line.startswith("# TYPE llm_")
    }
    assert exposed - described == set()
    assert {name for name in described - exposed if not name.startswith("llm_log")} == set()


def test_each_kind_of_error_is_told_from_the_start() -> None:
    assert {kind for _, kind in ERROR_KINDS} == set(metrics.TRITON_ERROR_KINDS)


def test_the_dashboard_can_be_imported() -> None:
    found = dashboard()
    ids = [panel["id"] for panel in found["panels"]]
    assert len(ids) == len(set(ids))
    assert len({panel["title"] for panel in panels()}) == len(panels())
    for panel in panels():
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        assert panel["targets"], panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_an_alert_rule_is_whole(rule: dict[str, Any]) -> None:
    """As https://prometheus.io/docs/prometheus/latest/configuration/alerting_rules/ has it."""
    assert rule.keys() <= {"alert", "expr", "for", "labels", "annotations"}
    assert re.fullmatch(r"LLM[A-Za-z]+", rule["alert"])
    assert _DURATION.fullmatch(rule.get("for", "1m"))
    assert rule["labels"]["severity"] in {"critical", "warning", "info"}
    summary = rule["annotations"]["summary"]
    assert summary.count("{{") == summary.count("}}")
    # A label in a summary must be one that the expression keeps.
    kept = set(re.findall(r"by \(([^)]*)\)", rule["expr"])) or {"instance, job"}
    for name in re.findall(r"\$labels\.(\w+)", summary):
        assert any(name in one for one in kept), name
    document, _, anchor = rule["annotations"]["runbook_url"].partition("#")
    headings = re.findall(r"^#+ (.+)$", (ROOT / document).read_text(), re.MULTILINE)
    assert anchor in {heading.lower() for heading in headings}


def test_the_jobs_that_rules_name_are_those_of_the_example() -> None:
    example = yaml.safe_load((MONITORING / "prometheus.yaml").read_text())
    jobs = {job["job_name"] for job in example["scrape_configs"]}
    assert jobs == {"llm-api", "llm-worker", "triton"}
    assert example["rule_files"] == ["alerts.yaml"]
    names = [rule["alert"] for rule in rules()]
    assert len(names) == len(set(names))
