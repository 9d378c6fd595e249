"""The dashboard and the alert rules: they parse, they name metrics that are there, and these have data."""

import json
import re
from collections.abc import Iterator
from typing import Any

import asyncpg
import promql_parser
import pytest
import yaml
from promql_parser import MatchOp

from app import telemetry
from app.embedded.triton import EmbeddedTriton
from tests.conftest import ROOT, make_settings, run_service
from tests.integration.support import finish, send, until
from tests.integration.test_metrics import Samples, scrape, value
from tests.integration.webhook_receiver import receiving
from tests.postgres import PostgresServer

MONITORING = ROOT / "monitoring"
PROMETHEUS_OWN = {"up"}
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
    matchers = [one for one in selector.matchers.matchers if one.name not in ("job", "instance")]
    return [
        number
        for (name, labels), number in samples.items()
        if name == selector.name and all(is_met(one, dict(labels)) for one in matchers)
    ]


def test_every_expression_is_promql() -> None:
    assert len(expressions()) > 50
    for expression in expressions():
        assert list(selectors(promql_parser.parse(expression))), expression


async def test_what_is_shown_has_data_after_a_load_of_all_kinds(
    postgres_server: PostgresServer,
    database_name: str,
    triton: EmbeddedTriton,
    connection: asyncpg.Connection,
) -> None:
    await connection.execute("INSERT INTO models (name, version) VALUES ('gone', 1)")
    settings = make_settings(
        postgres_server, database_name, triton, webhook_allow_private=True, flush_seconds=0.02
    )
    async with receiving() as receiver, run_service(settings, with_worker=True) as service:
        before = await scrape(service)
        await finish(
            service,
            "Say it. {{chunks=6 delay_ms=20}}",
            parameters={"max_tokens": 16},
            webhook_url=receiver.url,
        )
        await finish(service, "Say it. {{chunks=3 fail_at=1}}")
        endless = await send(service, "Say it. {{chunks=1000 delay_ms=50}}")
        await service.client.post(f"/results/{endless['id']}/cancel")
        await service.client.get("/results/none")
        await service.client.post("/v1/completions", json={"model": "gone", "prompt": "x"})
        await send(service, "waits", model="gone")

        async def counted() -> Samples | None:
            samples = await scrape(service)
            delivered = value(samples, "llm_webhook_calls_total", outcome="delivered")
            ended = value(samples, "llm_results_total") - value(before, "llm_results_total")
            waits = value(samples, "llm_queue_depth", model="gone")
            return samples if delivered and ended >= 3 and waits else None

        samples = await until(counted)
    for expression in expressions():
        for selector in selectors(promql_parser.parse(expression)):
            if selector.name in PROMETHEUS_OWN:
                continue
            found = matching(selector, samples)
            assert found, f"{selector.name} in {expression}"
            if selector.name.endswith(("_bucket", "_count")):
                assert sum(found) > 0, expression


def test_each_metric_is_documented_and_each_documented_one_exists() -> None:
    text = (ROOT / "docs" / "observability.md").read_text()
    described = set(re.findall(r"`(llm_\w+)", text))
    exposed = {
        line.split()[2]
        for line in telemetry.render().decode().splitlines()
        if line.startswith("# TYPE llm_")
    }
    assert exposed - described == set()
    assert {name for name in described - exposed if not name.startswith("llm_log")} == set()


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
    # What a summary names must be a label that the expression keeps.
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
