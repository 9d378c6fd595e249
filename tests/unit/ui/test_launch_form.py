"""The form of a launch: it has every option, and makes the request that was meant."""

from typing import Any

import orjson
import pytest

from app.api.json_codec import parse
from app.provisioning.model_plan import PlanCreate
from app.provisioning.spec import EngineOptions, LaunchCreate, LaunchSpec, ResourceRequest
from app.ui import launch_form
from app.ui.errors import EntryError
from app.ui.launch_form import (
    FIELDS,
    NAMES,
    from_spec,
    nodes_of,
    takes,
    to_launch,
    to_plan,
    with_plan_row,
)

MODEL = {"disk_bytes": 40_000_000_000}
ROW = {
    "context": 8192,
    "nodes": 1,
    "resources": {"gpus": 2, "gres": "gpu:2", "cpu_cores": 8, "memory_gb": 64, "minutes": 70},
}


def empty() -> dict[str, str]:
    return dict.fromkeys(NAMES, "")


def profile(*limits: float | None, max_minutes: int = 600) -> dict[str, Any]:
    tiers = [{"name": str(limit), "max_model_size_gb": limit} for limit in limits]
    return {"tiers": tiers, "max_minutes": max_minutes}


def test_every_option_of_a_launch_has_its_field_and_its_explanation() -> None:
    options = set(LaunchCreate.model_fields) - {"resources", "engine"}
    options |= {f"resources.{name}" for name in ResourceRequest.model_fields}
    options |= {f"engine.{name}" for name in EngineOptions.model_fields}
    assert {field.name for field in FIELDS} == options
    assert all(field.help.endswith(".") for field in FIELDS)


def test_what_stands_in_the_fields_is_asked_for_and_nothing_else() -> None:
    assert to_launch(empty()) == {}
    request = to_launch(
        empty()
        | {
            "name": " one ", "model": "org/model", "modules": "a/1, b", "time_limit_minutes": "60",
            "idle_minutes": "0.5", "resources.gpus": "2", "engine.gpu_memory_utilization": "1",
            "engine.enforce_eager": "on", "priority": "-5",
        }
    )  # fmt: skip
    assert request == {
        "name": "one", "model": "org/model", "modules": ["a/1", "b"], "time_limit_minutes": 60,
        "idle_minutes": 0.5, "resources": {"gpus": 2}, "priority": -5,
        "engine": {"gpu_memory_utilization": 1, "enforce_eager": True},
    }  # fmt: skip
    request["modules"] = ["a", "b"]
    parse(LaunchCreate, orjson.dumps(request))


@pytest.mark.parametrize("text", ["many", "1e3", "²", "0x10", "1.5"])
def test_what_is_no_number_goes_to_the_api_as_it_is(text: str) -> None:
    assert to_launch(empty() | {"resources.gpus": text})["resources"]["gpus"] == text


def test_a_plan_asks_for_the_model_or_for_what_was_pasted() -> None:
    values = empty() | {
        "model": "org/model", "profile": "here", "engine.max_model_len": "4096",
        "engine.quantization": "fp8", "concurrency": "8", "gpu_kinds": "a100, l4",
        "max_nodes": "4", "time_limit_minutes": "30",
    }  # fmt: skip
    asked = {"context": 4096, "quantization": "fp8", "concurrency": 8, "gpus": ["a100", "l4"], "max_nodes": 4, "minutes": 30}  # fmt: skip
    assert to_plan(values) == asked | {"model": "org/model", "profile": "here"}
    assert to_plan(values | {"config": '{"a": 1}'}) == asked | {"config": {"a": 1}}
    parse(PlanCreate, orjson.dumps(to_plan(values)))


@pytest.mark.parametrize("text", ["{", "[]", "1", "null", "[" * 100_000])
def test_what_is_no_config_is_reported(text: str) -> None:
    with pytest.raises(EntryError, match=r"whole config\.json"):
        to_plan(empty() | {"config": text})


def test_a_row_of_the_plan_fills_the_form() -> None:
    filled = with_plan_row(ROW, MODEL, empty() | {"name": "kept"}, profile(32, 80, 100))
    assert {name: value for name, value in filled.items() if value} == {
        "name": "kept", "tier": "80", "resources.gpus": "2", "resources.cpus": "8",
        "resources.memory_gb": "64", "engine.max_model_len": "8192", "time_limit_minutes": "70",
    }  # fmt: skip
    kept = with_plan_row(
        ROW, MODEL, empty() | {"time_limit_minutes": "9", "tier": "x"}, profile(80)
    )
    assert (kept["time_limit_minutes"], kept["tier"]) == ("9", "x")
    assert with_plan_row(ROW, MODEL, empty(), profile(32, max_minutes=20))["tier"] == ""
    assert (
        with_plan_row(ROW, MODEL, empty(), profile(32, max_minutes=20))["time_limit_minutes"]
        == "20"
    )
    assert with_plan_row(ROW, MODEL, empty(), profile(None, 50))["tier"] == "50"
    assert with_plan_row(ROW, MODEL, empty(), profile(32, None))["tier"] == "None"
    assert with_plan_row(ROW, MODEL, empty(), None)["time_limit_minutes"] == "70"
    assert takes({"max_model_size_gb": 40}, MODEL)
    assert not takes({"max_model_size_gb": 39.9}, MODEL)


def test_a_row_of_several_nodes_fills_the_form() -> None:
    row = ROW | {"nodes": 3}
    filled = with_plan_row(row, MODEL, empty(), profile(10, 14, 80))
    assert (filled["resources.nodes"], filled["resources.gpus"]) == ("3", "2")
    assert filled["tier"] == "14"  # each node has a third of 40 GB
    assert nodes_of(filled) == 3
    one = with_plan_row(ROW, MODEL, filled | {"tier": ""}, profile(14, 80))
    assert (one["resources.nodes"], one["tier"]) == ("", "80")
    assert [nodes_of({"resources.nodes": text}) for text in ("", "x", "0", " 2 ")] == [1, 1, 1, 2]


def test_a_launch_can_be_asked_for_again() -> None:
    spec = LaunchSpec(
        name="one", model="org/model", revision=None, profile="here", served_name="model", tier="small",
        gpus=1, cpus=4, memory_gb=16, gres="gpu:1", partition=None, account=None, constraint=None,
        modules=["a/1", "b"], time_limit_minutes=60, idle_minutes=0.5, start_minutes=30, priority=0,
        engine=EngineOptions(max_model_len=100, enforce_eager=True), adapters={"sheep": "/a/sheep", "goat": "org/goat"}, trust_remote_code=False,
    ).model_dump()  # fmt: skip
    again = to_launch(empty() | from_spec(spec))
    engine = {name: value for name, value in spec["engine"].items() if value is not None}
    resources = {name: spec[name] for name in ResourceRequest.model_fields}
    expected = {name: value for name, value in spec.items() if value and name not in resources}
    assert again == expected | {"engine": engine, "resources": resources}


def test_names_of_the_form_are_those_of_its_fields() -> None:
    assert len(set(launch_form.NAMES)) == len(launch_form.NAMES)
