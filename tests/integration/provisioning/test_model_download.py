"""Downloads of models into a profile's cache: its layout, interruptions, refusals, and the token."""

import asyncio
import contextlib
import os
import random
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from app.provisioning.hosts import HostError, Hosts
from app.provisioning.model_download import Downloaded, ModelDownloadError, download_model
from app.provisioning.model_scan import find_models
from app.provisioning.profiles import Profile, read_profiles
from tests import ssh_server
from tests.conftest import ROOT
from tests.hugging_face_hub import COMMIT, HuggingFaceHub, git_id, sha256

MODEL = "owner/sheep"
TOKEN = f"hf_{secrets.token_hex(16)}"
SEAL = secrets.token_hex(32)
WEIGHTS = random.Random(1).randbytes(600_000)  # noqa: S311 - not a secret
OTHERS = random.Random(2).randbytes(300_000)  # noqa: S311 - not a secret
FILES = {
    "config.json": b'{"model_type": "sheep"}',
    "tokenizer_config.json": b"{}",
    "added_tokens.json": b"",
    "sub/chat template.jinja": b"{{ messages }}",
    "model-00001-of-00002.safetensors": WEIGHTS,
    "model-00002-of-00002.safetensors": OTHERS,
    "pytorch_model.bin": b"a pickle",
    "README.md": b"of no use here",
}
SERVED = {name: content for name, content in FILES.items() if not name.endswith((".bin", ".md"))}


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)


@pytest.fixture
def hub() -> HuggingFaceHub:
    return HuggingFaceHub(MODEL, FILES)


def profile_of(place: Path, members: str = "") -> Profile:
    file = place / "profiles.toml"
    provider = "slurm" if "host" in members else "local"
    file.write_text(
        f'[profiles.here]\nprovider = "{provider}"\nhome = "{place}/home"\nruntime = "plain"\n'
        f'cache = "{place}/cache"\n{members}'
    )
    return read_profiles(file)["here"]


async def downloaded(
    place: Path,
    endpoint: str,
    *,
    token: str | None = None,
    revision: str = "main",
    members: str = "",
) -> Downloaded:
    async with Hosts() as hosts:
        return await download_model(
            hosts, profile_of(place, members), MODEL, revision, endpoint=endpoint, token=token
        )


def content_of(place: Path) -> dict[str, bytes]:
    snapshot = place / "cache/hub/models--owner--sheep/snapshots" / COMMIT
    files = (file for file in snapshot.rglob("*") if file.is_file())
    return {str(file.relative_to(snapshot)): file.read_bytes() for file in files}


def layout(cache: Path) -> dict[str, str]:
    """Each file of a repository: a link's target, or its content."""
    repository = cache / "hub/models--owner--sheep"
    return {
        str(file.relative_to(repository)): str(file.readlink())
        if file.is_symlink()
        else sha256(file.read_bytes())
        for file in repository.rglob("*")
        if not file.is_dir() and file.relative_to(repository).parts[0] != "trees"
    }


def by_huggingface_hub(cache: Path, endpoint: str, *arguments: str) -> str:
    """The snapshot that the real library returns."""
    code = (
        "from huggingface_hub import snapshot_download; "
        f"print(snapshot_download({MODEL!r}, allow_patterns={sorted(SERVED)!r}, {', '.join(arguments)}))"
    )
    environment = os.environ | {
        "HF_HOME": str(cache), "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


async def test_a_token_for_loopback_passes_no_proxy(
    hub: HuggingFaceHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    hub.tokens = {TOKEN}
    with hub.run() as endpoint:
        await downloaded(tmp_path, endpoint, token=TOKEN)
    assert content_of(tmp_path) == SERVED


@pytest.mark.trial
async def test_the_cache_is_as_huggingface_hub_writes_it(
    hub: HuggingFaceHub, tmp_path: Path
) -> None:
    with hub.run() as endpoint:
        found = await downloaded(tmp_path, endpoint)
        size = sum(map(len, SERVED.values()))
        assert found == Downloaded(
            commit=COMMIT,
            snapshot=f"{tmp_path}/cache/hub/models--owner--sheep/snapshots/{COMMIT}",
            files=len(SERVED),
            total=size,
            received=size,
        )
        assert content_of(tmp_path) == SERVED
        by_huggingface_hub(tmp_path / "other", endpoint)
        assert layout(tmp_path / "cache") == layout(tmp_path / "other")
        assert (
            by_huggingface_hub(tmp_path / "cache", endpoint, "local_files_only=True")
            == found.snapshot
        )
        sent = hub.total_sent
        # Nor does either fetch a byte again.
        assert (await downloaded(tmp_path, endpoint)).received == 0
        assert (await downloaded(tmp_path, endpoint, revision=COMMIT)).received == 0
        by_huggingface_hub(tmp_path / "cache", endpoint)
        assert hub.total_sent == sent
    async with Hosts() as hosts:
        (model,) = await find_models(hosts, profile_of(tmp_path))
    assert (model.name, model.revision, model.fault) == (MODEL, COMMIT, None)
    assert model.size_gb == pytest.approx(900_000 / 1e9)


async def test_a_file_of_two_names_is_fetched_once(tmp_path: Path) -> None:
    files = {"model.safetensors": WEIGHTS, "copy/model.safetensors": WEIGHTS, "config.json": b"{}"}
    hub = HuggingFaceHub(MODEL, files)
    with hub.run() as endpoint:
        found = await downloaded(tmp_path, endpoint)
    assert found.received == found.total == len(WEIGHTS) + 2
    assert content_of(tmp_path) == files


@pytest.mark.parametrize("fault", ["503", "429", "cut", "altered"])
async def test_faults_are_survived(fault: str, hub: HuggingFaceHub, tmp_path: Path) -> None:
    hub.faults = lambda name, number: fault if number == 1 and name != "listing" else ""
    with hub.run() as endpoint:
        await downloaded(tmp_path, endpoint)
    assert content_of(tmp_path) == SERVED
    if fault == "cut":  # continued, and not begun again
        assert hub.sent["model-00001-of-00002.safetensors"] == len(WEIGHTS)


@pytest.mark.trial
async def test_a_busy_hub_is_asked_again(hub: HuggingFaceHub, tmp_path: Path) -> None:
    hub.faults = lambda name, number: "502" if name == "listing" and number < 3 else ""
    with hub.run() as endpoint:
        await downloaded(tmp_path, endpoint)
    assert hub.requests["listing"] == 3


async def test_a_server_without_ranges(hub: HuggingFaceHub, tmp_path: Path) -> None:
    hub.faults = lambda name, number: "" if name == "listing" else "cut" if number == 1 else "whole"
    with hub.run() as endpoint:
        found = await downloaded(tmp_path, endpoint)
    assert content_of(tmp_path) == SERVED
    assert found.received > found.total


@pytest.mark.parametrize("name", ["config.json", "model-00001-of-00002.safetensors"])
async def test_wrong_bytes_are_refused(name: str, hub: HuggingFaceHub, tmp_path: Path) -> None:
    hub.faults = lambda asked, _: "altered" if asked == name else ""
    with hub.run() as endpoint:
        with pytest.raises(ModelDownloadError) as refused:
            await downloaded(tmp_path, endpoint)
        assert str(refused.value) == f"{name}: its bytes do not match its checksum."
        # It is neither listed nor taken for complete.
        assert not (tmp_path / "cache/hub/models--owner--sheep/snapshots").exists()
        hub.faults = lambda *_: ""
        await downloaded(tmp_path, endpoint)
    assert content_of(tmp_path) == SERVED


async def test_a_model_larger_than_the_disk_is_refused_before_it_begins(
    hub: HuggingFaceHub, tmp_path: Path
) -> None:
    hub.sizes["model-00001-of-00002.safetensors"] = 10**16
    with (
        hub.run() as endpoint,
        pytest.raises(ModelDownloadError, match=r"Too little space in .* GB free"),
    ):
        await downloaded(tmp_path, endpoint)
    assert hub.total_sent == 0


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("../../../../escaped.json", {}),
        ("/etc/escaped.json", {}),
        ("a//b.json", {}),
        ("config.json", {"blobId": "../escaped"}),
        ("config.json", {"blobId": None}),
        ("config.json", {"size": -1}),
        ("config.json", {"size": None}),
    ],
)
async def test_a_listing_that_leads_out_of_the_cache_is_refused(
    name: str,
    entry: dict[str, object],
    hub: HuggingFaceHub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    content = {"rfilename": name, "size": 2, "blobId": git_id(b"{}")} | entry
    listed = [*hub.siblings(), content]
    monkeypatch.setattr(hub, "siblings", lambda: listed)
    with (
        hub.run() as endpoint,
        pytest.raises(ModelDownloadError, match="does not list owner/sheep"),
    ):
        await downloaded(tmp_path, endpoint)
    assert hub.total_sent == 0
    assert not list(tmp_path.rglob("*escaped*"))


async def test_what_cannot_be_downloaded(hub: HuggingFaceHub, tmp_path: Path) -> None:
    with hub.run() as endpoint:
        with pytest.raises(ModelDownloadError, match="owner/sheep has no revision 'older'"):
            await downloaded(tmp_path, endpoint, revision="older")
        hub.name = "owner/goat"
        with pytest.raises(
            ModelDownloadError, match="has no model owner/sheep, or it is private and the token is"
        ):
            await downloaded(tmp_path, endpoint)
        hub.name, hub.files = MODEL, {"config.json": b"{}", "pytorch_model.bin": b"a pickle"}
        with pytest.raises(ModelDownloadError, match="has no weights as safetensors"):
            await downloaded(tmp_path, endpoint)
        profile = profile_of(tmp_path)
        async with Hosts() as hosts:
            for model, revision in (
                ("/etc/passwd", "main"),
                ("owner/../x", "main"),
                (MODEL, "../x"),
            ):
                with pytest.raises(ModelDownloadError, match="Name a "):
                    await download_model(hosts, profile, model, revision, endpoint=endpoint)
            bare = profile.model_copy(update={"cache": None})
            with pytest.raises(ModelDownloadError, match="The profile here has no cache"):
                await download_model(hosts, bare, MODEL, endpoint=endpoint)
            with pytest.raises(ModelDownloadError, match="is not sent to it"):
                await download_model(
                    hosts, profile, MODEL, endpoint="http://hub.example", token=TOKEN
                )
    with pytest.raises(HostError, match="/bin/false ended with status 1"):
        await downloaded(tmp_path, endpoint, members='python = "/bin/false"\n')
    with pytest.raises(HostError, match="cannot be run here"):
        await downloaded(tmp_path, endpoint, members='python = "/no/python"\n')


@pytest.mark.trial
async def test_a_gated_model_names_what_to_do(hub: HuggingFaceHub, tmp_path: Path) -> None:
    hub.tokens, hub.known_tokens = {TOKEN}, {"hf_another"}
    with hub.run() as endpoint:
        terms = re.escape(f"accept its terms at {endpoint}/{MODEL}")
        with pytest.raises(
            ModelDownloadError, match=f"is a gated model: {terms}, then store a token"
        ):
            await downloaded(tmp_path, endpoint)
        with pytest.raises(
            ModelDownloadError,
            match=f"the account of the stored token has no access to it: {terms}",
        ):
            await downloaded(tmp_path, endpoint, token="hf_another")
        with pytest.raises(ModelDownloadError, match="refuses the stored token"):
            await downloaded(tmp_path, endpoint, token="hf_unknown")
        assert hub.sent["model-00001-of-00002.safetensors"] == 0
        await downloaded(tmp_path, endpoint, token=TOKEN)
        assert content_of(tmp_path) == SERVED
        assert hub.authorized_storage_requests == 0  # the token stays with the hub
        hub.is_private = True
        with pytest.raises(
            ModelDownloadError, match=r"private and the token is missing \(`launch token set`\)"
        ):
            await downloaded(tmp_path, endpoint)
        with pytest.raises(ModelDownloadError, match="private and the token has no access to it"):
            await downloaded(tmp_path, endpoint, token="hf_another")


async def test_a_renamed_model_keeps_the_token(hub: HuggingFaceHub, tmp_path: Path) -> None:
    hub.tokens, hub.name, hub.former = {TOKEN}, "owner/ram", MODEL
    with hub.run() as endpoint:
        await downloaded(tmp_path, endpoint, token=TOKEN)
    assert content_of(tmp_path) == SERVED
    assert hub.authorized_storage_requests == 0


# --- Interruptions -----------------------------------------------------------------------------------


def program_of(place: Path) -> int:
    """The process of the host that has a part of this test's cache open."""
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            for link in (process / "fd").iterdir():
                if str(link.readlink()).startswith(f"{place}/cache"):
                    return int(process.name)
    raise AssertionError("no process downloads")


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - of other processes
            await asyncio.sleep(0.05)


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


async def is_held(hub: HuggingFaceHub) -> None:
    """Wait until a large file is in its middle."""
    assert await asyncio.to_thread(hub.held.wait, 60)


async def test_killed_in_the_middle_and_continued(hub: HuggingFaceHub, tmp_path: Path) -> None:
    hub.hold = 400_000  # the second file of weights is complete before
    with hub.run() as endpoint:
        running = asyncio.create_task(downloaded(tmp_path, endpoint))
        await is_held(hub)
        blobs = tmp_path / "cache/hub/models--owner--sheep/blobs"
        part = blobs / f"{sha256(WEIGHTS)}.download.incomplete"
        await until((blobs / sha256(OTHERS)).exists)
        await until(lambda: part.stat().st_size > 200_000)
        with pytest.raises(ModelDownloadError, match="Another download of owner/sheep into"):
            await downloaded(tmp_path, endpoint)
        os.kill(program_of(tmp_path), signal.SIGKILL)
        with pytest.raises(HostError, match="The download on this machine ended"):
            await running
        there = part.stat().st_size
        async with Hosts() as hosts:
            assert await find_models(hosts, profile_of(tmp_path)) == []
        hub.hold = None
        hub.released.set()
        found = await downloaded(tmp_path, endpoint)
    assert found.received == len(WEIGHTS) - there
    assert hub.requests["config.json"] == hub.requests["model-00002-of-00002.safetensors"] == 1
    assert content_of(tmp_path) == SERVED
    assert not list(tmp_path.rglob("*.incomplete"))


# --- Over ssh, by the command line --------------------------------------------------------------------


@pytest.fixture
async def remote(tmp_path: Path) -> AsyncIterator[Path]:
    """A directory with the profiles of a host that is reached by ssh."""
    if not ssh_server.is_installed():
        pytest.skip("needs openssh-server, and root")
    folder = tmp_path / "ssh"
    folder.mkdir()
    async with ssh_server.start_ssh(folder, {}) as ssh:
        profile_of(tmp_path, ssh.profile)
        yield tmp_path


def environment_of(place: Path, endpoint: str = "") -> dict[str, str]:
    return os.environ | {
        "LLM_PROFILES_FILE": str(place / "profiles.toml"),
        "LLM_HUGGING_FACE_TOKEN_FILE": str(place / "data/token"),
        "LLM_SEAL_SECRET": SEAL,
        "HF_ENDPOINT": endpoint or "https://huggingface.co",
    }


def launch(
    place: Path, *arguments: str, endpoint: str = "", text: str = "", **variables: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "app", "launch", *arguments], cwd=ROOT, input=text,
        env=environment_of(place, endpoint) | variables, capture_output=True, text=True, check=False,
    )  # fmt: skip


def places_with(secret: bytes) -> list[str]:
    """Processes whose arguments or environment have it."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            for name in ("cmdline", "environ"):
                with contextlib.suppress(OSError):
                    if secret in (process / name).read_bytes():
                        found.append(f"{process.name}/{name}")
    return found


def files_with(secret: bytes, place: Path) -> list[Path]:
    return [file for file in place.rglob("*") if file.is_file() and secret in file.read_bytes()]


@pytest.mark.trial
async def test_the_token_is_in_no_argument_variable_or_file(
    hub: HuggingFaceHub, remote: Path
) -> None:
    hub.tokens, hub.hold = {TOKEN}, 100_000
    stored = launch(remote, "token", "set", text=f"{TOKEN}\n")
    assert stored.returncode == 0, stored.stderr
    with hub.run() as endpoint:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "app", "launch", "download", MODEL, cwd=ROOT,
            env=environment_of(remote, endpoint),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        await is_held(hub)
        assert program_of(remote) != process.pid
        assert places_with(TOKEN.encode()) == []
        # Neither ssh nor the host has the service's secrets.
        assert places_with(SEAL.encode()) == [f"{process.pid}/environ"]
        assert files_with(TOKEN.encode(), remote) == []
        hub.released.set()
        output, errors = await process.communicate()
    assert process.returncode == 0, errors
    assert output.decode().startswith(f"{MODEL} is complete: {len(SERVED)} files, 0.00 GB")
    assert TOKEN.encode() not in output + errors
    assert content_of(remote) == SERVED
    assert files_with(TOKEN.encode(), remote) == []
    listed = launch(remote, "models")
    assert listed.stdout.splitlines()[1].split() == [MODEL, COMMIT[:12], "0.0", "here", "-", "-"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
@pytest.mark.trial
async def test_an_ended_command_ends_the_download_on_the_host(
    number: signal.Signals, hub: HuggingFaceHub, remote: Path
) -> None:
    hub.hold = 100_000
    with hub.run() as endpoint:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "app", "launch", "download", MODEL, cwd=ROOT,
            env=environment_of(remote, endpoint), stderr=subprocess.PIPE,
        )  # fmt: skip
        await is_held(hub)
        pid = program_of(remote)
        process.send_signal(number)
        _, errors = await process.communicate()
        await until(lambda: has_ended(pid))
        if number != signal.SIGKILL:
            assert process.returncode == 130
            assert errors.decode().endswith("Interrupted: the same command continues it.\n")
        hub.hold = None
        hub.released.set()
        again = await asyncio.to_thread(launch, remote, "download", MODEL, endpoint=endpoint)
    assert again.returncode == 0, again.stderr
    assert content_of(remote) == SERVED


# --- The stored token --------------------------------------------------------------------------------


@pytest.mark.trial
def test_the_token_is_sealed(tmp_path: Path) -> None:
    profile_of(tmp_path)
    stored = launch(tmp_path, "token", "set", text=f" {TOKEN}\n")
    file = tmp_path / "data/token"
    assert stored.stdout == f"The token is sealed in {file}.\n", stored.stderr
    assert file.stat().st_mode & 0o777 == 0o600
    assert files_with(TOKEN.encode(), tmp_path) == []
    other = launch(tmp_path, "download", MODEL, LLM_SEAL_SECRET=SEAL[::-1])
    assert (other.returncode, other.stdout) == (1, "")
    assert "does not belong to this LLM_SEAL_SECRET, or was changed" in other.stderr
    missing = launch(tmp_path, "download", MODEL, LLM_SEAL_SECRET="")
    assert missing.stderr.startswith("LLM_SEAL_SECRET is not set")
    assert launch(tmp_path, "token", "remove").stdout == "The token is removed.\n"
    assert launch(tmp_path, "token", "remove").stdout == "There is no token.\n"
    assert list(file.parent.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "variables", "words"),
    [
        ("two words", {}, "This is not a token"),
        ("", {}, "This is not a token"),
        ("hf_any_token", {"LLM_SEAL_SECRET": SEAL[:9]}, "LLM_SEAL_SECRET has fewer than 32 bytes"),
        ("hf_any_token", {"LLM_SEAL_SECRET": ""}, "LLM_SEAL_SECRET is not set"),
        (
            "hf_any_token",
            {"LLM_HUGGING_FACE_TOKEN_FILE": ""},
            "LLM_HUGGING_FACE_TOKEN_FILE is not set",
        ),
        (
            "hf_any_token",
            {"LLM_HUGGING_FACE_TOKEN_FILE": "/proc/token"},
            "/proc/token cannot be written",
        ),
        (
            "hf_any_token",
            {"HF_ENDPOINT": "ftp://hub"},
            "setting HF_ENDPOINT: Value error, must be an http",
        ),
    ],
)
def test_a_token_that_cannot_be_sealed_is_not_stored(
    text: str, variables: dict[str, str], words: str, tmp_path: Path
) -> None:
    refused = launch(tmp_path, "token", "set", text=text, **variables)
    assert refused.returncode != 0
    assert refused.stderr.startswith(words)
    assert not list(tmp_path.rglob("token"))


@pytest.mark.trial
def test_the_command_line_on_this_machine(hub: HuggingFaceHub, tmp_path: Path) -> None:
    profile_of(tmp_path)
    with hub.run() as endpoint:
        done = launch(tmp_path, "download", MODEL, "--profile", "here", endpoint=endpoint)
        assert done.stderr == "Downloading to here (this machine)\n"
        assert done.stdout.endswith(f"/snapshots/{COMMIT}\n")
        hub.tokens = {TOKEN}
        gated = launch(tmp_path, "download", MODEL, "--revision", COMMIT, endpoint=endpoint)
        assert gated.returncode == 0  # what is complete needs no access
    unknown = launch(tmp_path, "download", MODEL, "--profile", "there")
    assert unknown.stderr == "There is no profile 'there'. There are: here.\n"
