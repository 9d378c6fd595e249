"""Commands on a profile's host: here, or over ssh. Always a list of words, never a line of shell.

ssh hands its command to the remote shell as one line, so each word is quoted for it; the host and
all options come from the profile only. All commands of a profile share one connection
(ControlMaster, https://man.openbsd.org/ssh_config), which ends a minute after the last.
"""

import asyncio
import contextlib
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeVar

from app.provisioning.profiles import Profile

COMMAND_SECONDS = 20.0
_LINE_SECONDS = 120.0  # between two lines of a command that reports its progress
_MAX_LINE = 65_536
_CONNECT_SECONDS = 8
_INHERITED = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|LANG|LC_\w+|TZ|TMPDIR|XDG_RUNTIME_DIR|SSH_AUTH_SOCK|KRB5\w+|"
    r"SLURM_\w+|OMP_NUM_THREADS"
)
_MAX_CONCURRENT_COMMANDS = 8  # commands that run at the same time
MAX_OUTPUT = 1 << 20
_T = TypeVar("_T")
_SSH_FAILED = 255  # ssh's own exit status when it did not reach the other side


class HostError(Exception):
    """The host was not reached; `message` is for people. Another try may succeed."""


@dataclass(frozen=True, slots=True)
class CommandOutput:
    """Exit status and output of a command."""

    status: int
    output: str
    error: str

    @property
    def error_line(self) -> str:
        return " ".join(self.error.split())[-400:]


class Hosts:
    """Runs commands for profiles. Use it inside `async with`."""

    def __init__(self) -> None:
        self._sockets: Path | None = None
        # Not the event loop's own way to start processes: uvloop's fails on a process that ends before it
        # has read its input, and leaks the pipes to background processes.
        self._threads = ThreadPoolExecutor(_MAX_CONCURRENT_COMMANDS, thread_name_prefix="launches")

    async def __aenter__(self) -> "Hosts":
        return self

    async def __aexit__(self, *_: object) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._sockets is None:
            return
        for socket in self._sockets.iterdir():
            with contextlib.suppress(HostError):
                _call(["ssh", "-o", f"ControlPath={socket}", "-O", "exit", "--", "all"])
        shutil.rmtree(self._sockets, ignore_errors=True)

    async def run(
        self,
        profile: Profile,
        words: Sequence[str],
        *,
        content: bytes = b"",
        environment: Mapping[str, str] | None = None,
    ) -> CommandOutput:
        """Run a command with this standard input. Raises HostError.

        `environment` is added, if the host is this machine.
        """
        words, environment = self._placed(profile, words), _local(profile, environment)
        loop = asyncio.get_running_loop()
        answer = await loop.run_in_executor(self._threads, _call, words, content, environment)
        _check_reached(profile, answer)
        return answer

    async def follow(
        self,
        profile: Profile,
        words: Sequence[str],
        *,
        content: bytes = b"",
        environment: Mapping[str, str] | None = None,
    ) -> AsyncGenerator[str]:
        """The output's lines of a long command, as they come. Raises HostError, also if it fails.

        The command has to write a line each minute, and to end when its output is closed: it runs no
        longer than this generator. Use it inside `contextlib.aclosing`.
        """
        words, environment = self._placed(profile, words), _local(profile, environment)
        with tempfile.TemporaryFile() as errors:
            process = _start(words, environment, errors)
            assert process.stdout is not None
            try:
                await self._within_a_time(words[0], _send, process, content)
                read = process.stdout.readline
                while line := await self._within_a_time(words[0], read, _MAX_LINE):
                    yield _text(line)
                status = await self._within_a_time(words[0], process.wait)
            finally:
                process.kill()
                # A process that waits for a dead file system does not end; the loop must not wait for it.
                threading.Thread(target=_reap, args=[process], daemon=True).start()
            errors.seek(0)
            answer = CommandOutput(status, "", _text(errors.read()))
        _check_reached(profile, answer)
        if status != 0:
            raise HostError(answer.error_line or f"{words[0]} ended with status {status}")

    async def _within_a_time(self, program: str, work: Callable[..., _T], *arguments: object) -> _T:
        """The result of a thread that waits for a program. Raises HostError."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_LINE_SECONDS):
                return await loop.run_in_executor(self._threads, work, *arguments)
        except TimeoutError:
            raise HostError(f"{program} has reported nothing for {_LINE_SECONDS:.0f} s") from None

    def _placed(self, profile: Profile, words: Sequence[str]) -> Sequence[str]:
        """The command as it is started here."""
        if profile.host is None:
            return words
        command = [*self.ssh(profile), "-o", f"ControlPath={self._socket_folder()}/%C"]
        command += ["-o", "ControlMaster=auto", "-o", "ControlPersist=60"]
        return [*command, "--", profile.host, shlex.join(words)]

    def ssh(self, profile: Profile) -> list[str]:
        command = ["ssh", "-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={_CONNECT_SECONDS}",
                   "-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=2"]  # fmt: skip
        if profile.known_hosts is not None:
            command += ["-o", f"UserKnownHostsFile={profile.known_hosts}"]
            command += ["-o", "StrictHostKeyChecking=yes"]
        if profile.identity_file is not None:
            command += ["-o", "IdentitiesOnly=yes", "-i", profile.identity_file]
        if profile.ssh_port is not None:
            command += ["-p", str(profile.ssh_port)]
        if profile.user is not None:
            command += ["-l", profile.user]
        return command

    def _socket_folder(self) -> Path:
        if self._sockets is None:
            self._sockets = Path(tempfile.mkdtemp(prefix="llm-ssh-"))
        return self._sockets


def inherited() -> dict[str, str]:
    """Environment of commands and jobs: none of the service's secrets."""
    return {name: value for name, value in os.environ.items() if _INHERITED.fullmatch(name)}


def _local(profile: Profile, environment: Mapping[str, str] | None) -> dict[str, str]:
    """The environment of a command's process here; ssh's gets no addition."""
    return inherited() | (dict(environment or {}) if profile.host is None else {})


def _check_reached(profile: Profile, answer: CommandOutput) -> None:
    if profile.host is not None and answer.status == _SSH_FAILED:
        raise HostError(f"{profile.host} cannot be reached by ssh: {answer.error_line}")


def _start(
    words: Sequence[str], environment: Mapping[str, str], errors: IO[bytes]
) -> subprocess.Popen[bytes]:
    """Start a command here. Raises HostError."""
    try:
        return subprocess.Popen(  # noqa: S603 - a list of words, each of them checked
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=environment
        )
    except OSError as error:
        raise HostError(f"{words[0]} cannot be run here: {error.strerror}") from error


def _reap(process: subprocess.Popen[bytes]) -> None:
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def _send(process: subprocess.Popen[bytes], content: bytes) -> None:
    """Write the standard input and close it; a process that reads less has its own reason."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin as target:
        target.write(content)


def _call(
    words: Sequence[str], content: bytes = b"", environment: Mapping[str, str] | None = None
) -> CommandOutput:
    """Run a command here, without a time-out. Raises HostError."""
    try:
        done = subprocess.run(  # noqa: S603 - a list of words, each of them checked
            words,
            input=content,
            capture_output=True,
            timeout=COMMAND_SECONDS,
            env=inherited() if environment is None else environment,
            check=False,
        )
    except OSError as error:
        raise HostError(f"{words[0]} cannot be run here: {error.strerror}") from error
    except subprocess.TimeoutExpired:
        raise HostError(f"{words[0]} did not end in {COMMAND_SECONDS:.0f} s") from None
    return CommandOutput(done.returncode, _text(done.stdout), _text(done.stderr))


def _text(output: bytes) -> str:
    """The end of an output, without characters that PostgreSQL refuses."""
    return output[-MAX_OUTPUT:].decode(errors="replace").replace("\x00", "\ufffd")
