"""Requests to launch: every field by an allow-list, and nothing that reaches a script unchecked."""

import json
import shlex
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import orjson
import pytest

from app.api.json_codec import parse
from app.core.errors import InvalidRequestError
from app.provisioning.catalogue import CatalogueEntry, read_catalogue
from app.provisioning.job_end import job_from_exit_file
from app.provisioning.job_script import ModelPlace, engine_settings, render_script
from app.provisioning.jobs import End, Phase
from app.provisioning.profiles import Profile, ProfileError, Provider, read_profiles
from app.provisioning.spec import LaunchCreate, LaunchSpec, to_spec
from app.provisioning.store import Launch
from tests.plan_configs import KNOWN

LAUNCH = UUID("01890000-0000-7000-8000-000000000000")
PROFILE = """
[profiles.della]
provider = "slurm"
host = "della.example.org"
home = "/scratch/llm"
cache = "/scratch/hub"
model_roots = ["/scratch/models"]
partition = "gpu"
account = "physics"
modules = ["apptainer/1.3"]
runtime = "apptainer"
image = "/scratch/triton.sif"
max_minutes = 600

[[profiles.della.tiers]]
name = "small"
max_model_size_gb = 32
gpus = 1
cpus = 6
memory_gb = 48

[[profiles.della.tiers]]
name = "large"
gpus = 4
cpus = 12
memory_gb = 320
constraint = "a100"

[profiles.laptop]
provider = "local"
home = "/scratch/llm"
model_roots = ["/scratch/models"]
runtime = "plain"
trust_remote_code = true
"""
EVIL = [
    "$(touch x)", "`touch x`", "a;touch x", "a b", "a\nb", "a\n", "\na", "a\r", "-a", "--a",
    "-oProxyCommand=touch", "../a", "a/../b", "..", ".", "/../etc", "a\x00b", "a'b", 'a"b', "a|b",
    "a&b", "a>b", "a<b", "*", "?", "~root", "a\\b", "$HOME", "é", "", " ", "#SBATCH", "a" * 2000,
    "a\u2028b", "{a,b}", "a\tb", "!a",
]  # fmt: skip
TEXT_FIELDS = (
    "name", "model", "revision", "provider", "profile", "served_name", "tier", "partition",
    "account", "constraint",
)  # fmt: skip


@pytest.fixture
def profiles(tmp_path: Path) -> dict[str, Profile]:
    return profiles_of(tmp_path, PROFILE)


def profiles_of(folder: Path, text: str) -> dict[str, Profile]:
    file = folder / "profiles.toml"
    file.write_text(text)
    return read_profiles(file)


def spec_of(
    profiles: dict[str, Profile],
    catalogue: dict[str, CatalogueEntry] | None = None,
    **members: Any,
) -> LaunchSpec:
    body = {"name": "one", "model": "org/model"} | members
    return to_spec(parse(LaunchCreate, orjson.dumps(body)), profiles, catalogue or {})


@pytest.mark.parametrize("evil", EVIL)
@pytest.mark.parametrize("field", TEXT_FIELDS)
def test_no_text_field_takes_more_than_its_pattern(
    profiles: dict[str, Profile], field: str, evil: str
) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        spec_of(profiles, None, **{field: evil})
    assert any(error.field.split(".")[0] == field for error in refused.value.errors)


@pytest.mark.parametrize("evil", EVIL)
def test_neither_do_nested_ones(profiles: dict[str, Profile], evil: str) -> None:
    for members in (
        {"modules": [evil]},
        {"resources": {"gres": evil}},
        {"engine": {"dtype": evil}},
        {"engine": {"quantization": evil}},
        {"model": f"/scratch/models/{evil}"},
        {"model": f"org/{evil}"},
        {"model": f"{evil}/model"},
    ):
        if members in ({"model": "/scratch/models/-a"}, {"model": "/scratch/models/--a"}):
            continue  # inside a path, which no command takes for an option
        with pytest.raises(InvalidRequestError):
            spec_of(profiles, **members)


@pytest.mark.parametrize(
    "model",
    ["/scratch/models", "/scratch/models/", "/scratch/models/../x", "/scratch/modelsx/a", "/etc",
     "/scratch/models//a", "/scratch/models/./a", "//scratch/models/a", "/", "scratch/models/a",
     "org/a--b", "org/a..b", "a/b/c"],
)  # fmt: skip
def test_models_outside_of_the_roots(profiles: dict[str, Profile], model: str) -> None:
    with pytest.raises(InvalidRequestError):
        spec_of(profiles, model=model)


@pytest.mark.parametrize(
    "members",
    [
        {"host": "evil.example"}, {"command": ["sh"]}, {"image": "/x"}, {"priority": 1},
        {"priority": -20_000}, {"time_limit_minutes": 0}, {"time_limit_minutes": 601},
        {"time_limit_minutes": "5"}, {"idle_minutes": -1}, {"start_minutes": 0},
        {"resources": {"gpus": -1}}, {"resources": {"gpus": 65}}, {"resources": {"cpus": 0}},
        {"resources": {"memory_gb": 0}}, {"resources": {"tasks": 2}}, {"tier": "none"},
        {"engine": {"trust_remote_code": True}}, {"engine": {"gpu_memory_utilization": 2}},
        {"trust_remote_code": True}, {"profile": "nowhere"}, {"provider": "local", "profile": "della"},
        {"model": "/scratch/models/a", "revision": "main"}, {"modules": ["a"] * 17},
    ],
)  # fmt: skip
def test_what_a_request_may_not_say(profiles: dict[str, Profile], members: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        spec_of(profiles, **members)


def test_what_is_left_out_is_the_profiles(profiles: dict[str, Profile]) -> None:
    spec = spec_of(profiles, revision="main")
    assert (spec.profile, spec.served_name, spec.tier) == ("della", "model", "small")
    assert (spec.gpus, spec.cpus, spec.memory_gb, spec.gres) == (1, 6, 48, "gpu:1")
    assert (spec.partition, spec.account, spec.modules) == ("gpu", "physics", ["apptainer/1.3"])
    assert spec.time_limit_minutes == 60
    assert spec_of(profiles, provider="local", trust_remote_code=True).profile == "laptop"


@pytest.mark.parametrize("name", ["default", "default-2"])
def test_a_launch_has_no_name_that_its_server_cannot_have(
    profiles: dict[str, Profile], name: str
) -> None:
    with pytest.raises(InvalidRequestError, match="TRITON_GRPC_SERVICE"):
        spec_of(profiles, name=name)


def test_a_tier_for_what_the_models_own_files_say(tmp_path: Path) -> None:
    """Llama 3 70B in 16 bits is beyond the small tier; what cannot be read is of the first one."""
    roots, outside = tmp_path / "models", tmp_path / "outside"
    for folder in (roots / "llama", outside):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(KNOWN["meta-llama/Llama-3.1-70B"].config))
    (roots / "empty").mkdir()
    (roots / "link").symlink_to(outside)
    here = PROFILE.replace("/scratch/models", str(roots)).replace('host = "', '# host = "')
    for text, model, tier in (
        (here, "llama", "large"),
        (here, "empty", "small"),
        (here, "link", "small"),
        (PROFILE.replace("/scratch/models", str(roots)), "llama", "small"),  # of another machine
    ):
        profiles = profiles_of(tmp_path, text)
        spec = spec_of(profiles, model=f"{roots}/{model}", profile="della", served_name="a")
        assert spec.tier == tier, model


def test_the_smallest_tier_that_is_large_enough(profiles: dict[str, Profile]) -> None:
    for size, tier in ((1.0, "small"), (32.0, "small"), (32.1, "large"), (900.0, "large")):
        catalogue = {"org/model": CatalogueEntry(name="org/model", size_gb=size)}
        assert spec_of(profiles, catalogue).tier == tier
    more = spec_of(profiles, tier="large", resources={"gpus": 2, "memory_gb": 100})
    assert (more.gpus, more.gres, more.cpus, more.memory_gb) == (2, "gpu:2", 12, 100)
    assert more.constraint == "a100"


def test_the_catalogue_completes_a_request(profiles: dict[str, Profile], tmp_path: Path) -> None:
    file = tmp_path / "catalogue.toml"
    file.write_text(
        """[models."org/model"]
        revision = "abc"
        profile = "laptop"
        path = "/scratch/models/here"
        [models."org/other"]
        revision = "abc"
        size_gb = 40
        """.replace("size_gb = 40", "size_gb = 40.0")
    )
    catalogue = read_catalogue(file)
    spec = spec_of(profiles, catalogue)
    assert (spec.model, spec.revision, spec.profile) == ("/scratch/models/here", None, "laptop")
    other = spec_of(profiles, catalogue, model="org/other")
    assert (other.revision, other.tier, other.profile) == ("abc", "large", "della")


def test_the_script_of_a_container(profiles: dict[str, Profile]) -> None:
    spec = spec_of(profiles, tier="large", priority=-5, revision="v1", constraint="h100")
    script = render_script(LAUNCH, spec, profiles["della"])
    directory = f"/scratch/llm/launches/{LAUNCH}"
    for line in (
        f"#SBATCH --job-name=llm-{LAUNCH}", "#SBATCH --comment=one", "#SBATCH --time=60",
        "#SBATCH --cpus-per-task=12", "#SBATCH --mem=320G", "#SBATCH --gres=gpu:4",
        "#SBATCH --partition=gpu", "#SBATCH --account=physics", "#SBATCH --constraint=h100",
        "#SBATCH --nice=5", "#SBATCH --no-requeue", f"#SBATCH --output={directory}/log",
        "module load apptainer/1.3 || exit 1", "export HF_HOME=/scratch/hub",
    ):  # fmt: skip
        assert line in script.splitlines(), line
    assert script.startswith("#!/bin/bash -l\n")
    assert (
        f"apptainer exec --nv --pwd {directory} --bind {directory}:{directory} "
        f"--bind /scratch/hub:/scratch/hub /scratch/triton.sif python3 {directory}/health run "
        "--must-start --only-used -- tritonserver \\\n" in script
    )
    assert engine_settings(spec, ModelPlace()) == {
        "model": "org/model", "revision": "v1", "tokenizer_revision": "v1",
        "tensor_parallel_size": 4,
    }  # fmt: skip


@pytest.mark.parametrize(("line", "expected"), [("", False), ("supervise = true", True)])
def test_a_plain_command_is_supervised_if_the_profile_demands_it(
    tmp_path: Path, line: str, expected: bool
) -> None:
    profiles = profiles_of(tmp_path, PROFILE + line)
    script = render_script(LAUNCH, spec_of(profiles, provider="local"), profiles["laptop"])
    assert ("/health run " in script) is expected


def test_a_command_of_the_profile_is_quoted(tmp_path: Path) -> None:
    command = ["sh", "-c", "echo $(date) 'x'"]
    text = PROFILE + f"command = {command!r}".replace(
        "\"echo $(date) 'x'\"", '''"echo $(date) 'x'"'''
    )
    profiles = profiles_of(tmp_path, text)
    script = render_script(LAUNCH, spec_of(profiles, provider="local"), profiles["laptop"])
    assert shlex.join(command) in script


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('colour = "red"', "profiles.laptop.colour: unknown; there are"),
        ('host = "x"', "provider local runs on this machine"),
        ('home = "relative"', "profiles.laptop.home: must be an absolute path"),
        ('home = "/a/../b"', "profiles.laptop.home"),
        ('user = "-oProxyCommand=x"', "profiles.laptop.user"),
        ('runtime = "embedded"', "runtime embedded needs venv"),
        ("max_minutes = 5", "default_minutes exceeds max_minutes"),
        ("max_nodes = 0", "profiles.laptop.max_nodes"),
        ("max_nodes = 65", "profiles.laptop.max_nodes"),
        ('name = "other"', "profiles.laptop.name: unknown"),
        ('tiers = [{name = "a"}, {name = "a"}]', "two tiers have one name"),
        ('model_roots = ["/x\\n"]', "profiles.laptop.model_roots.0"),
        ("slots = 0", "profiles.laptop.slots"),
        ('engine_options = ["max_num_seqs"]', "that needs a permission"),
        ('engine_options = ["model"]', "that needs a permission"),
        ('engine_options = ["nothing"]', "profiles.laptop.engine_options.0"),
    ],
)
def test_a_profile_that_is_wrong_is_reported(tmp_path: Path, line: str, words: str) -> None:
    key = line.split(" =")[0]
    laptop = PROFILE[PROFILE.index("[profiles.laptop]") :].splitlines()
    others = [one for one in laptop[1:] if not one.startswith(f"{key} =")]
    with pytest.raises(ProfileError) as raised:
        profiles_of(tmp_path, "\n".join([laptop[0], line, *others]))
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("provider", "status", "seconds", "end"),
    [
        ("slurm", 0, 10, End.COMPLETED), ("slurm", 143, 10, End.CANCELLED),
        ("slurm", 143, 3599, End.TIMEOUT), ("slurm", 3, 10, End.FAILED),
        ("local", 143, 4000, End.CANCELLED), ("local", 137, 10, End.FAILED),
    ],
)  # fmt: skip
def test_how_a_job_ended_by_what_it_left(
    profiles: dict[str, Profile], provider: Provider, status: int, seconds: int, end: End
) -> None:
    """The stored facts of a job that Slurm no longer lists."""
    now = datetime.now(UTC)
    spec = spec_of(profiles).model_dump_json()
    launch = Launch(
        LAUNCH, "one", provider, "della", "demo", spec, "healthy", "", None, "7", "n1",
        None, None, None, 0, None, now, now, now, now, None, None, None,
    )  # fmt: skip
    job = job_from_exit_file(launch, status, seconds)
    assert (job.phase, job.end, job.exit_code, job.id) == (Phase.ENDED, end, status, "7")


def test_files_that_are_no_profiles(tmp_path: Path) -> None:
    assert read_profiles(None) == {}
    assert read_catalogue(None) == {}
    for text in ("x = ", "[other.a]", "profiles = 1", "[profiles]\na = 1"):
        with pytest.raises(ProfileError):
            profiles_of(tmp_path, text)
    with pytest.raises(ProfileError, match="cannot be read"):
        read_profiles(tmp_path / "none.toml")
