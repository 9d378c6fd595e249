"""ssh tunnels to servers behind a login host: children of the process that follows the launch.

A tunnel ends with its process, so none is left behind; the launch's next follower opens it
again, on the same ports if they are free.
"""

import asyncio
import contextlib
import socket
from uuid import UUID

from app.provisioning.hosts import Hosts, inherited
from app.provisioning.profiles import Profile

_OPEN_SECONDS = 15.0
_POLL_SECONDS = 0.05
_DIES_WITH_US = ["setpriv", "--pdeathsig=TERM", "--"]


Ports = tuple[int, ...]  # of the server's protocols (directory.PublishedAddress)


class TunnelError(Exception):
    """The tunnel could not be opened; another try may succeed."""


class Tunnels:
    """The open tunnels of this process, one per launch. Use it inside `async with`."""

    def __init__(self, hosts: Hosts) -> None:
        self._hosts = hosts
        self._open: dict[UUID, tuple[asyncio.subprocess.Process, Ports]] = {}
        self._listening: set[asyncio.Task[str]] = set()

    async def __aenter__(self) -> "Tunnels":
        return self

    async def __aexit__(self, *_: object) -> None:
        for launch in list(self._open):
            await self.close(launch)

    async def ensure(
        self, profile: Profile, launch: UUID, node: str, ports: Ports, wanted: Ports | None
    ) -> Ports:
        """Open a tunnel to the node's ports, if there is none, and return its local ports.

        `wanted` are the ports of a former tunnel. Raises TunnelError.
        """
        known = self._open.get(launch)
        if known is not None and known[0].returncode is None:
            return known[1]
        local = (
            wanted
            if wanted and all(_is_free(profile.tunnel_listen, port) for port in wanted)
            else None
        )
        local = local or tuple(_free_port(profile.tunnel_listen) for _ in ports)
        process = await asyncio.create_subprocess_exec(
            *_DIES_WITH_US,
            *self._command(profile, node, ports, local),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env=inherited(),
        )
        said = asyncio.create_task(_listen(process), name=f"tunnel {launch}")
        self._listening.add(said)
        said.add_done_callback(self._listening.discard)
        try:
            if not await _is_open(process, profile.tunnel_listen, local[0]):
                await _end(process)
                raise TunnelError(f"ssh opened no tunnel: {await said}")
        except BaseException:
            await _end(process)
            raise
        self._open[launch] = process, local
        return local

    async def close(self, launch: UUID) -> None:
        if known := self._open.pop(launch, None):
            await _end(known[0])

    def _command(self, profile: Profile, node: str, ports: Ports, local: Ports) -> list[str]:
        assert profile.host is not None
        command = [*self._hosts.ssh(profile), "-N", "-o", "ExitOnForwardFailure=yes"]
        command += ["-o", "ControlMaster=no", "-o", "ControlPath=none"]
        for here, there in zip(local, ports, strict=True):
            command += ["-L", f"{profile.tunnel_listen}:{here}:{node}:{there}"]
        return [*command, "--", profile.host]


async def _is_open(process: asyncio.subprocess.Process, address: str, port: int) -> bool:
    """Wait until the tunnel accepts connections; False if ssh ends before, or is too slow."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_OPEN_SECONDS):
            while process.returncode is None:
                with contextlib.suppress(OSError):
                    _, writer = await asyncio.open_connection(address, port)
                    writer.close()
                    return True
                await asyncio.sleep(_POLL_SECONDS)
    return False


async def _listen(process: asyncio.subprocess.Process) -> str:
    """Read ssh's output, so that it never blocks; return its end."""
    assert process.stderr is not None
    last = b""
    while said := await process.stderr.read(4096):
        last = (last + said)[-2000:]
    return " ".join(last.decode(errors="replace").split())[-300:]


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
        return port


def _is_free(address: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True
