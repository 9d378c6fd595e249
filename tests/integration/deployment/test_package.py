"""The package: its wheel is built, installed in a fresh environment, and used outside of the checkout."""

import os
import re
import shlex
import signal
import subprocess
import sys
import sysconfig
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from email.message import Message
from email.parser import BytesParser
from pathlib import Path

import httpx
import psutil
import pytest
from packaging.requirements import Requirement

from app.cli.main import _COMMANDS
from app.cli.up import processes
from tests.conftest import connect, make_settings
from tests.postgres import PostgresServer

ROOT = Path(__file__).resolve().parents[3]
# Code, and the files that the commands read at run time.
FILES = ("app", "db", "docs/errors.md", "models/demo", "triton")
INSIDE = "llm_api_service/root/"
START_SECONDS = 120
pytestmark = [
    pytest.mark.trial,  # environments of their own
    pytest.mark.timeout(300),
]


@dataclass(frozen=True)
class Package:
    """The command, installed, and a working directory for it that has nothing of the checkout."""

    wheel: Path
    command: Path
    directory: Path

    @property
    def environment(self) -> dict[str, str]:
        """Variables of a user who has set none of the service's."""
        ours = re.compile(r"LLM_|TRITON|PYTHON|VIRTUAL_ENV")
        kept = {name: value for name, value in os.environ.items() if not ours.match(name)}
        return kept | {"XDG_DATA_HOME": str(self.directory / "share")}

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.command, *arguments],
            cwd=self.directory, env=self.environment | variables, capture_output=True, text=True, check=False,
        )  # fmt: skip


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    """It sees the libraries of the tests' environment: their versions are those of the locks."""
    place = tmp_path_factory.mktemp("package")
    build: list[str | Path] = [
        sys.executable,
        "-m",
        "hatchling",
        "build",
        "-t",
        "wheel",
        "-d",
        place,
    ]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = place.glob("*.whl")
    venv = place / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    (site,) = venv.glob("lib/python*/site-packages")
    (site / "libraries.pth").write_text(sysconfig.get_paths()["purelib"])
    uv: list[str | Path] = [
        Path(sys.executable).with_name("uv"),
        "pip",
        "install",
        "--quiet",
        "--offline",
    ]
    subprocess.run([*uv, "--no-deps", "--python", venv / "bin" / "python", wheel], check=True)
    (place / "elsewhere").mkdir()
    return Package(wheel, venv / "bin" / "llm-api-service", place / "elsewhere")


@pytest.fixture(scope="module")
def output(package: Package) -> Iterator[Path]:
    """The output of `up`, which is ready. It uses the tests' Triton, and the default data directory."""
    file, port = package.directory / "output", processes.free_port()
    options = ["--light", "--port", str(port), "--triton-venv", str(ROOT / ".venv-triton")]
    with file.open("wb") as stream:
        process = psutil.Popen(
            [package.command, "up", *options],
            cwd=package.directory, env=package.environment | {"LLM_INDEXES_FILE": ""},
            stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + START_SECONDS
        while "Ready in" not in file.read_text():
            assert process.poll() is None, file.read_text()
            assert time.monotonic() < deadline, file.read_text()
            time.sleep(0.05)
        yield file
    finally:
        process.send_signal(signal.SIGINT)
        status = process.wait(60)
    assert status == 0, file.read_text()


def metadata(package: Package) -> Message:
    with zipfile.ZipFile(package.wheel) as wheel:
        # The vLLM backend has one of its own, deeper in the wheel.
        (name,) = (
            one for one in wheel.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", one)
        )
        return BytesParser().parsebytes(wheel.read(name))


def test_the_wheel_has_the_files_that_the_commands_read(package: Package) -> None:
    with zipfile.ZipFile(package.wheel) as wheel:
        names = {one.removeprefix(INSIDE) for one in wheel.namelist() if one.startswith(INSIDE)}
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *FILES]
    listed = subprocess.run(listing, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert names == {one for one in listed.split("\0") if one and (ROOT / one).exists()}


def test_the_wheel_requires_the_versions_of_the_locks(package: Package) -> None:
    required = [Requirement(one) for one in metadata(package).get_all("Requires-Dist", [])]
    assert all(re.fullmatch(r"==[\w.]+", str(one.specifier)) for one in required)
    names = {one.name.lower() for one in required}
    for file in ("requirements.in", "requirements-embedded.in", "requirements-uv.in"):
        asked = re.findall(r"^[A-Za-z][\w.-]*", (ROOT / file).read_text(), re.MULTILINE)
        assert names >= {name.lower() for name in asked}
    hashed = re.findall(r"^(\S+==\S+)", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    assert {f"{one.name}{one.specifier}" for one in required} >= set(hashed)


def test_help_lists_the_commands(package: Package) -> None:
    listed = package.run("--help").stdout
    assert listed.startswith("usage: llm-api-service ")
    assert all(f"\n    {command} " in listed for command in _COMMANDS)


@pytest.mark.parametrize("command", ["up", "token", "index", "launch"])
def test_a_command_names_itself(package: Package, command: str) -> None:
    ended = package.run(command, "--help")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith(f"usage: llm-api-service {command} ")
    assert "python -m" not in ended.stdout


def test_the_default_data_directory_is_the_users(package: Package) -> None:
    """XDG_DATA_HOME, and no folder of the working directory."""
    text = re.sub(r"\s+", "", package.run("up", "--help", COLUMNS="1000").stdout)
    assert f"({package.directory}/share/llm-api-service)" in text


async def test_migrate(package: Package, postgres_server: PostgresServer) -> None:
    await postgres_server.execute("CREATE DATABASE of_the_package")
    settings = make_settings(postgres_server, "of_the_package")
    variables = {
        "LLM_DATABASE_URL": f"{postgres_server.host}:{postgres_server.port}",
        "LLM_DATABASE_ADMIN_USER": postgres_server.user,
        "LLM_DATABASE_PASSWORD": postgres_server.password,
        "LLM_DATABASE_DB": "of_the_package",
    }
    try:
        unprepared = package.run("team", "list", **variables)
        assert "run `llm-api-service migrate`" in unprepared.stderr
        migrated = package.run("migrate", **variables)
        assert migrated.returncode == 0, migrated.stderr
        connection = await connect(settings)
        try:
            found = await connection.fetchval("SELECT version_num FROM alembic_version")
        finally:
            await connection.close()
        assert found == max(one.name[:4] for one in (ROOT / "db" / "versions").glob("0*.py"))
    finally:
        await postgres_server.execute("DROP DATABASE of_the_package WITH (FORCE)")


def test_a_request_is_served(output: Path) -> None:
    """By the line that `up` prints."""
    curl = re.search(r"curl .*/results/.*", output.read_text())
    assert curl is not None
    answer = subprocess.run(shlex.split(curl[0]), capture_output=True, check=True).stdout
    assert b'"state":"completed"' in answer


def test_the_page_and_the_documents_are_served(output: Path) -> None:
    addresses = re.findall(r"(?:Page|Docs) +(\S+)", output.read_text())
    assert len(addresses) == 2
    for address in addresses:
        assert httpx.get(address, follow_redirects=True).status_code == httpx.codes.OK
    page = httpx.get(addresses[0], follow_redirects=True).text
    linked = re.findall(r'(?:src|href)="(/static/[^"]+)"', page)
    assert linked
    for path in linked:
        assert httpx.get(f"{addresses[0]}{path}").status_code == httpx.codes.OK, path


def test_the_printed_command_reaches_the_database(package: Package, output: Path) -> None:
    line = re.search(r"CLI +(.*) --help", output.read_text())
    assert line is not None
    data = package.directory / "share" / "llm-api-service"
    assert str(data) in line[1]
    assert not (package.directory / ".data").exists()
    ended = subprocess.run(
        ["sh", "-c", f"{line[1]} token create --team red && {line[1]} doctor"],
        cwd=package.directory, env=package.environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.stdout.startswith("llm_"), ended.stderr
    assert "schema" in ended.stdout
