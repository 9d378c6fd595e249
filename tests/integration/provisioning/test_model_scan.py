"""Models on a host: which there are, what is missing, and the catalogue that is written of them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from app.core.settings import Settings
from app.provisioning.catalogue import read_catalogue
from app.provisioning.hosts import HostError, Hosts
from app.provisioning.model_scan import FoundModel, catalogue_entries, find_models
from app.provisioning.profiles import Profile, read_profiles
from tests import ssh_server
from tests.attribution_workers import environment_of
from tests.conftest import ROOT

COMMIT, OLDER = "a" * 40, "b" * 40


def write(path: Path, size: int = 2) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"0" * size)


def cached(cache: Path, name: str, commit: str, files: dict[str, int]) -> None:
    """A snapshot as huggingface_hub lays it out: links to blobs."""
    repository = cache / "hub" / f"models--{name.replace('/', '--')}"
    for file, size in files.items():
        blob = repository / "blobs" / f"{commit[:8]}{file.replace('/', '-')}"
        write(blob, size)
        link = repository / "snapshots" / commit / file
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A host's directories: a cache and a root with models of all kinds."""
    cache, root = tmp_path / "cache", tmp_path / "models"
    whole = {
        "config.json": 2,
        "model.safetensors": 3_000_000,
        "consolidated.safetensors": 9,
        "original.bin": 7,
    }
    cached(cache, "owner/whole", OLDER, {"config.json": 2, "pytorch_model.bin": 2_000_000})
    cached(cache, "owner/whole", COMMIT, whole | {"1_Pooling/config.json": 2})
    for blob in (cache / "hub/models--owner--whole/blobs").glob("bbbb*"):
        os.utime(blob, (1, 1))
    part = {"config.json": 2, "model-00001-of-00003.safetensors": 5}
    cached(cache, "owner/part", COMMIT, part)
    cached(cache, "owner/bare", COMMIT, {"config.json": 2})
    cached(cache, "owner/tokenizer", COMMIT, {"tokenizer.json": 2})
    write(root / "plain/config.json")
    write(root / "plain/model-00001-of-00002.safetensors", 4_000_000)
    write(root / "plain/model-00002-of-00002.safetensors", 1_000_000)
    write(root / "a name with blanks/config.json")
    write(root / "config.json")  # of nothing
    write(root / "entry/config.pbtxt")
    write(root / "entry/1/config.json")
    write(root / "entry/1/model.safetensors", 1_000_000)
    write(root / "sheep-lora/adapter_model.safetensors")
    (root / "loop").symlink_to(root)
    return tmp_path


def profile_of(place: Path, members: str = "") -> Profile:
    file = place / "profiles.toml"
    file.write_text(
        f'[profiles.here]\nprovider = "{"slurm" if members else "local"}"\nhome = "{place}/home"\nruntime = "plain"\n'
        f'cache = "{place}/cache"\nmodel_roots = ["{place}/models"]\n{members}'
    )
    return read_profiles(file)["here"]


async def found_by(profile: Profile) -> dict[tuple[str, str | None], FoundModel]:
    async with Hosts() as hosts:
        return {(one.name, one.revision): one for one in await find_models(hosts, profile)}


async def test_models_are_found_with_their_sizes_and_faults(place: Path) -> None:
    found = await found_by(profile_of(place))
    root = f"{place}/models"
    assert {key: (one.size_gb, one.fault) for key, one in found.items()} == {
        ("owner/whole", COMMIT): (0.003, None),
        ("owner/whole", OLDER): (0.002, None),
        ("owner/part", COMMIT): (5e-9, "2 of 3 files are missing"),
        ("owner/bare", COMMIT): (0, "has no weights"),
        (f"{root}/plain", None): (0.005, None),
        (f"{root}/entry", None): (0.001, None),
    }


async def test_the_catalogue_has_the_newest_revisions_that_can_be_launched(place: Path) -> None:
    profile = profile_of(place)
    entries = catalogue_entries((await found_by(profile)).values(), profile)
    assert {name: (one.revision, one.size_gb) for name, one in entries.items()} == {
        "owner/whole": (COMMIT, 0.003),
        f"{place}/models/plain": (None, 0.005),
    }
    profile = profile_of(place, "triton_entries = true\n")
    assert f"{place}/models/entry" in catalogue_entries((await found_by(profile)).values(), profile)


async def test_a_place_that_cannot_be_read_is_an_error(place: Path) -> None:
    profile = profile_of(place).model_copy(
        update={"model_roots": (f"{place}/nothing",), "cache": None}
    )
    with pytest.raises(HostError, match="No such file or directory"):
        await found_by(profile)
    with pytest.raises(HostError, match="neither model_roots nor a cache"):
        await found_by(profile.model_copy(update={"model_roots": ()}))


async def test_models_are_found_over_ssh(place: Path) -> None:
    if not ssh_server.is_installed():
        pytest.skip("needs openssh-server, and root")
    here = await found_by(profile_of(place))
    folder = place / "ssh"
    folder.mkdir()
    async with ssh_server.start_ssh(folder, {}) as ssh:
        assert await found_by(profile_of(place, ssh.profile)) == here


def command(settings: Settings, place: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    files = {
        "LLM_PROFILES_FILE": str(place / "profiles.toml"),
        "LLM_CATALOGUE_FILE": str(place / "catalogue.toml"),
    }
    environment = environment_of(settings) | files
    return subprocess.run(
        [sys.executable, "-m", "app", "launch", "models", *arguments],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.trial
def test_the_command_line(settings: Settings, place: Path) -> None:
    profile_of(place)
    catalogue = place / "catalogue.toml"
    catalogue.write_text("")
    written = command(settings, place, "--profile", "here", "--catalogue")
    assert written.returncode == 0, written.stderr
    catalogue.write_text(written.stdout)
    entry = read_catalogue(catalogue)["owner/whole"]
    assert (entry.revision, entry.profile) == (COMMIT, "here")
    shown = command(settings, place)
    assert shown.stderr == "Reading here (this machine)\n"
    rows = {line.split()[0]: line.split()[1:] for line in shown.stdout.splitlines()}
    assert rows["MODEL"] == ["REVISION", "GB", "PROFILE", "OFFERED", "FAULT"]
    assert rows["owner/part"] == [
        COMMIT[:12],
        "0.0",
        "here",
        "-",
        "2",
        "of",
        "3",
        "files",
        "are",
        "missing",
    ]
    assert rows[f"{place}/models/plain"] == ["-", "0.0", "here", "yes", "-"]
    refused = command(settings, place, "--profile", "there")
    assert refused.returncode == 1
    assert refused.stderr == "There is no profile 'there'. There are: here.\n"
