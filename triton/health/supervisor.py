"""Supervisor of one server: runs it, checks its health, restarts it when it ended or is ill.

Illness is the check's (check.py), a crash that the server logged without ending, or an engine whose
backend unloaded its model. A server that starts may take its time, as large models load for minutes;
a model that is ready and fails is ill from the beginning.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from check import Report
from family import adopt_orphans, exit_status, kill_descendants

# Triton logs it when it crashes, writes a trace and ends. Where the heap broke (SIGABRT), the trace
# may wait for the heap's lock indefinitely; the server then answers control calls and no others.
CRASH = re.compile(rb"^Signal \((?:6|11)\) received")
# NVIDIA's vLLM backend (with ENABLE_VLLM_HEALTH_CHECK), and this repository's.
UNLOADED = re.compile(
    rb"Engine is not healthy and model will be unloaded|the engine of model \S+ died: unloading it"
)
_POLL_SECONDS = 0.2
_START_INTERVAL = 1.0  # most seconds between checks until the first healthy one
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0
_STEADY_SECONDS = 60.0  # so long in health resets the pauses
_LONGEST_LINE = 4096  # bytes
_COPY_SECONDS = 5.0  # for the rest of an ended server's output


@dataclass(frozen=True)
class Limits:
    """Options of `run`; seconds, and counts. `start_seconds` 0 and `restarts` -1: without limit."""

    interval: float
    failures: int
    start_seconds: float
    stop_seconds: float
    crash_seconds: float
    restarts: int
    must_start: bool


class Output:
    """Copies a server's output and notes the lines that mean illness."""

    def __init__(self) -> None:
        self.crashed_at: float | None = None
        self.has_unloaded = False

    def copy(self, source: IO[bytes], target: int) -> None:
        """Copy until the end of `source`, also when `target` has no reader; closes `source`."""
        rest = b""
        while data := os.read(source.fileno(), 65536):
            with contextlib.suppress(OSError):
                _write(target, data)
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._note(line)
            rest = rest[-_LONGEST_LINE:]
        source.close()

    def _note(self, line: bytes) -> None:
        if CRASH.search(line):
            self.crashed_at = time.monotonic()
        elif UNLOADED.search(line):
            self.has_unloaded = True


class Life:
    """One run of the server, from its start to its end."""

    def __init__(self, command: list[str], check: Callable[[], Report], limits: Limits) -> None:
        self.limits, self._check = limits, check
        self.began = time.monotonic()
        self.was_up = False  # a model was ready
        self.healthy_at: float | None = None
        self.failures = 0
        self.output = Output()
        self._next_check = self.began
        self._checking: threading.Thread | None = None
        self._report: Report | None = None
        folder = str(Path(__file__).absolute().parent)
        self.process = subprocess.Popen(
            [sys.executable, "-I", folder, "keep", str(os.getpid()), "--", *command],
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self._copies = [
            threading.Thread(target=self.output.copy, args=arguments, daemon=True)
            for arguments in ((self.process.stdout, 1), (self.process.stderr, 2))
        ]
        for copy in self._copies:
            copy.start()

    def ailment(self) -> str:
        """Why the server has to be ended now; empty while it may go on."""
        now = time.monotonic()
        crashed_at = self.output.crashed_at
        if crashed_at is not None and now - crashed_at > self.limits.crash_seconds:
            return "it crashed and did not end"
        if self.output.has_unloaded:
            return "an engine died, and its model was unloaded"
        reason = self._look(now)
        if self.failures >= self.limits.failures:
            return reason
        start_seconds = self.limits.start_seconds
        if start_seconds and self.healthy_at is None and now - self.began > start_seconds:
            return f"it was not healthy {start_seconds:g} s after its start ({reason})"
        return ""

    def end(self) -> int:
        """Kill what is left of the server, copy the rest of its output; its exit status."""
        if not kill_descendants(self.process.pid):
            say("some of its processes cannot be killed")
        code = self.process.wait()
        for copy in self._copies:
            copy.join(_COPY_SECONDS)
        return exit_status(code)

    def _look(self, now: float) -> str:
        """Start a check when one is due and take over the result of the last one."""
        if self._checking is not None and not self._checking.is_alive():
            self._checking = None
            interval = self.limits.interval
            self._count(self._report or Report(problems=["the health check broke"]))
            if self.healthy_at is None:
                interval = min(interval, _START_INTERVAL)
            self._next_check = now + interval
        if self._checking is None and now >= self._next_check:
            self._checking = threading.Thread(target=self._run_check, daemon=True)
            self._checking.start()
        return self._report.reason if self._report else ""

    def _run_check(self) -> None:
        self._report = self._check()

    def _count(self, report: Report) -> None:
        self.was_up = self.was_up or report.ready > 0
        if report.reason:
            if self.healthy_at is not None or report.is_ill:
                self.failures += 1
                say(f"unhealthy ({self.failures} of {self.limits.failures}): {report.reason}")
            return
        self.failures = 0
        if report.ready and self.healthy_at is None:
            self.healthy_at = time.monotonic()
            say(f"healthy {self.healthy_at - self.began:.1f} s after its start")


class Supervisor:
    """Runs lives of a server until it is asked to stop."""

    def __init__(
        self, command: list[str], new_check: Callable[[], Callable[[], Report]], limits: Limits
    ) -> None:
        """`new_check` returns the health check of one life."""
        self._command, self._new_check, self._limits = command, new_check, limits
        self._is_stopping = False

    def run(self) -> int:
        """Supervise until SIGTERM or SIGINT, or until the limits forbid a restart; the exit status."""
        adopt_orphans()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._stop)
        pause, restarts, was_up = _FIRST_PAUSE, 0, False
        while True:
            life = Life(self._command, self._new_check(), self._limits)
            reason = self._attend(life)
            status = self._end(life)
            if self._is_stopping:
                return status
            was_up = was_up or life.was_up
            if self._limits.must_start and not was_up:
                say(f"not started again, as no model was ever ready: {reason}")
                return status or 1
            if restarts == self._limits.restarts:
                say(f"not started again after {restarts} restarts: {reason}")
                return status or 1
            if life.healthy_at and time.monotonic() - life.healthy_at > _STEADY_SECONDS:
                pause = _FIRST_PAUSE
            say(f"restart in {pause:g} s: {reason}")
            if self._stops_within(pause):
                return 0
            restarts += 1
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _stop(self, _number: int, _frame: object) -> None:
        self._is_stopping = True

    def _attend(self, life: Life) -> str:
        """Return when the server ended, is ill, or has to stop; the reason."""
        while not self._is_stopping:
            code = life.process.poll()
            if code is not None:
                return f"it ended with status {exit_status(code)}"
            if reason := life.ailment():
                return reason
            time.sleep(_POLL_SECONDS)
        return "stopped"

    def _end(self, life: Life) -> int:
        """End what is left of the server; its exit status."""
        if self._is_stopping and life.process.poll() is None:
            life.process.terminate()
            try:
                life.process.wait(self._limits.stop_seconds)
            except subprocess.TimeoutExpired:
                say(f"killed, as it did not end within {self._limits.stop_seconds:g} s")
        return life.end()

    def _stops_within(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not self._is_stopping and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)
        return self._is_stopping


def say(text: str) -> None:
    """Log one line."""
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    print(f"{stamp} supervisor: {text}", file=sys.stderr, flush=True)


def _write(target: int, data: bytes) -> None:
    while data:
        data = data[os.write(target, data) :]
