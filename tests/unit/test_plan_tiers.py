"""Tiers: the smallest that a model fits into, from a file or built in."""

import os
import re
from pathlib import Path

import pytest

from app.plan.facts import PlanError
from app.plan.resources import Resources
from app.plan.tiers import BUILT_IN, choose_tier, read_tiers
from tests.conftest import ROOT

GB = 10**9
FILE = """
[time]
default = 45
max = 240

[partitions.cpu]
[[partitions.cpu.tiers]]
name = "tiny"
max_model_size_gb = 4
gpu_count = 0
cpu_cores = 8
memory_gb = 16

[partitions.gpu]
default = true
[[partitions.gpu.tiers]]
name = "huge"
max_model_size_gb = 600
gpu_count = 8
cpu_cores = 32
memory_gb = 800
gres = "gpu:h100:8"
constraint = "nvlink"
[[partitions.gpu.tiers]]
name = "one"
description = "One A100"
max_model_size_gb = 60
gpu_count = 1
gpu_type = "a100-80"
cpu_cores = 6
memory_gb = 64

[models]
"org/special" = "gpu.huge"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tiers.toml"
    path.write_text(FILE)
    return path


@pytest.mark.parametrize(
    ("size", "name"), [(1, "small"), (32 * GB, "small"), (32 * GB + 1, "medium"),
                       (128 * GB, "medium"), (129 * GB, "large"), (5000 * GB, "large")],
)  # fmt: skip
def test_the_built_in_tiers(size: int, name: str) -> None:
    partition, tier = choose_tier(BUILT_IN, size)
    assert (partition, tier.name) == ("gpu", name)
    assert read_tiers(None) is BUILT_IN


def test_the_smallest_that_is_large_enough_whatever_the_order(file: Path) -> None:
    read = read_tiers(file)
    assert (read.default_minutes, read.max_minutes) == (45, 240)
    partition, tier = choose_tier(read, 16 * GB)
    assert (partition, tier.name, tier.gres) == ("gpu", "one", "gpu:1")
    assert choose_tier(read, 61 * GB)[1].gres == "gpu:h100:8"
    assert choose_tier(read, GB, partition="cpu")[1].gres == ""


def test_a_model_may_have_a_tier_of_its_own(file: Path) -> None:
    assert choose_tier(read_tiers(file), GB, model="org/special")[1].name == "huge"
    assert choose_tier(read_tiers(file), GB, model="org/other")[1].name == "one"


def test_no_tier_is_said(file: Path) -> None:
    with pytest.raises(PlanError) as refused:
        choose_tier(read_tiers(file), 700 * GB)
    assert str(refused.value) == (
        "no tier of partition 'gpu' takes a model of 700.0 GB: the largest takes 600"
    )
    with pytest.raises(PlanError, match="partition: 'tpu' is none of cpu, gpu"):
        choose_tier(read_tiers(file), GB, partition="tpu")


def test_the_documents_example_is_valid(tmp_path: Path) -> None:
    found = re.search(r"```toml\n(.*?)```", (ROOT / "docs" / "plan.md").read_text(), re.DOTALL)
    assert found
    path = tmp_path / "tiers.toml"
    path.write_text(found[1])
    read = read_tiers(path)
    assert read.models == {"org/name": ("gpu", "small")}
    assert read.partitions["gpu"][0].request(30) == Resources(1, "gpu:a100:1", 6, 48, 30)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('name = "one"', 'name = "huge"', "partitions.gpu.tiers: two of one name"),
        ('name = "one"', "", "partitions.gpu.tiers[1].name: missing"),
        ("gpu_count = 1", "", "partitions.gpu.tiers[1].gpu_count: missing"),
        ("gpu_count = 1", "gpu_count = -1", "gpu_count: must be from 0 to 65536, not -1"),
        ("gpu_count = 1", 'gpu_count = "1"', "gpu_count: must be a whole number, not '1'"),
        ("gpu_count = 1", "gpus = 1", "partitions.gpu.tiers[1].gpus: unknown; there are name, "),
        (
            '"a100-80"',
            '"a1000"',
            "tiers[1].gpu_type: 'a1000' is no GPU known here: there are t4-16",
        ),
        ("max = 240", "max = 30", "time.default: must be from 1 to 30, not 45"),
        ('"gpu.huge"', '"gpu.none"', "models.org/special: is no PARTITION.TIER of this file"),
        ("[models]", "[model]", "model: unknown; there are time, partitions, models"),
        ("default = true", "default = 1", "partitions.gpu.default: must be true or false, not 1"),
        ("[time]", "[time", "(at line 2, column 6)"),
    ],
)
def test_wrong_files_are_told_in_one_line(file: Path, old: str, new: str, message: str) -> None:
    file.write_text(FILE.replace(old, new, 1))
    with pytest.raises(PlanError) as refused:
        read_tiers(file)
    text = str(refused.value)
    assert text.startswith(f"{file}: ")
    assert message in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "partitions: missing: write [partitions.NAME]"),
        (b"partitions = 3", "partitions: must be an object, not 3"),
        (b"[partitions]", "partitions: empty"),
        (b"[partitions.a]", "partitions.a.tiers: missing"),
        (b"[partitions.a]\ntiers = 3", "partitions.a.tiers: must be a list of at most 1000 tables"),
        (b"[partitions.a]\ntiers = [3]", "partitions.a.tiers[0]: must be an object, not 3"),
        (b"\xff", "is not UTF-8"),
        (b"a = " + b"[" * 100_000, ": "),
    ],
)
def test_files_without_tiers(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "tiers.toml"
    path.write_bytes(content)
    with pytest.raises(PlanError) as refused:
        read_tiers(path)
    assert message in str(refused.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"tiers.toml: cannot be read: No such file"):
        read_tiers(tmp_path / "tiers.toml")
    os.mkfifo(tmp_path / "tiers.toml")
    with pytest.raises(PlanError, match=r"tiers.toml: is no file"):
        read_tiers(tmp_path / "tiers.toml")
