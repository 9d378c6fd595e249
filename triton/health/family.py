"""A process with all its descendants, also those in sessions of their own (Linux)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

# Options of prctl(2).
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PAUSE = 0.05
_KILL_SECONDS = 20.0  # a process that frees gigabytes of GPU memory needs some
_libc = ctypes.CDLL(None)


def adopt_orphans() -> None:
    """Make orphaned descendants children of this process instead of init's."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent(number: int) -> None:
    """Have the kernel send this signal when the thread that started this process ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def kill_descendants(own: int | None = None) -> bool:
    """SIGKILL every descendant of this process until none is left; False after 20 s.

    `own`: a child whose exit status the caller collects.
    """
    deadline = time.monotonic() + _KILL_SECONDS
    while time.monotonic() < deadline:
        alive = 0
        for pid, state in _descendants():
            if state != "Z":
                alive += 1
                _send(pid, signal.SIGKILL)
            elif pid != own:
                _collect(pid)
        if not alive:
            return True
        time.sleep(_PAUSE)
    return False


def keep(parent: int, command: list[str]) -> int:
    """Run a command and end its whole family with it, or with `parent`; the exit status.

    A process of its own: it outlives a supervisor killed by SIGKILL for as long as that takes.
    """
    signal.signal(signal.SIGUSR1, _kill_and_exit)
    adopt_orphans()
    die_with_parent(signal.SIGUSR1)
    if os.getppid() != parent:
        return 128 + signal.SIGKILL
    try:
        child = subprocess.Popen(
            command,
            start_new_session=True,
            # A keeper that is killed takes its command along.
            preexec_fn=lambda: die_with_parent(signal.SIGKILL),
        )
    except OSError as error:
        print(f"cannot run {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        return 127

    # Not child.send_signal(), which would collect the status itself.
    signal.signal(signal.SIGTERM, lambda *_: _send(child.pid, signal.SIGTERM))
    ended, status = os.wait()
    while ended != child.pid:  # an orphan of the family
        ended, status = os.wait()
    kill_descendants()
    return exit_status(os.waitstatus_to_exitcode(status))


def exit_status(code: int) -> int:
    """A return code of `subprocess` (negative: a signal) as a shell reports it."""
    return code if code >= 0 else 128 - code


def _kill_and_exit(_number: int, _frame: FrameType | None) -> None:
    kill_descendants()
    os._exit(128 + signal.SIGKILL)


def _descendants() -> list[tuple[int, str]]:
    """Process ids of all descendants with their states, as in /proc/PID/stat."""
    children: dict[int, list[tuple[int, str]]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                # The name, in parentheses, may hold anything.
                fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
            except OSError:  # it has ended
                continue
            state, parent = fields[0].decode(), int(fields[1])
            children.setdefault(parent, []).append((int(entry.name), state))
    found: list[tuple[int, str]] = []
    waiting = [os.getpid()]
    while waiting:
        for child in children.get(waiting.pop(), ()):
            found.append(child)
            waiting.append(child[0])
    return found


def _collect(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):  # not a child of this process
        os.waitpid(pid, os.WNOHANG)


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
