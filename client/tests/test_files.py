"""Files of answers: one process writes at a time, and a row that was handed on is on the disk."""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from llm_api_client import AsyncClient
from llm_api_client.errors import ConfigurationError
from llm_api_client.jobs import output
from llm_api_client.jobs.files import FileLock
from llm_api_client.jobs.output import AnswerFile
from llm_api_client.jobs.records import Row, failed_row

HOLDER = """
import sys
from llm_api_client.jobs.output import AnswerFile
file = AnswerFile(sys.argv[1])
file.open("j")
print("open", flush=True)
sys.stdin.read()
"""
CLIENT = Path(__file__).resolve().parents[1]
ANSWER: Row[Any] = Row(key="k1", text="text", place=1)


@contextlib.contextmanager
def held(path: Path) -> Iterator[int]:
    """The id of a process that writes a file of answers; it is killed at the end."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(CLIENT)},
    )  # fmt: skip
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"open\n"
        try:
            yield process.pid
        finally:
            process.kill()


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_a_file_has_one_writing_process(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with held(path) as holder:
        lines = path if path.suffix == ".jsonl" else path.with_name("a.parquet.jsonl")
        with lines.open("ab") as file:
            file.write(b'{"key":"torn')
        with pytest.raises(ConfigurationError, match=f"written by process {holder} on "):
            AnswerFile(path).open("j")
        assert lines.read_bytes() == b'{"key":"torn'  # the other one's line, not yet whole
    file_of_answers = AnswerFile(path)
    file_of_answers.open("j")
    with pytest.raises(ConfigurationError, match=f"written by process {os.getpid()} on "):
        AnswerFile(path).open("j")
    file_of_answers.close()
    assert not (tmp_path / f"{name}.lock").exists()
    assert lines.read_bytes() == b""


def test_a_file_is_locked_until_its_last_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.parquet"
    refusals: list[str | None] = []

    def second(lines: Path, written: Path) -> None:
        refusals.append(FileLock(tmp_path / "a.parquet.lock").take())

    monkeypatch.setattr(output, "write_parquet", second)
    file = AnswerFile(path)
    file.open("j")
    file.finish()
    assert [str(os.getpid()) in (one or "") for one in refusals] == [True]
    file.open("j")
    file.close()


def test_a_lock_that_its_holder_removes_meanwhile_is_taken_anew(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first, second = FileLock(path), FileLock(path)
    assert first.take() is None
    path.unlink()  # as the holder does just after another process has opened it
    assert second.take() is None
    assert path.exists()
    second.release()
    first.release()


def test_a_row_is_on_the_disk_before_it_is_handed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl"
    file = AnswerFile(path)
    file.open("j")
    synced: list[tuple[str, int]] = []
    wait = os.fsync

    def fsync(descriptor: int) -> None:
        wait(descriptor)
        name = Path(f"/proc/self/fd/{descriptor}").readlink().name
        synced.append((name, os.fstat(descriptor).st_size))

    monkeypatch.setattr(os, "fsync", fsync)
    file.write([ANSWER, failed_row("k2", "model_error", "m", place=2)])
    failures = tmp_path / "a.jsonl.failed.jsonl"
    # The place of the last answer covers the failures: they are first.
    assert synced == [(one.name, one.stat().st_size) for one in (failures, path)]
    assert all(size > 10 for _, size in synced)
    file.finish()
    assert (synced[2][0], len(synced)) == ("a.jsonl.failed.jsonl.new", 4)


@pytest.mark.parametrize("has_file", [True, False])
async def test_a_loop_that_was_left_goes_on_with_the_next_row(
    tmp_path: Path, has_file: bool
) -> None:
    """Inside a page; its generator ends in a later step of the event loop, and closes no file of the next."""

    def answer(request: httpx.Request) -> httpx.Response:
        after = int(request.url.params.get("after", 0))
        result = {"id": "r", "state": "completed", "model_name": "m", "result": "t"}
        rows = [
            {"place": place, "key": f"k{place}", "result_id": "r", "state": "completed"}
            | {"result": result}
            for place in range(after + 1, min(after + 3, 5))
        ]
        body: Any = rows if request.url.path.endswith("results") else {"id": "j", "state": "ended"}
        return httpx.Response(200, json=body, headers={"link": '<x>; rel="next"'} if rows else {})

    path = tmp_path / "a.jsonl"
    out = path if has_file else None
    async with AsyncClient("http://x", transport=httpx.MockTransport(answer)) as client:
        job = await client.job("j", out=out)
        async for _ in job:
            break
        keys = [row.key async for row in job]
        await asyncio.sleep(0)
    assert keys == ["k2", "k3", "k4"]
    if has_file:
        assert path.read_bytes().count(b"\n") == 4
