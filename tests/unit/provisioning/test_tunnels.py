"""Tunnels without a host: `ssh` is a stand-in that listens, as ssh does, or ends with a message.

The trials of Slurm, Vast.ai and containers have real ones.
"""

import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import pytest

from app.provisioning.hosts import Hosts
from app.provisioning.profiles import Profile, read_profiles
from app.provisioning.tunnels import TunnelError, Tunnels

LAUNCH = UUID(int=1)
PROFILES = """
[profiles.cluster]
provider = "slurm"
host = "login.example.org"
home = "/scratch/llm"
runtime = "plain"
"""
# Its arguments are a line of `calls`; it prints a file `refusal` and ends.
SSH = f"""#!{sys.executable}
import pathlib, signal, socket, sys
folder = pathlib.Path(__file__).parent
with (folder / "calls").open("a") as calls:
    print(*sys.argv[1:], file=calls)
if (refusal := folder / "refusal").exists():
    sys.exit(refusal.read_text())
places = [sys.argv[place + 1].split(":") for place, word in enumerate(sys.argv) if word == "-L"]
kept = []
for address, port, *_ in places[::-1]:  # once the first accepts, all do
    kept.append(socket.create_server((address, int(port))))
signal.pause()
"""


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the command `ssh`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "ssh").write_text(SSH)
    (folder / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


@pytest.fixture
def profile(tmp_path: Path) -> Profile:
    file = tmp_path / "profiles.toml"
    file.write_text(PROFILES)
    return read_profiles(file)["cluster"]


@pytest.fixture
def taken() -> Iterator[int]:
    """A port of the loopback that another process has."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield other.getsockname()[1]


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


async def test_a_tunnel_has_a_port_for_each_of_the_node_s(ssh: Path, profile: Profile) -> None:
    async with Hosts() as hosts, Tunnels(hosts) as tunnels:
        local = await tunnels.ensure(profile, LAUNCH, "node7", (8001, 8002), None)
        assert len(set(local)) == 2
        words = (ssh / "calls").read_text().split()
        for here, there in zip(local, (8001, 8002), strict=True):
            assert f"127.0.0.1:{here}:node7:{there}" in words
        assert words[-2:] == ["--", "login.example.org"]
        assert "ExitOnForwardFailure=yes" in words  # else one of both ports could be missing
        assert "ControlPath=none" in words  # else it would end with the connection of the commands
        assert all(map(is_open, local))
        assert await tunnels.ensure(profile, LAUNCH, "node7", (8001, 8002), None) == local
        other = await tunnels.ensure(profile, UUID(int=2), "node8", (8001, 8002), None)
        assert not set(other) & set(local)
        await tunnels.close(UUID(int=2))
        assert not any(map(is_open, other))
        assert all(map(is_open, local))
    assert not any(map(is_open, local))
    assert len((ssh / "calls").read_text().splitlines()) == 2


async def test_the_next_tunnel_has_the_former_ports_if_they_are_free(
    ssh: Path, profile: Profile, taken: int
) -> None:
    async with Hosts() as hosts:
        async with Tunnels(hosts) as former:
            local = await former.ensure(profile, LAUNCH, "node7", (8001, 8002), None)
        async with Tunnels(hosts) as tunnels:
            assert await tunnels.ensure(profile, LAUNCH, "node7", (8001, 8002), local) == local
            await tunnels.close(LAUNCH)
            given = await tunnels.ensure(profile, LAUNCH, "node7", (8001, 8002), (local[0], taken))
            assert taken not in given


async def test_a_tunnel_that_has_ended_is_opened_again(ssh: Path, profile: Profile) -> None:
    async with Hosts() as hosts, Tunnels(hosts) as tunnels:
        local = await tunnels.ensure(profile, LAUNCH, "node7", (8001,), None)
        process, _ = tunnels._open[LAUNCH]
        process.kill()
        await process.wait()
        assert not is_open(local[0])
        again = await tunnels.ensure(profile, LAUNCH, "node7", (8001,), local)
        assert again == local
        assert is_open(local[0])


async def test_the_reason_is_the_output_of_ssh(ssh: Path, profile: Profile) -> None:
    (ssh / "refusal").write_text("Permission denied\n(publickey).")
    async with Hosts() as hosts, Tunnels(hosts) as tunnels:
        with pytest.raises(
            TunnelError, match=r"^ssh opened no tunnel: Permission denied \(publickey\)\.$"
        ):
            await tunnels.ensure(profile, LAUNCH, "node7", (8001,), None)
        (ssh / "refusal").unlink()
        assert is_open((await tunnels.ensure(profile, LAUNCH, "node7", (8001,), None))[0])
