"""Files of answers: continued behind the last whole line, never another job's."""

import contextlib
import json
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from llm_api_client.errors import ConfigurationError
from llm_api_client.jobs.output import AnswerFile, OutputError
from llm_api_client.jobs.records import Row, failed_row
from llm_api_client.schemas import Result, Usage

RESULT = Result(id="r", state="completed", model_name="m", usage=Usage(completion_tokens=3))


def answer(place: int, text: str = "text") -> Row[Any]:
    return Row(key=f"k{place}", text=text, place=place, result=RESULT)


def failure(key: str) -> Row[Any]:
    return failed_row(key, "model_error", "x")


def written(path: Path, *rows: Row[Any], job: str = "j") -> int:
    """Write rows as one run does; the place that it began at."""
    file = AnswerFile(path)
    place = file.open(job)
    file.write(rows)
    file.close()
    return place


@pytest.mark.parametrize("text", ["short", "long " * 100_000])
def test_a_file_continues_behind_its_last_whole_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "new" / "answers.jsonl"
    assert written(path, answer(1, text), answer(2, text)) == 0
    with path.open("ab") as file:
        file.write(b'{"key": "k3", "text": "' + b"torn" * 30_000)
    assert written(path, answer(3)) == 2
    assert [line.split(b'"')[3] for line in path.read_bytes().splitlines()] == [b"k1", b"k2", b"k3"]


def test_a_row_is_one_line_for_each_reader(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    text = "one\x85two\u2028three\u2029four é"
    written(path, answer(1, text), failed_row(text, "model_error", text))
    for file, member in ((path, "text"), (Path(f"{path}.failed.jsonl"), "key")):
        (line,) = file.read_text(encoding="utf-8").splitlines()
        assert json.loads(line)[member] == text


def test_a_file_with_a_torn_line_only(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    written(path)
    path.write_bytes(b'{"key"')
    assert written(path, answer(1)) == 0
    assert path.read_bytes().startswith(b'{"key":"k1"')


def test_a_file_of_another_job_or_of_the_user_is_kept(tmp_path: Path) -> None:
    mine = tmp_path / "mine.jsonl"
    mine.write_text("{}\n")
    with pytest.raises(ConfigurationError, match="is of no job"):
        written(mine)
    assert mine.read_text() == "{}\n"
    written(tmp_path / "a.jsonl", answer(1))
    with pytest.raises(ConfigurationError, match="another job"):
        written(tmp_path / "a.jsonl", job="k")


def test_failures_leave_when_they_have_an_answer(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    written(path, failure("k1"), answer(2), failure("k3"))
    file = AnswerFile(path)
    file.open("j")
    file.write([failure("k3"), answer(1)])
    file.finish()
    failed = Path(f"{path}.failed.jsonl").read_text().splitlines()
    assert len(failed) == 1
    assert '"k3"' in failed[0]


def test_a_second_row_under_a_key_stays_a_failure(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    second, third = (failed_row("k1", "duplicate_key", f"row {row}") for row in (2, 3))
    written(path, second, third, answer(1))
    file = AnswerFile(path)
    file.open("j")
    file.write([second, third])  # of another run
    file.finish()
    lines = Path(f"{path}.failed.jsonl").read_text().splitlines()
    assert [json.loads(line)["error"]["message"] for line in lines] == ["row 2", "row 3"]


def test_a_parquet_file(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    written(path, answer(1), failure("x"))
    file = AnswerFile(path)
    assert file.open("j") == 1
    file.write([answer(2)])
    file.finish()
    table = parquet.read_table(path).to_pylist()
    assert [(row["key"], row["text"], row["completion_tokens"]) for row in table] == [
        ("k1", "text", 3), ("k2", "text", 3),
    ]  # fmt: skip
    assert sorted(one.name for one in tmp_path.iterdir()) == [
        "a.parquet", "a.parquet.failed.jsonl", "a.parquet.job.json", "a.parquet.jsonl",
    ]  # fmt: skip


def test_vectors(tmp_path: Path) -> None:
    """In lines, and in a column of a Parquet file, also of several groups."""
    path, vectors = tmp_path / "a.parquet", [[float(n), 0.1] for n in range(2_500)]
    rows: list[Row[Any]] = [
        Row(key=f"k{n}", place=n + 1, result=RESULT, vector=vector)
        for n, vector in enumerate(vectors)
    ]
    written(path, failure("k1"), *rows[:2])
    with Path(f"{path}.jsonl").open("ab") as file:
        file.write(b'{"key":"k2","text":"","vector":[0.1,')
    answers = AnswerFile(path)
    assert answers.open("j") == 2
    answers.write(rows[2:])
    answers.finish()
    table = parquet.read_table(path)
    assert [one[0] for one in table["vector"].to_pylist()] == [one[0] for one in vectors]
    assert table["vector"][0].as_py()[1] == pytest.approx(0.1, abs=1e-8)
    assert Path(f"{path}.failed.jsonl").read_text() == ""
    assert parquet.ParquetFile(path).num_row_groups == 3


def test_a_parquet_file_of_no_answers_has_no_column_of_vectors(tmp_path: Path) -> None:
    file = AnswerFile(tmp_path / "a.parquet")
    file.open("j")
    file.finish()
    assert "vector" not in parquet.read_table(tmp_path / "a.parquet").column_names


@contextlib.contextmanager
def room_for(size: int) -> Iterator[None]:
    """Files of this process have at most so many bytes, as on a disk that fills."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    file = AnswerFile(path)
    file.open("j")
    file.write([answer(1)])
    with room_for(50_000), pytest.raises(OutputError, match="The job continues: make space"):
        file.write([answer(2, "x" * 100_000)])
    with room_for(50_000):
        file.close()
    assert written(path, answer(2), answer(3)) == 1
    assert path.read_bytes().count(b"\n") == 3


def test_no_answer_is_written_before_a_failure_of_a_lower_place(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    file = AnswerFile(path)
    file.open("j")
    large = failed_row("k1", "model_error", "x" * 100_000, place=1)
    with room_for(50_000), pytest.raises(OutputError):
        file.write([large, answer(2)])
    with room_for(50_000):
        file.close()
    assert path.read_bytes() == b""
