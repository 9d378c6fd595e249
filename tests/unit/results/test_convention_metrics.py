"""Metrics of ended results, held to OpenTelemetry's conventions."""

from collections import defaultdict
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from app.core import gen_ai, metrics
from app.results.stats.totals import observe
from tests.conventions import METRIC, METRICS, OPERATIONS, prometheus_name
from tests.unit.results.test_ended_totals import ended

NAMES = {prometheus_name(name, unit): name for name, (unit, _, _) in METRICS.items()}


def exposed(model: str) -> dict[str, list[Sample]]:
    """A model's samples of these metrics, as Prometheus reads them, by the metrics' names."""
    found: dict[str, list[Sample]] = defaultdict(list)
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            if sample.labels.get("gen_ai_request_model") == model:
                assert family.type == "histogram"
                found[family.name].append(sample)
    return found


def sums(model: str, name: str, label: str) -> dict[tuple[str, str], float]:
    """The sums of a metric by operation and another label."""
    return {
        (sample.labels["gen_ai_operation_name"], sample.labels.get(label, "")): sample.value
        for sample in exposed(model)[name]
        if sample.name.endswith("_sum")
    }


def test_each_metric_is_one_of_the_conventions() -> None:
    model = "conventional"
    observe(ended(model, is_chat=True))
    observe(ended(model, ended_as="model_error"))
    found = exposed(model)
    assert found.keys() == NAMES.keys()
    for shown, samples in found.items():
        _, own, boundaries = METRICS[NAMES[shown]]
        needed = {key for key, (_, level) in METRIC.items() if level == "required"} | {*own}
        for sample in samples:
            labels = {key.replace(".", "_") for key in needed}
            assert sample.labels.keys() - {"le"} == labels, shown
            assert sample.labels["gen_ai_operation_name"] in OPERATIONS
            assert sample.labels["gen_ai_provider_name"] == gen_ai.PROVIDER
        bounds = {float(one.labels["le"]) for one in samples if "le" in one.labels}
        assert bounds == {*boundaries, float("inf")}, shown


def test_a_completed_result_is_observed_in_each() -> None:
    """The times are those of `llm_*`, whose metrics have other buckets."""
    model = "measured"
    observe(ended(model, is_chat=True))
    assert sums(model, "gen_ai_server_request_duration_seconds", "error_type") == {
        ("chat", ""): pytest.approx(7)
    }
    for name, seconds in (("to_first_token", 3), ("per_output_token", 2)):
        assert sums(model, f"gen_ai_server_time_{name}_seconds", "") == {
            ("chat", ""): pytest.approx(seconds)
        }
    assert sums(model, "gen_ai_client_token_usage", "gen_ai_token_type") == {
        ("chat", "input"): 5,
        ("chat", "output"): 3,
    }


@pytest.mark.parametrize(
    ("members", "operation"),
    [
        ({"kind": "generation", "is_chat": True}, "chat"),
        ({"kind": "generation"}, "text_completion"),
        ({"kind": "embedding"}, "embeddings"),
        ({"kind": "score", "is_chat": True}, "score"),
        ({"kind": "attribution"}, None),
    ],
)
def test_the_operation_is_that_of_the_kind(members: dict[str, Any], operation: str | None) -> None:
    model = f"kind {members}"
    observe(ended(model, **members))
    found = sums(model, "gen_ai_server_request_duration_seconds", "error_type")
    assert found.keys() == ({(operation, "")} if operation else set())


def test_a_failed_result_has_its_error_and_no_times_of_tokens() -> None:
    model = "failing"
    observe(ended(model, ended_as="cancelled"))
    duration = "gen_ai_server_request_duration_seconds"
    assert sums(model, duration, "error_type").keys() == {("text_completion", "cancelled")}
    assert exposed(model).keys() == {duration, "gen_ai_client_token_usage"}


def test_the_models_are_those_of_the_other_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flood of names is no flood of series, and the same names are kept in both."""
    monkeypatch.setattr(metrics, "_registry", CollectorRegistry())
    monkeypatch.setattr(metrics, "_names", {"model": set(), "team": set()})
    ours = metrics._counter("x_total", "x", "model")
    theirs = gen_ai._histogram("y_seconds", "y", (1,))
    for number in range(300):
        theirs.of("chat", gen_ai.PROVIDER, f"flood {number}")
        ours.of(f"flood {number}")
    kept = {name for (name,) in ours._series}
    assert {name for _, _, name in theirs._series} == kept
    assert len(kept) == metrics._MAX_NAMES["model"] + 1
    assert metrics.OTHER in kept
