"""The progress of a job: a line on terminals, tqdm where it is installed, nothing elsewhere."""

import builtins
import re
from types import SimpleNamespace
from typing import Any

import pytest

from llm_api_client.jobs import progress as module
from llm_api_client.jobs.progress import Progress
from llm_api_client.jobs.records import JobCounts, JobInfo, Row
from llm_api_client.schemas import Result, Usage

INFO = JobInfo(id="j", state="open", counts=JobCounts(rows=8, pending=2, completed=5, failed=1))
ROW = Row(
    key="k",
    result=Result(id="r", state="completed", model_name="m", usage=Usage(completion_tokens=70)),
)


def shown(progress: Progress, capsys: pytest.CaptureFixture[str]) -> str:
    progress.open()
    progress.count([ROW])
    progress.show(INFO)
    progress.close()
    progress.show(INFO)  # after its end it is silent
    return capsys.readouterr().err


def test_a_line_without_tqdm(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = builtins.__import__

    def refuse(name: str, *rest: Any) -> Any:
        if name.startswith("tqdm"):
            raise ImportError(name)
        return original(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    line = shown(Progress(is_shown=True, total=12), capsys).rpartition("\r")[2]
    assert line.startswith("6/12 rows")
    assert "70 tokens" in line
    assert "1 failed" in line


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds of both bars, in a list of one number."""
    now = [1_000.0]
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr("llm_api_client.jobs.progress.time", clock)
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    return now


def after(completed: int, failed: int = 0) -> JobInfo:
    counts = JobCounts(rows=100, completed=completed, failed=failed)
    return JobInfo(id="j", state="closed", counts=counts)


@pytest.mark.parametrize("has_tqdm", [False, True])
def test_the_time_left_is_by_the_rows_that_end_now(
    has_tqdm: bool,
    clock: list[float],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Neither rows of an earlier run count, nor those that are retried."""
    if not has_tqdm:
        monkeypatch.setattr(module, "_bar", module._Line)
    progress = Progress(is_shown=True, total=100)
    progress.open()

    def left(info: JobInfo, *, seconds: float) -> str:
        clock[0] += seconds
        progress.show(info)
        line = capsys.readouterr().err.rpartition("\r")[2]
        found = re.search(r"(\d+:\d\d) left|<(\d+:\d\d)", line)
        assert found, line
        return found[1] or found[2].removeprefix("0")

    progress.show(after(60))
    assert left(after(70), seconds=10) == "0:30"
    clock[0] += 600  # until all have ended
    progress.show(after(80, failed=20))
    progress.show(after(80))  # the failed rows are retried
    assert left(after(90), seconds=5) == "0:05"


def test_tqdm(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(Progress(is_shown=True, total=12), capsys)
    assert "6/12" in text
    assert "70 tokens" in text


def test_the_tokens_of_vectors_are_those_of_their_texts() -> None:
    progress = Progress(is_shown=False)
    usage = Usage(prompt_tokens=7, completion_tokens=0)
    result = Result(id="r", state="completed", model_name="m", usage=usage)
    progress.count([Row(key="a", result=result, vector=[0.5]), Row(key="b", result=result)])
    assert progress.tokens == 7


def test_nothing_is_shown_to_programs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "_is_interactive", lambda: False)
    assert shown(Progress(total=12), capsys) == ""
    monkeypatch.setattr(module, "_is_interactive", lambda: True)
    assert shown(Progress(total=12), capsys) != ""
    assert shown(Progress(is_shown=False), capsys) == ""
