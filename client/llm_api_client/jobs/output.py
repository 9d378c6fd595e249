"""Files of answers: written as rows end, and continued after any interruption.

Answers are lines of JSON in the order of ends: the last whole line has the place to continue from. A Parquet
file is made of these lines at the end. One process writes at a time; a row that a caller gets is on the disk.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from llm_api_client.errors import ConfigurationError, LLMAPIError
from llm_api_client.jobs.files import FileLock, replace, sync_names
from llm_api_client.jobs.parquet import parquet_library, write_parquet
from llm_api_client.jobs.records import Row
from llm_api_client.json_lines import to_line
from llm_api_client.schemas import ResultError

_BLOCK_BYTES = 1 << 16


class OutputError(LLMAPIError):
    """The file of answers cannot be written; the job continues, and so does the file in the next run."""


class Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of a file of answers."""

    key: str
    text: str
    place: int | None = None
    result_id: str | None = None
    model: str | None = None
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    error: ResultError | None = None
    vector: list[float] | None = None
    scores: list[float] | None = None


class _Code(msgspec.Struct):
    code: str


class _Keyed(msgspec.Struct):
    """The key of a line, and its error; its vector is not read."""

    key: str
    error: _Code | None = None

    @property
    def is_repeated(self) -> bool:
        """True for a row whose key is another row's: an answer under the key is not its own."""
        return self.error is not None and self.error.code == "duplicate_key"


class _Owner(msgspec.Struct):
    """The job that a file of answers belongs to."""

    job: str


def line_of(row: Row[Any]) -> Line:
    """The line of a row."""
    result = row.result
    usage = result.usage if result else None
    return Line(
        row.key, row.text, row.place, result.id if result else None,
        result.model_name if result else None, result.finish_reason if result else None,
        usage.prompt_tokens if usage else None, usage.completion_tokens if usage else None, row.error, row.vector,
        row.scores,
    )  # fmt: skip


class AnswerFile:
    """Answers at `path` (JSONL or Parquet); beside it, with further suffixes:

    `.job.json` names the job, `.failed.jsonl` has the rows without an answer, and `.jsonl` the lines of
    a Parquet file; while it is written, `.lock` names the process.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        suffix = self.path.suffix.lower()
        if suffix not in (".jsonl", ".ndjson", ".parquet"):
            raise ConfigurationError(f"{self.path}: answers are written as .jsonl or .parquet.")
        self.is_parquet = suffix == ".parquet"
        if self.is_parquet:
            parquet_library()
        self.lines = self._beside(".jsonl") if self.is_parquet else self.path
        self.failures = self._beside(".failed.jsonl")
        self._lock = FileLock(self._beside(".lock"))
        self._files: tuple[BinaryIO, BinaryIO] | None = None

    def _beside(self, suffix: str) -> Path:
        return self.path.with_name(self.path.name + suffix)

    def open(self, job_id: str) -> int:
        """Continue the files of a job; the place behind which its rows are missing.

        Raises:
            ConfigurationError: another process writes it, or it belongs to another job, or to none.
            OutputError: it cannot be written.
        """
        self.close()  # of a run that was left, and has not ended yet
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if (holder := self._lock.take()) is not None:
                raise ConfigurationError(
                    f"{self.path} is being written by {holder}: wait for its end, or choose another file."
                )
            self._check_owner(job_id)
            answers, failures = self.lines.open("a+b"), self.failures.open("a+b")
            self._files = answers, failures
            sync_names(self.path.parent)
            drop_torn_line(failures)
            drop_torn_line(answers)
            last = last_line(answers)
        except OSError as error:
            self.close()
            raise OutputError(f"{self.lines} cannot be written: {error}") from error
        except ConfigurationError:
            self.close()
            raise
        place = 0 if last is None else msgspec.json.decode(last, type=Line).place
        return place or 0

    def _check_owner(self, job_id: str) -> None:
        owner = self._beside(".job.json")
        if owner.exists():
            found = msgspec.json.decode(owner.read_bytes(), type=_Owner).job
            if found != job_id:
                raise ConfigurationError(
                    f"{self.path} has the answers of another job ({found}): choose another file."
                )
        elif self.lines.exists() or self.path.exists():
            raise ConfigurationError(f"{self.path} exists, and is of no job: choose another file.")
        else:
            replace(owner, [msgspec.json.encode(_Owner(job_id))])

    def write(self, rows: Sequence[Row[Any]]) -> None:
        """Append rows to the files on the disk; failures first: the last answer's place covers them.

        Raises:
            OutputError: the disk is full, for example.
        """
        assert self._files is not None
        answers, failures = self._files
        try:
            for file, has_failed in ((failures, True), (answers, False)):
                lines = [line_of(row) for row in rows if (row.error is not None) is has_failed]
                if lines:
                    file.writelines(to_line(line) for line in lines)
                    file.flush()
                    os.fsync(file.fileno())
        except OSError as error:
            raise OutputError(
                f"{self.path} cannot be written ({error.strerror}). The job continues: make space, and "
                "run the same again; the file continues where it is."
            ) from error

    def finish(self) -> None:
        """Drop failures that have an answer now, write the Parquet file, and close."""
        self._close_files()
        try:
            self._drop_answered()
            if self.is_parquet:
                write_parquet(self.lines, self.path)
        finally:
            self.close()

    def _drop_answered(self) -> None:
        last: dict[str | bytes, bytes] = {}
        for line in read_lines(self.failures):
            found = msgspec.json.decode(line, type=_Keyed)
            last[line if found.is_repeated else found.key] = line
        if last:
            for line in read_lines(self.lines):
                last.pop(msgspec.json.decode(line, type=_Keyed).key, None)
        replace(self.failures, last.values())

    def close(self) -> None:
        """Close the files; another process may write them then."""
        self._close_files()
        self._lock.release()

    def _close_files(self) -> None:
        for file in self._files or ():
            with contextlib.suppress(OSError):  # reported by `write`
                file.close()
        self._files = None


def read_lines(path: Path) -> Iterator[bytes]:
    """The whole lines of a file."""
    with path.open("rb") as file:
        yield from file


def drop_torn_line(file: BinaryIO) -> None:
    """Cut what a killed process left of a line."""
    end = file.seek(0, os.SEEK_END)
    file.truncate(_after_newline(file, end))


def last_line(file: BinaryIO) -> bytes | None:
    """The last line of a file of whole lines; None if it has none."""
    end = file.seek(0, os.SEEK_END)
    if end == 0:
        return None
    file.seek(_after_newline(file, end - 1))
    return file.read()


def _after_newline(file: BinaryIO, end: int) -> int:
    """The position behind the last line end before `end`."""
    while end > 0:
        start = max(0, end - _BLOCK_BYTES)
        file.seek(start)
        found = file.read(end - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0
