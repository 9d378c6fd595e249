"""kubernetes/: valid by Kubernetes' own schemas, closed, without root, pinned, in step with Settings."""

import json
import re
from collections.abc import Iterator
from typing import Any

import kubernetes_validate
import pytest
import yaml

from app import __version__
from app.core.settings import Settings
from app.inference.triton_access import KEY, RESTRICTED, restriction
from app.ui.settings import UiSettings
from tests.conftest import ROOT

FILES = sorted((ROOT / "kubernetes").glob("*.yaml"))
OBJECTS: list[dict[str, Any]] = [
    document for path in FILES for document in yaml.safe_load_all(path.read_text())
]
# Members of a Secret that docs/kubernetes.md makes.
SECRETS = {
    "LLM_DATABASE_URL",
    "LLM_DATABASE_ADMIN_USER",
    "LLM_DATABASE_PASSWORD",
    "LLM_DATABASE_DB",
    "JWT_SECRET",
    "LLM_TRITON_SECRET",
}
UI_SECRETS = {"LLM_UI_SECRET"}


def name_of(value: dict[str, Any]) -> str:
    return f"{value['kind']} {value['metadata']['name']}"


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    for value in OBJECTS:
        if "template" in value.get("spec", {}):
            yield name_of(value), value["spec"]["template"]
        elif value["kind"] == "Pod":
            yield name_of(value), value


@pytest.mark.parametrize("value", OBJECTS, ids=name_of)
@pytest.mark.parametrize("version", ["1.30", "1.37"])
def test_objects_are_valid(value: dict[str, Any], version: str) -> None:
    kubernetes_validate.validate(value, version, strict=True)


def test_the_checker_finds_faults() -> None:
    wrong = {**OBJECTS[0], "dta": {}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, "1.37", strict=True)


@pytest.mark.parametrize(("name", "pod"), list(pods()), ids=[name for name, _ in pods()])
def test_pods_are_closed(name: str, pod: dict[str, Any]) -> None:
    spec = pod["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in spec["containers"]:
        security = container["securityContext"]
        assert security["allowPrivilegeEscalation"] is False
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert security.get("readOnlyRootFilesystem") is True or name == "Deployment triton"
        assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
        assert "memory" in container["resources"]["limits"]


def test_images_are_pinned_and_the_same_as_in_compose() -> None:
    images = {container["image"] for _, pod in pods() for container in pod["spec"]["containers"]}
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    (loader,) = re.findall(r"(?m)^FROM (\S+)$", (ROOT / "Dockerfile").read_text())
    assert images == {f"llm-api-service:{__version__}", compose["triton-gpu"]["image"], loader}


def test_settings_are_known_and_secrets_in_the_secret() -> None:
    known = {field.alias for field in Settings.model_fields.values()}
    (config,) = [value for value in OBJECTS if value["kind"] == "ConfigMap"]
    assert config["data"].keys() <= known
    assert known >= SECRETS
    assert not SECRETS & config["data"].keys()
    Settings.model_validate(dict.fromkeys(SECRETS, "x" * 64) | config["data"])
    assert not [value for value in OBJECTS if value["kind"] == "Secret"]
    text = (ROOT / "docs" / "kubernetes.md").read_text()
    assert set(re.findall(r"--from-literal=(\w+)=", text)) == SECRETS | UI_SECRETS


def test_the_pages_pod_is_given_the_api_alone() -> None:
    known = {field.alias for field in UiSettings.model_fields.values()}
    (pod,) = [pod for name, pod in pods() if name == "Deployment llm-ui"]
    (container,) = pod["spec"]["containers"]
    given = {one["name"]: one["value"] for one in container["env"]}
    assert given.keys() | UI_SECRETS <= known
    page = UiSettings.model_validate(given)
    services = {one["metadata"]["name"]: one["spec"] for one in OBJECTS if one["kind"] == "Service"}
    assert page.api_url.host
    assert services[page.api_url.host]["ports"][0]["port"] == page.api_url.port
    assert [one["secretRef"]["name"] for one in container["envFrom"]] == ["llm-ui"]
    # The probe calls it by a name that it takes.
    (header,) = container["readinessProbe"]["httpGet"]["httpHeaders"]
    assert header["value"] in page.allowed_hosts


def test_selectors_ports_and_volumes_meet() -> None:
    labels = {name: pod["metadata"].get("labels", {}) for name, pod in pods()}
    ports = {
        name: {
            port["name"]
            for container in pod["spec"]["containers"]
            for port in container.get("ports", [])
        }
        for name, pod in pods()
    }
    claims = {
        value["metadata"]["name"] for value in OBJECTS if value["kind"] == "PersistentVolumeClaim"
    }
    for value in OBJECTS:
        spec = value.get("spec", {})
        if value["kind"] == "Service":
            (chosen,) = [
                one for one, has in labels.items() if spec["selector"].items() <= has.items()
            ]
            assert {port["targetPort"] for port in spec["ports"]} <= ports[chosen]
        if value["kind"] == "Deployment":
            assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
    for name, pod in pods():
        volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes", [])}
        for container in pod["spec"]["containers"]:
            assert {
                mount["name"] for mount in container.get("volumeMounts", [])
            } == volumes.keys(), name
        for volume in volumes.values():
            if "persistentVolumeClaim" in volume:
                assert volume["persistentVolumeClaim"]["claimName"] in claims


def test_prometheus_alone_reaches_the_metrics_of_api_and_workers() -> None:
    (config,) = [value for value in OBJECTS if value["kind"] == "ConfigMap"]
    settings = Settings.model_validate(dict.fromkeys(SECRETS, "x" * 64) | config["data"])
    assert settings.metrics_host == "0.0.0.0"  # noqa: S104
    services = {one["metadata"]["name"]: one["spec"] for one in OBJECTS if one["kind"] == "Service"}
    policies = {
        one["metadata"]["name"]: one["spec"] for one in OBJECTS if one["kind"] == "NetworkPolicy"
    }
    for part in ("api", "worker", "attribution"):
        (pod,) = [pod for name, pod in pods() if name == f"Deployment llm-{part}"]
        (container,) = pod["spec"]["containers"]
        assert {"name": "metrics", "containerPort": settings.metrics_port} in container["ports"]
        headless = services[f"llm-{part}-metrics"]
        assert (headless["clusterIP"], headless["selector"]) == (
            "None",
            {"app": "llm", "part": part},
        )
        assert [port["port"] for port in headless["ports"]] == [settings.metrics_port]
    policy = policies["llm-metrics"]
    (parts,) = policy["podSelector"]["matchExpressions"]
    assert set(parts["values"]) == {"api", "worker", "attribution"}
    rules = {rule["ports"][0]["port"]: rule.get("from") for rule in policy["ingress"]}
    assert rules.keys() == {"http", "metrics"}
    assert rules["http"] is None
    (allowed,) = rules["metrics"]
    assert allowed["podSelector"] == {"matchLabels": {"app.kubernetes.io/name": "prometheus"}}
    text = (ROOT / "docs" / "kubernetes.md").read_text()
    assert all(f"{one}-metrics.llm" in text for one in ("llm-api", "llm-worker"))
    assert f"port: {settings.metrics_port}" in text


def test_indexes_are_mounted_read_only_in_worker_and_api() -> None:
    (pod,) = [pod for name, pod in pods() if name == "Deployment llm-attribution"]
    text = (ROOT / "docs" / "kubernetes.md").read_text()
    (patch,) = re.findall(r"patch deployment llm-api -p '(.*)'", text)
    for spec in (pod["spec"], json.loads(patch)["spec"]["template"]["spec"]):
        (container,) = spec["containers"]
        (mount,) = [one for one in container["volumeMounts"] if one["name"] == "indexes"]
        assert mount["readOnly"] is True
        (variable,) = container["env"]
        assert variable["name"] == "LLM_INDEXES_FILE"
        assert variable["value"].startswith(f"{mount['mountPath']}/")
        (volume,) = [one for one in spec["volumes"] if one["name"] == "indexes"]
        assert volume["persistentVolumeClaim"] == {"claimName": "llm-indexes", "readOnly": True}


def test_the_probes_of_the_api_do_not_depend_on_the_engines() -> None:
    """`/health`, `/ping` and `/` do, with LLM_HEALTH=engine."""
    (pod,) = [pod for name, pod in pods() if name == "Deployment llm-api"]
    (container,) = pod["spec"]["containers"]
    paths = {name: probe["httpGet"]["path"] for name, probe in container.items() if "Probe" in name}
    assert paths == {"livenessProbe": "/health/live", "readinessProbe": "/health/ready"}


def test_triton_is_alive_while_it_generates() -> None:
    (pod,) = [pod for name, pod in pods() if name == "Deployment triton"]
    (container,) = pod["spec"]["containers"]
    for probe in ("startupProbe", "livenessProbe"):
        assert container[probe]["exec"]["command"] == ["python3", "/opt/llm/health", "check"]
        # A frozen server costs `check` its time limit of 10 s, and a hanging model another one.
        assert container[probe]["timeoutSeconds"] >= 30
    (mount,) = [one for one in container["volumeMounts"] if one["name"] == "health"]
    assert mount == {"name": "health", "mountPath": "/opt/llm/health", "readOnly": True}
    (volume,) = [one for one in pod["spec"]["volumes"] if one["name"] == "health"]
    made = re.findall(
        r"(?m)^kubectl create configmap (\S+) --from-file=(\S+)$",
        (ROOT / "docs" / "kubernetes.md").read_text(),
    )
    assert made == [(volume["configMap"]["name"], "triton/health")]


def test_triton_is_open_to_api_and_workers_with_its_secret_alone() -> None:
    (pod,) = [pod for name, pod in pods() if name == "Deployment triton"]
    (container,) = pod["spec"]["containers"]
    (given,) = [one for one in container["env"] if one["name"] == "LLM_TRITON_SECRET"]
    assert given["valueFrom"]["secretKeyRef"] == {"name": "llm", "key": "LLM_TRITON_SECRET"}
    value = f"{RESTRICTED}:{KEY}=$(LLM_TRITON_SECRET)"
    assert f"--http-restricted-api={value}" in container["args"]
    assert restriction("$(LLM_TRITON_SECRET)") in container["args"]
    assert "--http-address=127.0.0.1" in container["args"]
    assert container["readinessProbe"]["grpc"] == {"port": 8001}
    (policy,) = [
        one["spec"]
        for one in OBJECTS
        if (one["kind"], one["metadata"]["name"]) == ("NetworkPolicy", "triton")
    ]
    (rule,) = policy["ingress"]
    assert rule["ports"] == [{"port": "grpc"}]
    (source,) = rule["from"]
    (parts,) = source["podSelector"]["matchExpressions"]
    assert (parts["operator"], set(parts["values"])) == ("In", {"api", "worker"})
