"""Hosts of a measurement or a test: network namespaces on one bridge, and processes in them.

The bridge is in the caller's own namespace. Needs root, iproute2 and the right to make namespaces.
"""

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from app.cli.up.postgres import HOST, EmbeddedPostgres
from app.cli.up.processes import ChildPart
from app.cli.up.service import ServicePart
from app.cli.up.triton import EmbeddedTriton
from bench.pgbouncer import PgBouncer
from bench.standby import Standby

_CLONE_NEWNET = 0x40000000
_NAMESPACES = Path("/run/netns")
# No interface has it: packets to a neighbour with this address arrive nowhere, and no error does.
_NOBODY = "02:00:00:00:00:fe"
_libc = ctypes.CDLL(None, use_errno=True)


class NoNetworkError(Exception):
    """This process may not make a network."""


class Host:
    """A machine: a namespace with one interface."""

    def __init__(self, namespace: str, cable: str, address: str) -> None:
        self.namespace = namespace
        self.cable = cable  # the bridge's end
        self.address = address

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Start processes on this host: they are in the namespace of the thread that starts them."""
        with (
            Path("/proc/thread-self/ns/net").open() as ours,
            (_NAMESPACES / self.namespace).open() as theirs,
        ):
            _enter(theirs.fileno())
            try:
                yield
            finally:
                _enter(ours.fileno())

    def drop(self, other: "Host") -> None:
        """Send nothing to another host."""
        _ip("-n", self.namespace, *_neighbour("replace", other), "nud", "permanent")

    def reach(self, other: "Host") -> None:
        _ip("-n", self.namespace, *_neighbour("del", other))

    def pull_cable(self) -> None:
        _ip("link", "set", self.cable, "down")

    def plug_cable(self) -> None:
        _ip("link", "set", self.cable, "up")


@contextlib.contextmanager
def network(names: Sequence[str]) -> Iterator[dict[str, Host]]:
    """Hosts by their names, and their bridge. Raises NoNetworkError where it cannot make them."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        raise NoNetworkError("needs root and iproute2")
    # Another process may have a network of its own.
    mark = f"{os.getpid() % 100_000:05d}"
    subnet = f"10.213.{os.getpid() % 250}"
    bridge, hosts = f"llmb{mark}", {}
    with contextlib.ExitStack() as stack:
        try:
            _ip("link", "add", bridge, "type", "bridge")
        except subprocess.CalledProcessError:
            raise NoNetworkError("needs the right to make bridges") from None
        stack.callback(_ip, "link", "del", bridge)
        _ip("addr", "add", f"{subnet}.1/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        for number, name in enumerate(names, 2):
            host = Host(f"llm{mark}-{name}", f"llm{mark}{number}", f"{subnet}.{number}")
            _ip("netns", "add", host.namespace)
            stack.callback(_ip, "netns", "del", host.namespace)
            _ip("link", "add", host.cable, "type", "veth", "peer", "eth0", "netns", host.namespace)
            _ip("link", "set", host.cable, "master", bridge, "up")
            _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", host.namespace, "link", "set", device, "up")
            hosts[name] = host
        yield hosts


def _neighbour(action: str, other: Host) -> list[str]:
    return ["neigh", action, other.address, "lladdr", _NOBODY, "dev", "eth0"]


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def _enter(descriptor: int) -> None:
    if _libc.setns(descriptor, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


class _OnHost(ChildPart):
    host: Host

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid


class HostPart(_OnHost, ServicePart):
    """API or worker on a host."""

    def _run(self) -> subprocess.Popen[bytes]:
        with self.host.entered():
            return super()._run()


class HostPostgres(_OnHost, EmbeddedPostgres):
    """PostgreSQL on a host."""

    async def _initialise(self, binaries: Path) -> None:
        await super()._initialise(binaries)
        with (self._cluster / "pg_hba.conf").open("a") as file:
            for databases in ("all", "replication"):  # the second is no database
                file.write(f"host {databases} all 10.213.0.0/16 scram-sha-256\n")

    def _spawn(self, command: Sequence[str | Path]) -> subprocess.Popen[bytes]:
        with self.host.entered():
            return super()._spawn(command)

    @property
    def address(self) -> str:
        return self.host.address


class HostStandby(HostPostgres, Standby):
    """A standby on a host."""


class HostPgBouncer(_OnHost, PgBouncer):
    """PgBouncer on a host."""

    def _spawn(self) -> subprocess.Popen[bytes]:
        with self.host.entered():
            return super()._spawn()


class HostTriton(_OnHost, EmbeddedTriton):
    """Triton on a host."""

    def address(self, protocol: str) -> str:
        return super().address(protocol).replace(HOST, self.host.address)

    def _options(self) -> list[str]:
        return [
            one.replace(f"-address={HOST}", f"-address={self.host.address}")
            for one in super()._options()
        ]

    def _spawn(self, script: list[str | Path]) -> subprocess.Popen[bytes]:
        with self.host.entered():
            return super()._spawn(script)
