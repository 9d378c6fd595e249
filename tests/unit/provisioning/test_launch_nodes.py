"""Launches over several nodes: their resources, the engine's arguments, and the job's script."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from app.api.admin.launches_schemas import profile_to_wire
from app.core.errors import InvalidRequestError
from app.inference.engine_options import check_engine_options
from app.provisioning.catalogue import CatalogueEntry
from app.provisioning.job_script import ModelPlace, engine_settings, render_script
from app.provisioning.profiles import Profile
from app.provisioning.spec import LaunchSpec
from tests.unit.provisioning.test_launch_requests import (
    LAUNCH,
    PROFILE,
    profiles,
    profiles_of,
    spec_of,
)

__all__ = ["profiles"]

CLUSTERS = """
[profiles.plain]
provider = "slurm"
home = "/scratch/llm"
runtime = "plain"
tiers = [{name = "one", gpus = 2}]
[profiles.embedded]
provider = "slurm"
home = "/scratch/llm"
runtime = "embedded"
venv = "/opt/venv"
triton = "/opt/triton"
tiers = [{name = "one", gpus = 2}]
"""


def test_stages_are_nodes_and_tensors_are_divided_inside_a_node(
    profiles: dict[str, Profile],
) -> None:
    for nodes, gpus, given, tensor, stages in (
        (2, 4, None, 4, 2), (3, 1, None, None, 3), (2, 4, 1, 8, 1), (2, 4, 8, None, 8),
        (2, 4, 4, 2, 4),
    ):  # fmt: skip
        engine = {"pipeline_parallel_size": given}
        spec = spec_of(profiles, resources={"nodes": nodes, "gpus": gpus}, engine=engine)
        settings = engine_settings(spec, ModelPlace())
        assert settings.get("tensor_parallel_size") == tensor
        assert settings["pipeline_parallel_size"] == stages
        assert settings["distributed_executor_backend"] == "ray"
    one = engine_settings(spec_of(profiles, resources={"nodes": 1, "gpus": 4}), ModelPlace())
    assert one == {"model": "org/model", "tensor_parallel_size": 4}


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({"profile": "laptop", "resources": {"nodes": 2, "gpus": 1}}, "resources.nodes"),
        ({"resources": {"nodes": 2, "gpus": 0}}, "resources.nodes"),
        ({"resources": {"nodes": 0}}, "resources.nodes"),
        ({"resources": {"nodes": 65}}, "resources.nodes"),
        ({"resources": {"nodes": "2"}}, "resources.nodes"),
        (
            {"resources": {"nodes": 2, "gpus": 2}, "engine": {"pipeline_parallel_size": 3}},
            "engine.pipeline_parallel_size",
        ),
        (
            {"resources": {"nodes": 2}, "engine": {"distributed_executor_backend": "mp"}},
            "engine.distributed_executor_backend",
        ),
        (
            {"engine": {"distributed_executor_backend": "ray"}},
            "engine.distributed_executor_backend",
        ),
        ({"engine": {"nnodes": 2}}, "engine.nnodes"),
    ],
)
def test_requests_that_are_refused(
    profiles: dict[str, Profile], members: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        spec_of(profiles, **members)
    assert [error.field for error in refused.value.errors] == [words]


def test_the_reason_names_the_profile_or_the_member(profiles: dict[str, Profile]) -> None:
    with pytest.raises(InvalidRequestError, match="'laptop' is of local"):
        spec_of(profiles, profile="laptop", resources={"nodes": 2, "gpus": 1})
    with pytest.raises(InvalidRequestError, match=r"follows from `resources\.nodes`"):
        check_engine_options({"master_addr": "h"}, ())


def test_a_profile_may_allow_fewer_nodes(tmp_path: Path) -> None:
    text = PROFILE.replace("max_minutes = 600", "max_minutes = 600\nmax_nodes = 2")
    profiles = profiles_of(tmp_path, text)
    assert spec_of(profiles, resources={"nodes": 2}).nodes == 2
    with pytest.raises(
        InvalidRequestError, match=r"'della' allows at most 2 \(max_nodes\)"
    ) as most:
        spec_of(profiles, resources={"nodes": 3})
    assert [error.field for error in most.value.errors] == ["resources.nodes"]
    assert profile_to_wire(profiles["della"])["max_nodes"] == 2
    assert profile_to_wire(profiles["laptop"])["max_nodes"] == 64


def test_each_node_holds_its_part_of_the_weights(profiles: dict[str, Profile]) -> None:
    """The small tier takes 32 GB on one node."""
    catalogue = {"org/model": CatalogueEntry(name="org/model", size_gb=60.0)}
    assert spec_of(profiles, catalogue).tier == "large"
    assert spec_of(profiles, catalogue, resources={"nodes": 2}).tier == "small"


def test_a_stored_launch_of_an_older_version_has_one_node(profiles: dict[str, Profile]) -> None:
    stored = spec_of(profiles).to_json()
    assert "nodes" not in stored, "an older version would refuse it"
    assert "adapters" not in stored
    spec = LaunchSpec.model_validate_json(stored)
    assert (spec.nodes, spec.all_gpus) == (1, 1)
    two = spec_of(profiles, resources={"nodes": 2})
    assert LaunchSpec.model_validate_json(two.to_json()) == two


def test_one_node_needs_no_ray(profiles: dict[str, Profile]) -> None:
    script = render_script(LAUNCH, spec_of(profiles), profiles["della"])
    assert "ray" not in script.lower().replace("array", "")
    assert "#SBATCH --nodes=1\n#SBATCH --ntasks=1\n#SBATCH --cpus" in script


def test_the_script_for_a_container(profiles: dict[str, Profile]) -> None:
    spec = spec_of(profiles, tier="large", resources={"nodes": 3})
    script = render_script(LAUNCH, spec, profiles["della"])
    lines = script.splitlines()
    for line in ("#SBATCH --nodes=3", "#SBATCH --ntasks=3", "#SBATCH --ntasks-per-node=1",
                 "#SBATCH --gres=gpu:4", "#SBATCH --mem=320G"):  # fmt: skip
        assert line in lines
    inside = "/scratch/triton.sif ray "
    assert (
        script.count(inside) == 4
    )  # its version, the question for the client's port, start, status
    assert f"{inside}start --block" in script
    assert "--num-gpus=4 --num-cpus=12" in script
    assert "srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --relative=1" in script
    assert "[[ $gpus != 12 ]] || break" in script
    assert "pip install 'ray>=2.52' in the image /scratch/triton.sif" in script.replace(
        "'\"'\"'", "'"
    )
    assert script.index("has 12 GPUs on 3 nodes") < script.index("--model-repository=")


def test_every_script_is_one_that_bash_can_read(tmp_path: Path) -> None:
    profiles = profiles_of(tmp_path, PROFILE + CLUSTERS)
    for name, words in (("della", "sif ray"), ("plain", " ray"), ("embedded", "/opt/venv/bin/ray")):
        spec = spec_of(profiles, profile=name, resources={"nodes": 2, "gpus": 1})
        script = render_script(LAUNCH, spec, profiles[name])
        assert f"{words} start --block" in script
        done = subprocess.run(
            ["bash", "-n"], input=script, capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, ""), name


def test_ray_is_waited_for_no_longer_than_the_start_may_take(profiles: dict[str, Profile]) -> None:
    for minutes, seconds in ((30, 300), (0.5, 30), (0.001, 1)):
        spec = spec_of(profiles, start_minutes=minutes, resources={"nodes": 2})
        script = render_script(LAUNCH, spec, profiles["della"])
        assert f"deadline=$((SECONDS + {seconds}))" in script
