"""Download of a model into the Hugging Face cache of the host that this runs on.

Not by huggingface_hub, which a login host may lack: its version 2 begins an interrupted file again, and does
not compare checksums.

The request is a JSON object on standard input, which no process list shows. Each line of output is a
JSON object: `done` and `total` in bytes, each half second; at the end `error` and `is_transient`, or `commit`, `snapshot`,
`files`, `total` and `received`. A reader that is gone ends the download.

Parts are named after the checksum of their file, and bytes go to their own place in it, so that two
writers on a file system whose locks have no effect do no harm. A snapshot is linked when all of its files
are complete, its config.json last.
https://huggingface.co/docs/huggingface_hub/guides/manage-cache
"""

from __future__ import annotations

import contextlib
import fcntl
import fnmatch
import functools
import http.client
import json
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, TypeVar

from app.provisioning.on_host.hub import (
    BLOCK_BYTES,
    CHECKSUM,
    BrokenError,
    DownloadError,
    Hub,
    RemoteFile,
    Request,
    UnavailableError,
    checksum,
    to_remote_file,
)

_REPORT_SECONDS = 0.5
_FIRST_PAUSE_SECONDS = 0.5
_MAX_PAUSE_SECONDS = 60.0
_MAX_ATTEMPTS = 6  # in a row without a byte
_MAX_RESTARTS = 2  # of one file
_SPARE_DISK_BYTES = 64_000_000
_PART = ".download.incomplete"
_T = TypeVar("_T")


class Download:
    """One model's files; `done` counts bytes that are there, `received` those of this process."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._hub = Hub(request)
        hub = Path(request.cache, "hub")
        name = "models--" + request.model.replace("/", "--")
        self._repository, self._locks = hub / name, hub / ".locks" / name
        self._blobs = self._repository / "blobs"
        self._stopped = threading.Event()
        self._counts = threading.Lock()
        self.commit = ""
        self.done = self.total = self.received = 0

    def run(self) -> dict[str, Any]:
        """Fetch what is missing. Raises DownloadError and OSError; parts stay for the next call."""
        (files,) = self._reported([lambda: self._retried(self._list)])
        unique = list({one.etag: one for one in files}.values())
        for directory in (self._blobs, self._locks):
            directory.mkdir(parents=True, exist_ok=True)
        with self._locked():
            missing = [one for one in unique if not self._has(one)]
            self.total = sum(one.size for one in unique)
            lacking = sum(max(0, one.size - _size(self._part(one))) for one in missing)
            self.done = self.total - lacking
            self._check_space(lacking)
            # The smallest first: a refusal comes before the weights.
            missing.sort(key=lambda one: one.size)
            self._reported([functools.partial(self._fetch, one) for one in missing])
            snapshot = self._link(files)
            for part in self._blobs.glob(f"*{_PART}"):
                part.unlink()  # of other revisions
        return {
            "commit": self.commit,
            "snapshot": str(snapshot),
            "files": len(files),
            "total": self.total,
            "received": self.received,
        }

    def _list(self) -> list[RemoteFile]:
        model = self._request.model
        try:
            answer = self._hub.listing()
            self.commit = str(answer["sha"])
            files = [to_remote_file(one) for one in answer["siblings"]]
        except (KeyError, TypeError, ValueError) as error:
            raise DownloadError(
                f"{self._request.endpoint} does not list {model} with sizes and checksums."
            ) from error
        if not CHECKSUM.fullmatch(self.commit):
            raise DownloadError(f"{self._request.endpoint} names no commit of {model}.")
        chosen = [
            one
            for one in files
            if any(fnmatch.fnmatchcase(one.name, pattern) for pattern in self._request.patterns)
        ]
        if not any(one.name.endswith(".safetensors") for one in chosen):
            raise DownloadError(
                f"{model} has no weights as safetensors; other formats are not downloaded."
            )
        return chosen

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with (self._locks / "download.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UnavailableError(
                    f"Another download of {self._request.model} into {self._request.cache} is running"
                ) from None
            except OSError:
                pass  # a file system without locks
            yield

    def _check_space(self, lacking: int) -> None:
        free = shutil.disk_usage(self._blobs).free
        if lacking and free < lacking + _SPARE_DISK_BYTES:
            raise DownloadError(
                f"Too little space in {self._request.cache}: {(lacking + _SPARE_DISK_BYTES) / 1e9:.2f} GB "
                f"needed, {free / 1e9:.2f} GB free."
            )

    def _reported(self, work: list[Callable[[], _T]]) -> list[_T]:
        """Results of work in threads, while this one reports. Raises the first error."""
        pool = ThreadPoolExecutor(self._request.connections)
        try:
            running = [pool.submit(one) for one in work]
            while True:
                emit({"done": self.done, "total": self.total})
                ended, unfinished = wait(running, _REPORT_SECONDS, FIRST_EXCEPTION)
                results = [one.result() for one in ended]
                if not unfinished:
                    return results
        except BaseException:
            self._stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise

    def _fetch(self, file: RemoteFile) -> None:
        """Fetch one file, check it, and give it its name. Raises DownloadError."""
        part, restarts = self._part(file), 0
        while True:
            self._retried(lambda: self._receive(file, part), lambda: _size(part))
            if self._stopped.is_set():
                return
            if checksum(part, file.etag) == file.etag:
                break
            restarts += 1
            if restarts > _MAX_RESTARTS:
                raise DownloadError(f"{file.name}: its bytes do not match its checksum.")
            self._drop(part, file)
        with part.open("rb") as content:
            os.fsync(content.fileno())
        part.replace(self._blobs / file.etag)

    def _retried(self, work: Callable[[], _T], progress: Callable[[], int] = lambda: 0) -> _T:
        """The work's result; again while it makes progress, else after growing pauses."""
        failures = 0
        while True:
            before = progress()
            try:
                return work()
            except BrokenError as error:
                failures = 1 if progress() > before else failures + 1
                if failures >= _MAX_ATTEMPTS:
                    raise UnavailableError(f"{error}, also after {failures} attempts") from error
                pause = max(error.pause, _FIRST_PAUSE_SECONDS * 2 ** (failures - 1))
                if self._stopped.wait(min(pause, _MAX_PAUSE_SECONDS)):
                    raise DownloadError("The download ends.") from error

    def _receive(self, file: RemoteFile, part: Path) -> None:
        """Receive the rest of a file. Raises BrokenError and DownloadError."""
        offset = _size(part)
        if offset > file.size:
            self._drop(part, file)
            offset = 0
        target = os.open(part, os.O_WRONLY | os.O_CREAT, 0o666)
        try:
            if offset < file.size:
                with self._hub.open_file(self.commit, file.name, offset) as body:
                    self._copy(body, target, file, offset)
        except (OSError, http.client.HTTPException) as error:
            raise BrokenError(f"{file.name}: the connection broke: {error}") from error
        finally:
            os.close(target)

    def _copy(self, body: Any, target: int, file: RemoteFile, offset: int) -> None:
        if offset and body.status != 206:
            self._count(-offset, 0)  # the server sends all of it again
            os.ftruncate(target, 0)
            offset = 0
        elif offset and not str(body.headers.get("Content-Range")).startswith(f"bytes {offset}-"):
            raise DownloadError(f"{file.name}: the server returned another range.")
        while block := body.read1(BLOCK_BYTES):
            if self._stopped.is_set():
                return
            if offset + len(block) > file.size:
                raise DownloadError(f"{file.name}: the server sent more than {file.size} bytes.")
            _write_at(target, block, offset)
            offset += len(block)
            self._count(len(block), len(block))
        if offset < file.size:
            raise BrokenError(f"{file.name}: the server ended the file early")

    def _count(self, done: int, received: int) -> None:
        with self._counts:
            self.done += done
            self.received += received

    def _drop(self, part: Path, file: RemoteFile) -> None:
        self._count(-min(_size(part), file.size), 0)
        part.unlink()

    def _has(self, file: RemoteFile) -> bool:
        blob = self._blobs / file.etag
        return blob.is_file() and _size(blob) == file.size

    def _part(self, file: RemoteFile) -> Path:
        return self._blobs / f"{file.etag}{_PART}"

    def _link(self, files: list[RemoteFile]) -> Path:
        """Make the snapshot, and the name of its revision."""
        snapshot = self._repository / "snapshots" / self.commit
        for file in sorted(files, key=lambda one: one.name == "config.json"):
            link = snapshot / file.name
            link.parent.mkdir(parents=True, exist_ok=True)
            new = link.with_name(f".{link.name}.{os.getpid()}")
            new.unlink(missing_ok=True)
            new.symlink_to(os.path.relpath(self._blobs / file.etag, link.parent))
            new.replace(link)
        if self._request.revision != self.commit:
            name = self._repository / "refs" / self._request.revision
            name.parent.mkdir(parents=True, exist_ok=True)
            new = name.with_name(f".{name.name}.{os.getpid()}")
            new.write_text(self.commit)
            new.replace(name)
        return snapshot


def _write_at(target: int, block: bytes, offset: int) -> None:
    try:
        while block:
            written = os.pwrite(target, block, offset)
            block, offset = block[written:], offset + written
    except OSError as error:
        raise DownloadError(f"The cache cannot be written: {error.strerror}.") from error


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def emit(message: dict[str, Any]) -> None:
    try:
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()
    except OSError:
        os._exit(1)  # the reader is gone: threads that wait for a server must not hold the process


def main() -> int:
    request = Request(**json.load(sys.stdin))
    try:
        emit(Download(request).run())
    except (DownloadError, OSError) as error:
        place = f"{error.filename}: " if isinstance(error, OSError) and error.filename else ""
        text = place + str(getattr(error, "strerror", None) or error)
        text = text.replace(request.token, "***") if request.token else text
        emit({"error": text, "is_transient": isinstance(error, UnavailableError)})
        os._exit(1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
