"""Plans over HTTP: the figures are `app.provisioning.sizing`'s, and only a launch's own files are read."""

import json
from pathlib import Path
from typing import Any

import orjson
import pytest

from app.api.admin.plan_schemas import EXAMPLE, PlanRead
from app.api.json_codec import parse
from app.core.errors import InvalidRequestError
from app.provisioning.catalogue import CatalogueEntry
from app.provisioning.model_plan import PlanCreate, plan_model
from app.provisioning.profiles import Profile
from app.provisioning.sizing.architecture import read_facts
from app.provisioning.sizing.fit import Engine, plan
from app.provisioning.sizing.gpus import GPUS
from tests.plan_configs import KNOWN
from tests.unit.provisioning.test_launch_requests import PROFILE, profiles_of

LLAMA = KNOWN["meta-llama/Llama-3.1-70B"].config


def planned(
    profiles: dict[str, Profile] | None = None,
    catalogue: dict[str, CatalogueEntry] | None = None,
    **members: Any,
) -> dict[str, Any]:
    document = plan_model(
        parse(PlanCreate, json.dumps(members).encode()), profiles or {}, catalogue or {}
    )
    PlanRead.model_validate_json(orjson.dumps(document))
    return document


def refusal(profiles: dict[str, Profile] | None = None, **members: Any) -> tuple[str, str]:
    with pytest.raises(InvalidRequestError) as refused:
        planned(profiles, **members)
    (error,) = refused.value.errors
    return error.field, error.message


@pytest.fixture
def here(tmp_path: Path) -> dict[str, Profile]:
    """A profile of this machine, with a model below its root, and one in its cache."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "config.json").write_text(json.dumps(LLAMA))
    roots, commit = tmp_path / "models", "0123456789" * 4
    repository = tmp_path / "cache" / "hub" / "models--org--model"
    for folder in (roots / "llama", repository / "snapshots" / commit, roots / "linked"):
        folder.mkdir(parents=True)
    (roots / "llama" / "config.json").write_text(json.dumps(LLAMA))
    (repository / "snapshots" / commit / "config.json").write_text(json.dumps(LLAMA))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    (repository / "refs" / "evil").write_text("../../../../outside")
    (roots / "out").symlink_to(tmp_path / "outside")
    (roots / "linked" / "config.json").symlink_to(tmp_path / "outside" / "config.json")
    (roots / "named" / "1").mkdir(parents=True)
    (roots / "named" / "1" / "model.json").write_text(
        json.dumps({"model": str(tmp_path / "outside")})
    )
    text = PROFILE.replace("/scratch/models", str(roots)).replace('host = "', '# host = "')
    return profiles_of(tmp_path, text.replace("/scratch/hub", str(tmp_path / "cache")))


def test_the_figures_are_the_calculators() -> None:
    answer = planned(config=LLAMA, gpus=["a100-80", "h200"], context=8192, concurrency=4)
    facts = read_facts(LLAMA)
    expected = plan(facts, [GPUS["a100-80"], GPUS["h200-141"]], 8192, 4, Engine())
    assert answer["model"]["parameters"] == facts.parameters
    assert [
        (one["gpu"], one["gpus"], one["weights_bytes"], one["verdict"], one["resources"])
        for one in answer["plans"]
    ] == [(one.gpu.name, one.gpus, one.weights, one.verdict, one.resources) for one in expected]
    assert len(planned(config=LLAMA)["plans"]) == len(GPUS)
    assert planned(**EXAMPLE)["plans"][1]["fits"]


def test_a_models_own_files(here: dict[str, Profile]) -> None:
    root = here["della"].model_roots[0]
    by_path = planned(here, model=f"{root}/llama", profile="della")
    assert by_path["model"]["parameters"] == read_facts(LLAMA).parameters
    assert planned(here, model="org/model", profile="della") == by_path
    assert planned(here, model="org/model", profile="della", revision="0123456789" * 4) == by_path
    offered = CatalogueEntry(name="org/other", profile="della", path=f"{root}/llama")
    assert planned(here, {"org/other": offered}, model="org/other") == by_path


@pytest.mark.parametrize("name", ["out", "linked", "named", "absent"])
def test_no_link_leads_out_of_the_roots(here: dict[str, Profile], name: str) -> None:
    field, message = refusal(here, model=f"{here['della'].model_roots[0]}/{name}", profile="della")
    assert field == "model"
    assert "no config.json in the model roots" in message


def test_nothing_else_is_read(here: dict[str, Profile], tmp_path: Path) -> None:
    for members, words in (
        ({"model": f"{tmp_path}/outside"}, "must lie below a model root"),
        ({"model": "org/model", "revision": "evil"}, "no config.json in the cache"),
        ({"model": "org/absent"}, "send the document of its config.json as `config`"),
    ):
        field, message = refusal(here, profile="della", **members)
        assert field == "model"
        assert words in message, message
    far = profiles_of(tmp_path, PROFILE)
    assert "another machine" in refusal(far, model="org/model", profile="della")[1]
    assert refusal({}, model="org/model")[0] == "provider"


def test_a_broken_file_is_reported_without_its_place(
    here: dict[str, Profile], tmp_path: Path
) -> None:
    (file,) = (tmp_path / "cache").rglob("config.json")
    file.write_text("{}")
    field, message = refusal(here, model="org/model", profile="della")
    assert field == "model"
    assert message.startswith("config.json: ")
    assert str(tmp_path) not in message


@pytest.mark.parametrize(
    ("members", "field"),
    [
        ({}, "body"),
        ({"config": LLAMA, "model": "org/model"}, "body"),
        ({"config": []}, "config"),
        ({"config": {}}, "config"),
        ({"config": LLAMA | {"hidden_size": 10**30}}, "config"),
        ({"config": LLAMA, "gpus": ["abacus"]}, "gpus"),
        ({"config": LLAMA, "gpus": ["a100"] * 33}, "gpus"),
        ({"config": LLAMA, "context": 10**9}, "context"),
        ({"config": LLAMA, "context": 0}, "context"),
        ({"config": LLAMA, "concurrency": "4"}, "concurrency"),
        ({"config": LLAMA, "quantization": "zip"}, "quantization"),
        ({"config": LLAMA, "dtype": "int3"}, "dtype"),
        ({"config": LLAMA, "max_gpus": 0}, "max_gpus"),
        ({"config": LLAMA, "host": "x"}, "host"),
        ({"model": "../../etc"}, "model"),
    ],
)
def test_what_is_wrong_is_named(members: dict[str, Any], field: str) -> None:
    assert refusal(**members)[0] == field


def test_several_nodes_up_to_those_that_are_asked_for() -> None:
    def taken(**members: Any) -> tuple[int, bool]:
        (one,) = planned(config=LLAMA, gpus=["a100-40"], max_gpus=2, **members)["plans"]
        return one["nodes"], one["fits"]

    assert [taken(), taken(max_nodes=2), taken(max_nodes=4)] == [(1, False), (2, False), (3, True)]
    for wrong in (0, 65):
        with pytest.raises(InvalidRequestError) as refused:
            planned(config=LLAMA, max_nodes=wrong)
        assert [error.field for error in refused.value.errors] == ["max_nodes"]
