"""kubernetes/autoscaling.yaml and kubernetes/keda/: they scale what exists, by metrics that exist."""

import re
from typing import Any

import pytest
import yaml

from app.core import metrics
from app.core.settings import Settings
from tests.conftest import ROOT

DIRECTORY = ROOT / "kubernetes"
DEPLOYMENTS = {
    one["metadata"]["name"]: one
    for one in yaml.safe_load_all((DIRECTORY / "service.yaml").read_text())
    if one["kind"] == "Deployment"
}
HPA = list(yaml.safe_load_all((DIRECTORY / "autoscaling.yaml").read_text()))
KEDA = list(yaml.safe_load_all((DIRECTORY / "keda" / "autoscaling.yaml").read_text()))
PARTS = ("llm-api", "llm-worker")


def name_of(value: dict[str, Any]) -> str:
    return f"{value['kind']} {value['metadata']['name']}"


def triggers(value: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [one for one in value["spec"]["triggers"] if one["type"] == kind]


@pytest.mark.parametrize("value", [*HPA, *KEDA], ids=name_of)
def test_each_scales_a_deployment_of_the_service_and_keeps_its_replicas(
    value: dict[str, Any],
) -> None:
    spec = value["spec"]
    target = spec["scaleTargetRef"]["name"]
    assert target == value["metadata"]["name"]
    least = spec.get("minReplicas", spec.get("minReplicaCount"))
    assert least == DEPLOYMENTS[target]["spec"]["replicas"]


@pytest.mark.parametrize("values", [HPA, KEDA], ids=["autoscaling.yaml", "keda/autoscaling.yaml"])
def test_each_file_scales_api_and_worker_once(values: list[dict[str, Any]]) -> None:
    assert [value["metadata"]["name"] for value in values] == list(PARTS)


def test_keda_leaves_pods_as_slowly_as_the_autoscaler_alone() -> None:
    for plain, keda in zip(HPA, KEDA, strict=True):
        config = keda["spec"]["advanced"]["horizontalPodAutoscalerConfig"]
        assert config["behavior"] == plain["spec"]["behavior"]
        (cpu,) = triggers(keda, "cpu")
        (metric,) = plain["spec"]["metrics"]
        assert cpu["metadata"]["value"] == metric["resource"]["target"]["averageValue"]


@pytest.mark.parametrize("value", KEDA, ids=name_of)
def test_queries_name_metrics_of_the_service_and_jobs_of_its_prometheus(
    value: dict[str, Any],
) -> None:
    text = (ROOT / "monitoring" / "prometheus.yaml").read_text()
    jobs = {one["job_name"] for one in yaml.safe_load(text)["scrape_configs"]}
    exported = metrics.render().decode()
    for one in triggers(value, "prometheus"):
        query = one["metadata"]["query"]
        (name, job) = re.fullmatch(r'sum\((\w+)\{job="([\w-]+)"\}\)', query).groups()  # type: ignore[union-attr]
        assert f"# TYPE {name} gauge" in exported
        assert job in jobs
        assert job == value["metadata"]["name"]


def test_thresholds_are_three_quarters_of_the_settings() -> None:
    streams = Settings.model_fields["max_streams"].default
    slots = Settings.model_fields["worker_slots"].default
    for value, most in zip(KEDA, (streams, slots), strict=True):
        (one,) = triggers(value, "prometheus")
        assert int(one["metadata"]["threshold"]) == most * 3 // 4
