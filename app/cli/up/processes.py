"""Child processes that never outlive their parent, even after a kill.

Every child asks the kernel for a signal at our death. In `up` we are also the reaper of our
descendants: a grandchild whose parent died (an engine whose Triton died) becomes our child, and
`reap_orphans` ends it.
"""

import asyncio
import contextlib
import ctypes
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import psutil

from app.provisioning.job_script import LAUNCH_VARIABLE

LOG_MAX_BYTES = 20_000_000
_LOG_TAIL_BYTES = 100_000
_REPORT_SECONDS = 0.5
_PR_SET_CHILD_SUBREAPER = 36
# Below Linux's range for outgoing connections, which could take a port between the check and its use.
_PORTS = range(10_240, 32_768)

# Process ids of the children that we started: all others were adopted.
_spawned: dict[int, subprocess.Popen[bytes]] = {}
_adopted: dict[int, float] = {}


class StartError(Exception):
    """A part could not start; the message is one line that names the remedy or the log."""


def free_port() -> int:
    for port in random.sample(_PORTS, 100):
        if is_port_free(port):
            return port
    raise StartError("No free TCP port found on 127.0.0.1 between 10240 and 32767.")


def is_port_free(port: int) -> bool:
    with socket.socket() as probe:
        # As servers do: lingering connections of an earlier server do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def spawn(
    command: Sequence[str | Path],
    *,
    log_file: Path,
    env: Mapping[str, str],
    death_signal: signal.Signals = signal.SIGTERM,
    identity: Sequence[str] = (),
    cwd: Path | None = None,
) -> subprocess.Popen[bytes]:
    """Start a child whose output is appended to `log_file`.

    It gets `death_signal` when we die, and has a session of its own: Ctrl-C in the terminal reaches us
    alone, and Linux gives each session the same share of the processor (`autogroup` in sched(7)). In one
    session, API, worker and Triton would share what a single connection of PostgreSQL gets.
    `identity` holds further options of setpriv(1). Call it from the main thread: the kernel takes the
    end of the calling thread for the end of the parent.
    """
    wrapper = ["setpriv", *identity, f"--pdeathsig={death_signal.name.removeprefix('SIG')}", "--"]
    log_file.parent.mkdir(parents=True, exist_ok=True)
    begin_log(log_file)
    with log_file.open("ab") as log:
        try:
            process = subprocess.Popen(  # noqa: S603 - our own commands
                [*wrapper, *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(env),
                cwd=cwd,
                start_new_session=True,
            )
        except FileNotFoundError as error:
            raise StartError(
                f"{error.filename} not found: install util-linux (it holds setpriv)."
            ) from error
    _spawned[process.pid] = process
    return process


async def wait_exit(process: subprocess.Popen[bytes]) -> int:
    while process.poll() is None:
        await any_exit([process.pid], None)
    _spawned.pop(process.pid, None)
    return process.wait()


async def run_to_end(process: subprocess.Popen[bytes], report: Callable[[], None]) -> int:
    """Wait for a child's status and report its progress meanwhile; a cancellation stops it."""
    waiting = asyncio.create_task(wait_exit(process))
    try:
        while not waiting.done():
            report()
            await asyncio.wait({waiting}, timeout=_REPORT_SECONDS)
    finally:
        if not waiting.done():
            await stop(process, signal.SIGTERM, 5)
            waiting.cancel()
    return waiting.result()


async def any_exit(pids: Iterable[int], seconds: float | None) -> None:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    with contextlib.ExitStack() as descriptors:
        for pid in pids:
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                return
            descriptors.callback(os.close, descriptor)
            loop.add_reader(descriptor, ended.set)
            descriptors.callback(loop.remove_reader, descriptor)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await ended.wait()


async def stop(process: subprocess.Popen[bytes], stop_signal: signal.Signals, grace: float) -> None:
    """Ask a child to end, kill it after `grace` seconds, and kill its remaining descendants."""
    family = descendants(process.pid)
    if process.poll() is None:
        process.send_signal(stop_signal)
    try:
        async with asyncio.timeout(grace):
            await wait_exit(process)
    except TimeoutError:
        process.kill()
        await wait_exit(process)
    kill(family)


class ChildPart:
    """A part that is one child process, which `stop_signal` ends within `grace` seconds."""

    def __init__(
        self,
        name: str,
        log_file: Path,
        *,
        grace: float,
        stop_signal: signal.Signals = signal.SIGTERM,
    ) -> None:
        self.name = name
        self.log_file = log_file
        self._grace = grace
        self._stop_signal = stop_signal
        self._process: subprocess.Popen[bytes] | None = None

    async def wait(self) -> str:
        """Return the reason when the process has ended."""
        if self._process is None:
            return "is not running"
        return describe_status(await wait_exit(self._process))

    async def stop(self) -> None:
        await self._stop(self._stop_signal)

    async def _stop(self, stop_signal: signal.Signals) -> None:
        if self._process is not None:
            await stop(self._process, stop_signal, self._grace)
            self._process = None


def family(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return [psutil.Process(pid), *descendants(pid)]
    return []


def descendants(pid: int) -> list[psutil.Process]:
    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def kill(processes: Iterable[psutil.Process]) -> None:
    """SIGKILL those that still run (a reused process id is noticed and spared)."""
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


def become_reaper() -> None:
    """Have the kernel give us the orphans among our descendants, instead of to process 1."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise StartError(f"prctl: {os.strerror(ctypes.get_errno())}")


def reap_orphans(grace: float, *, launches: bool = False) -> None:
    """End the descendants that became ours at least `grace` seconds ago; collect the dead ones.

    Servers that a worker launched are daemons: they are ended, completely, only with `launches`. Only
    for a process that starts every child of its own through `spawn`.
    """
    now = time.monotonic()
    children = {child.pid: child for child in psutil.Process().children()}
    for pid in set(children) - set(_spawned):
        since = _adopted.setdefault(pid, now)
        is_launch = _is_launch(children[pid])
        if is_launch and launches:
            kill([children[pid], *descendants(pid)])
        elif now - since >= grace and not is_launch:
            kill([children[pid]])
        # The kernel keeps uncollected children as zombies.
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
    for pid in set(_adopted) - set(children):
        del _adopted[pid]


def _is_launch(process: psutil.Process) -> bool:
    try:
        return LAUNCH_VARIABLE in process.environ()
    except psutil.Error:
        return False


def describe_status(status: int) -> str:
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"ended with status {status}"


def begin_log(log_file: Path) -> int:
    """The byte of a log where the lines of the next child begin; a long log is put aside."""
    size = log_file.stat().st_size if log_file.exists() else 0
    if size <= LOG_MAX_BYTES:
        return size
    log_file.replace(log_file.with_suffix(".old.log"))
    return 0


def log_text(log_file: Path, start: int) -> str:
    """The part of a log after byte `start` (its end, if that is long); "" if it was removed."""
    if not log_file.exists():
        return ""
    with log_file.open("rb") as log:
        log.seek(max(start, log_file.stat().st_size - _LOG_TAIL_BYTES))
        return log.read().decode(errors="replace")


def last_lines(log_file: Path, start: int, count: int = 3) -> str:
    """The last lines of a log after byte `start`, joined to one."""
    lines = [line.strip() for line in log_text(log_file, start).splitlines()]
    return " | ".join([line for line in lines if line][-count:])
