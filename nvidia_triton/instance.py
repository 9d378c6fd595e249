"""A running instance, by ssh: Triton on it, the models for it, the tunnels to it.

All options of ssh are in one file of the instance's own folder of state, with checked values; ssh
and rsync run there and name the host `instance`. The program on the instance is instance.sh, sent on
standard input, with its arguments quoted.
"""

import contextlib
import fcntl
import ipaddress
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from nvidia_triton.definition import Definition
from nvidia_triton.here import check_port, models_in, taken
from nvidia_triton.progress import heartbeat, say
from nvidia_triton.vast import PROGRAM, Instance, clean

CONNECT_SECONDS = 15
_SCRIPT = Path(__file__).with_name("instance.sh")
_HEALTH = Path(__file__).absolute().parent.parent / "triton" / "health"
_HOST = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9.-]{0,252}[A-Za-z0-9])?")
_OPTIONS = f"""\
    User root
    BatchMode yes
    StrictHostKeyChecking accept-new
    UserKnownHostsFile known_hosts
    GlobalKnownHostsFile none
    UpdateHostKeys no
    ConnectTimeout {CONNECT_SECONDS}
    ServerAliveInterval 15
    ServerAliveCountMax 4
    ForwardAgent no
    ForwardX11 no
    ExitOnForwardFailure yes
    ControlMaster no
    ControlPath none
    LogLevel ERROR
"""
_SSH = ["ssh", "-F", "ssh_config"]
_CONTROL = ["-S", "tunnels.sock"]


class RemoteError(Exception):
    """Failure on the instance or of the connection to it: one line."""


class UnreachableError(RemoteError):
    """Its ssh server does not answer (yet)."""


class KeyRefusedError(RemoteError):
    """Its ssh server does not take our key (yet)."""


class Remote:
    """One instance. Methods raise RemoteError and write progress to standard error."""

    def __init__(self, state: Path, instance: Instance, key: Path | None) -> None:
        """`state` is this instance's folder, made here; without a `key`, ssh uses its own."""
        self._state = _make_private(state)
        self._id = instance.id
        lines = [f"    HostName {_checked_host(instance)}", f"    Port {instance.port}"]
        if key is not None:
            lines += [f'    IdentityFile "{key}"', "    IdentitiesOnly yes"]
        config = "\n".join(["Host instance", *lines, _OPTIONS])
        (self._state / "ssh_config").write_text(config)

    def check(self) -> None:
        """Log in and do nothing."""
        self._run([*_SSH, "--", "instance", "true"])

    def log_in(self) -> None:
        """Become an interactive ssh; returns only with an error."""
        os.chdir(self._state)
        _exec([*_SSH, "-o", "BatchMode=no", "--", "instance"])

    def start_triton(self, definition: Definition) -> None:
        """Bring the supervisor there and start the server under it, unless it runs."""
        list(self._lines(["prepare", definition.model_dir]))
        self._upload(_HEALTH, f"{definition.model_dir}.health/", [])
        ports = (
            definition.triton_http_port,
            definition.triton_grpc_port,
            definition.triton_metrics_port,
        )
        arguments = [definition.model_dir, definition.tritonserver, *map(str, ports)]
        self._tell(["start", *arguments])

    def stop_triton(self, definition: Definition) -> None:
        """End the server that we started, and its models."""
        self._tell(["stop", definition.model_dir])

    def log(self, definition: Definition, lines: int | None) -> Iterator[str]:
        """The last lines of the server's log; None: all."""
        yield from self._lines(["log", definition.model_dir, str(lines or "")])

    def deploy(self, definition: Definition) -> list[str]:
        """Bring the models here to the instance; the names of those that changed.

        Each is uploaded beside the server's repository and then appears in it in one step, as a
        link: a server that looks finds the whole old one or the whole new one.
        """
        names = models_in(definition.models)
        with self._alone():
            return self._deploy(definition, names)

    def _deploy(self, definition: Definition, names: list[str]) -> list[str]:
        list(self._lines(["prepare", definition.model_dir, *names]))
        changed = [name for name in names if self._differs(definition, name)]
        for name in changed:
            with heartbeat(f"Uploading {name}"):
                progress = ["--info=progress2"] if sys.stderr.isatty() else []
                live = f"{definition.model_dir}/{name}"
                target = f"{definition.model_dir}.deployed/{name}/incoming/"
                # Unchanged files are not sent again, and take no place twice.
                self._rsync(definition, name, target, [*progress, f"--link-dest={live}"])
        if changed:
            self._tell(["publish", definition.model_dir, *changed])
        return changed

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Two uploads at once would mix their files."""
        with (self._state / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise RemoteError(
                    f"Another upload to instance {self._id} is going on: wait for its end."
                ) from error
            yield

    def _differs(self, definition: Definition, name: str) -> bool:
        live = f"{definition.model_dir}/{name}/"
        return bool(self._rsync(definition, name, live, ["--dry-run", "--itemize-changes"]).strip())

    def _rsync(self, definition: Definition, name: str, target: str, options: Sequence[str]) -> str:
        return self._upload(definition.models / name, target, options)

    def _upload(self, folder: Path, target: str, options: Sequence[str]) -> str:
        # Times of folders do not identify models; times of files show which are equal.
        command = [
            "rsync", "--recursive", "--times", "--omit-dir-times", "--copy-links", "--delete",
            "--partial", "--protect-args", "--chmod=D755,F644",
            "--exclude=.*", "--exclude=__pycache__", "--exclude=*.pyc",
            *options, "--rsh=ssh -F ssh_config",
            "--", f"{folder}/", f"instance:{target}",
        ]  # fmt: skip
        return self._run(command, show="--info=progress2" in options)

    def open_tunnels(self, definition: Definition) -> None:
        """Forward our ports to Triton's, until `close_tunnels` or until the connection ends."""
        forwards = [
            f"{definition.tunnels_address}:{here}:127.0.0.1:{there}"
            for here, there in definition.tunnels.items()
        ]
        known = self._state / "tunnels"
        if tunnels_are_open(self._state):
            if known.exists() and known.read_text().split() == forwards:
                say(f"The tunnels to instance {self._id} are open already.")
                return
            raise RemoteError(
                f"Other tunnels to instance {self._id} are open: "
                f"make close-tunnels-tritonserver CONTRACT_ID={self._id}"
            )
        for port in definition.tunnels:
            check_port(definition.tunnels_address, port)
        (self._state / "tunnels.sock").unlink(missing_ok=True)  # of a connection that died
        options = [word for forward in forwards for word in ("-L", forward)]
        command = [*_SSH, *_CONTROL, "-o", "ControlMaster=yes", "-f", "-N", *options]
        # A file, because the connection goes on with our standard error for as long as it lives.
        log = self._state / "tunnels.log"
        with log.open("w") as errors:
            ended = _call([*command, "--", "instance"], self._state, errors)
        if ended != 0:
            _raise_ssh_error(log.read_text(), self._id)
        known.write_text("\n".join(forwards))

    def _tell(self, arguments: Sequence[str]) -> None:
        for line in self._lines(arguments):
            say(line)

    def _lines(self, arguments: Sequence[str]) -> Iterator[str]:
        """Run instance.sh there; its lines as they come."""
        remote = shlex.join(["sh", "-s", "--", *arguments])
        with _popen([*_SSH, "-T", "--", "instance", remote], self._state) as process:
            assert process.stdin
            assert process.stdout
            assert process.stderr
            # It fits the pipe: a server that does not read it cannot block us.
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(_SCRIPT.read_text())
                process.stdin.close()
            for line in process.stdout:
                yield clean(line, 2000)
            errors = process.stderr.read()
        if process.returncode == 255:
            _raise_ssh_error(errors, self._id)
        if process.returncode != 0:
            raise RemoteError(f"Instance {self._id}: {_last(errors)}")

    def _run(self, command: Sequence[str], *, show: bool = False) -> str:
        with _popen(command, self._state, show=show) as process:
            output, errors = process.communicate()
        if process.returncode == 0:
            return output or ""
        if process.returncode == 255 or "ssh:" in errors or "Permission denied (" in errors:
            _raise_ssh_error(errors, self._id)
        raise RemoteError(f"{command[0]}: {_first(errors)}")


def tunnels_are_open(state: Path) -> bool:
    """True while a connection of `open_tunnels` lives."""
    return _control(state, "check")


def close_tunnels(state: Path) -> bool:
    """End that connection and no other; whether there was one."""
    was_open = _control(state, "exit")
    (state / "tunnels").unlink(missing_ok=True)
    return was_open


def _checked_host(instance: Instance) -> str:
    """The address from Vast.ai; raises UnreachableError while it has none."""
    if not instance.host or not instance.port:
        raise UnreachableError(f"Instance {instance.id} has no ssh address yet.")
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(instance.host))
    if not _HOST.fullmatch(instance.host) or not 0 < instance.port < 65536:
        raise RemoteError(f"Instance {instance.id} has the ssh address {instance.host!a}.")
    return instance.host


def _make_private(folder: Path) -> Path:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def _control(state: Path, command: str) -> bool:
    if not (state / "tunnels.sock").exists():
        return False
    return _call([*_SSH, *_CONTROL, "-O", command, "--", "instance"], state, None) == 0


def _call(command: Sequence[str], cwd: Path, errors: IO[str] | None) -> int:
    try:
        return subprocess.call(  # noqa: S603 - ssh with checked arguments
            command,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors or subprocess.DEVNULL,
        )
    except FileNotFoundError as error:
        raise _not_installed(command[0]) from error


def _popen(command: Sequence[str], cwd: Path, *, show: bool = False) -> subprocess.Popen[str]:
    try:
        return subprocess.Popen(  # noqa: S603 - ssh and rsync with checked arguments
            command,
            cwd=cwd,
            stdin=subprocess.PIPE,
            stdout=sys.stderr if show else subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
    except FileNotFoundError as error:
        raise _not_installed(command[0]) from error


def _exec(command: list[str]) -> None:
    try:
        os.execvp(command[0], command)  # noqa: S606 - ssh with checked arguments
    except FileNotFoundError as error:
        raise _not_installed(command[0]) from error


def _not_installed(program: str) -> RemoteError:
    package = {"ssh": "openssh-client"}.get(program, program)
    return RemoteError(f"{program} is not installed: apt-get install {package}")


def _raise_ssh_error(errors: str, contract_id: int) -> None:
    reason = _last(errors)
    if "Permission denied" in errors:
        raise KeyRefusedError(
            f"Instance {contract_id} refuses your ssh key: `{PROGRAM} create ssh-key "
            '"$(cat FILE.pub)"` before it is created, or PRIVATE_SSH_KEY=FILE.'
        )
    if "HOST IDENTIFICATION HAS CHANGED" in errors:
        raise RemoteError(
            f"Instance {contract_id} has another host key than before: if that is right, remove "
            f"nvidia_triton/.state/{contract_id}/known_hosts"
        )
    if found := re.search(r"bind \[([0-9.]+)\]:(\d+): Address already in use", errors):
        raise RemoteError(taken(found[1], found[2]))
    raise UnreachableError(f"Instance {contract_id} does not answer: {reason}")


def _first(errors: str) -> str:
    return clean(next((line for line in errors.splitlines() if line.strip()), "no reason given"))


def _last(errors: str) -> str:
    lines = [line for line in errors.splitlines() if line.strip()]
    return clean(lines[-1] if lines else "no reason given")
