"""A real sshd on loopback for tests, with keys and a configuration of its own. Needs root."""

import asyncio
import contextlib
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from app.cli.up import processes

SSHD = "/usr/sbin/sshd"


def is_installed() -> bool:
    """Return True if this machine can run it."""
    return os.geteuid() == 0 and all(shutil.which(name) for name in (SSHD, "ssh", "ssh-keygen"))


class SshServer:
    """It can be stopped, with all of its sessions, and started again on the same port."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.port = processes.free_port()
        self.identity = folder / "client"
        self.known_hosts = folder / "known_hosts"
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        for name in ("host", "client"):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)],
                check=True,
            )
        host_key = (folder / "host.pub").read_text()
        self.known_hosts.write_text(f"[127.0.0.1]:{self.port} {host_key}")
        # With a shell level, bash does not read the user's ~/.bashrc: it may start programs, which are
        # cut off with the connection and leave their locks.
        environment = {"SHLVL": "2", **environment}
        variables = " ".join(f"{name}={value}" for name, value in environment.items())
        (folder / "sshd_config").write_text(
            f"Port {self.port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\n"
            f"AuthorizedKeysFile {folder}/client.pub\nPidFile {folder}/pid\nUsePAM no\n"
            f"StrictModes no\nPermitRootLogin prohibit-password\nSetEnv {variables}\n"
        )

    @property
    def profile(self) -> str:
        """The members of a profile that reaches it."""
        return (
            f'host = "127.0.0.1"\nssh_port = {self.port}\nuser = "root"\n'
            f'identity_file = "{self.identity}"\nknown_hosts = "{self.known_hosts}"\n'
        )

    async def start(self) -> None:
        Path("/run/sshd").mkdir(exist_ok=True)
        self._process = processes.spawn(
            [SSHD, "-D", "-e", "-f", self._folder / "sshd_config"],
            log_file=self._folder / "sshd.log",
            env=os.environ,
        )
        while processes.is_port_free(self.port):
            assert self._process.poll() is None, (self._folder / "sshd.log").read_text()
            await asyncio.sleep(0.05)

    async def stop(self) -> None:
        assert self._process is not None
        family = processes.descendants(self._process.pid)
        self._process.kill()
        await processes.wait_exit(self._process)
        processes.kill(family)


@contextlib.asynccontextmanager
async def start_ssh(folder: Path, environment: Mapping[str, str]) -> AsyncIterator[SshServer]:
    """A server for as long as the context lasts."""
    server = SshServer(folder, environment)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()
