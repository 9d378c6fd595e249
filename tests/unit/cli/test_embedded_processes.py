"""Logs of child processes: where a child's own lines begin, and how long a log may get."""

import asyncio
import os
from pathlib import Path

import pytest

from app.cli.up import processes


@pytest.fixture
def log_file(tmp_path: Path) -> Path:
    return tmp_path / "logs" / "part.log"


async def speak(log_file: Path, text: str) -> int:
    """Run a child that prints this; returns the offset of its lines."""
    start = processes.begin_log(log_file)
    child = processes.spawn(["echo", text], log_file=log_file, env=os.environ)
    async with asyncio.timeout(30):
        assert await processes.wait_exit(child) == 0
    return start


async def test_each_child_is_read_by_its_own_lines(log_file: Path) -> None:
    assert await speak(log_file, "one") == 0
    start = await speak(log_file, "two")
    assert processes.log_text(log_file, start) == "two\n"
    assert processes.last_lines(log_file, 0) == "one | two"


async def test_a_long_log_is_put_aside_before_a_child_begins(
    log_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The offset of the child's lines is known then, too: a worker's readiness is read from its log."""
    monkeypatch.setattr(processes, "LOG_MAX_BYTES", 1_000)
    await speak(log_file, "x" * 2_000)
    start = await speak(log_file, "ready")
    assert processes.log_text(log_file, start) == "ready\n"
    assert log_file.with_suffix(".old.log").read_text() == "x" * 2_000 + "\n"


def test_of_a_long_text_the_end_is_read(tmp_path: Path) -> None:
    log_file = tmp_path / "log"
    log_file.write_text("\n".join(f"line {number}" for number in range(30_000)))
    text = processes.log_text(log_file, 0)
    assert text.endswith("line 29999")
    assert len(text) == 100_000


def test_a_removed_log_is_empty(tmp_path: Path) -> None:
    assert processes.log_text(tmp_path / "log", 100) == ""


async def test_a_child_ends_with_the_wait_for_it(log_file: Path) -> None:
    child = processes.spawn(["sleep", "600"], log_file=log_file, env=os.environ)
    reported = asyncio.Event()
    waiting = asyncio.create_task(processes.run_to_end(child, reported.set))
    async with asyncio.timeout(30):
        await reported.wait()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    assert child.poll() is not None


async def test_a_child_has_a_session_of_its_own(log_file: Path) -> None:
    """Ctrl-C in the terminal does not reach it, and the kernel schedules it apart from its siblings."""
    child = processes.spawn(["sleep", "600"], log_file=log_file, env=os.environ)
    try:
        assert os.getsid(child.pid) == os.getpgid(child.pid) == child.pid
    finally:
        child.kill()
        child.wait()


async def test_the_status_of_a_child_that_is_waited_for(log_file: Path) -> None:
    child = processes.spawn(["sh", "-c", "exit 3"], log_file=log_file, env=os.environ)
    async with asyncio.timeout(30):
        assert await processes.run_to_end(child, lambda: None) == 3
