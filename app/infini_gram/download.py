"""Download of a published index, which continues where an earlier one ended.

Parts are in the hidden directory `.download` of the target, under their files' names; a complete file is
checked, and then renamed. `state.json` has the versions (ETags) of the files that the parts belong to.
"""

import asyncio
import contextlib
import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import httpx
import orjson

from app.infini_gram.published_index import (
    MAX_ATTEMPTS,
    S3_ENDPOINT,
    DownloadError,
    Http,
    RemoteFile,
    describe,
    is_transient,
    list_files,
)

_HIDDEN = ".download"
_STATE = "state.json"
_MAX_RESTARTS = 2  # of one file
_SPARE_DISK = 64_000_000
_TIMEOUT = httpx.Timeout(60.0, pool=None)

# Called with the bytes that are there, the total, and bytes a second.
Report = Callable[[int, int, float], None]


@dataclass(slots=True)
class _Tries:
    """Failures of one file: in a row without progress, and those after which it began again."""

    failures: int = 0
    restarts: int = 0
    problem: str = ""


class _StaleError(Exception):
    """The file changed, or its bytes do not match its checksum: begin it again."""


async def download(
    source: str,
    directory: Path,
    *,
    connections: int = 4,
    endpoint: str = S3_ENDPOINT,
    report: Report = lambda *_: None,
    first_pause: float = 0.5,
) -> list[RemoteFile]:
    """Download all files. Raises DownloadError or OSError; parts stay for the next call."""
    client = httpx.AsyncClient(
        timeout=_TIMEOUT,
        trust_env=False,  # no proxy of the environment
        follow_redirects=True,
        max_redirects=5,
        headers={"Accept-Encoding": "identity"},
        event_hooks={"response": [_refuse_downgrade]} if source.startswith("https:") else {},
    )
    async with client:
        http = Http(client, first_pause)
        try:
            files = await list_files(http, source, endpoint)
        except (httpx.RequestError, httpx.InvalidURL) as error:
            raise DownloadError(f"{source}: {describe(error)}") from error
        with _hidden(directory) as hidden:
            _drop_stale(directory, hidden, files)
            transfer = _Transfer(http, directory, hidden, files, report)
            transfer.check_space()
            await transfer.run(connections)
            shutil.rmtree(hidden)  # before its lock ends: a further download may begin then
    return files


async def _refuse_downgrade(response: httpx.Response) -> None:
    if response.url.scheme != "https":
        raise DownloadError(f"{response.url}: the server redirects to a connection without TLS")


@contextlib.contextmanager
def _hidden(directory: Path) -> Iterator[Path]:
    hidden = directory / _HIDDEN
    hidden.mkdir(parents=True, exist_ok=True)
    with (hidden / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DownloadError(f"Another download into {directory} is running") from None
        yield hidden


def _drop_stale(directory: Path, hidden: Path, files: Sequence[RemoteFile]) -> None:
    """Remove what belongs to other versions; refuse files that no download of this index wrote."""
    try:
        known = orjson.loads((hidden / _STATE).read_bytes())
    except (OSError, orjson.JSONDecodeError):
        known = {}
    for file in files:
        entry = [file.etag, file.size]
        if known.get(file.name) != entry:
            (hidden / file.name).unlink(missing_ok=True)
            if file.name in known:
                (directory / file.name).unlink(missing_ok=True)
        there = directory / file.name
        if there.exists() and there.stat().st_size != file.size:
            raise DownloadError(f"{there} exists, and is another file: choose another directory")
    new = hidden / f"{_STATE}.new"
    new.write_bytes(orjson.dumps({file.name: [file.etag, file.size] for file in files}))
    new.replace(hidden / _STATE)


class _Transfer:
    def __init__(
        self,
        http: Http,
        directory: Path,
        hidden: Path,
        files: Sequence[RemoteFile],
        report: Report,
    ) -> None:
        self._http = http
        self._directory = directory
        self._hidden = hidden
        self._waiting = [one for one in files if not (directory / one.name).exists()]
        self._waiting.sort(key=lambda one: one.size)
        self._total = sum(one.size for one in files)
        parts = {one.name: min(_size(hidden / one.name), one.size) for one in self._waiting}
        missing = sum(one.size for one in self._waiting)
        self._done = self._total - missing + sum(parts.values())
        self._report = report
        self._received, self._begun = 0, time.monotonic()

    def check_space(self) -> None:
        needed = self._total - self._done + _SPARE_DISK
        free = shutil.disk_usage(self._directory).free
        if self._total > self._done and free < needed:
            raise DownloadError(
                f"Too little space in {self._directory}: {needed / 1e9:.2f} GB needed, "
                f"{free / 1e9:.2f} GB free"
            )

    async def run(self, connections: int) -> None:
        tasks = [asyncio.create_task(self._work()) for _ in range(connections)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _work(self) -> None:
        while self._waiting:
            await self._fetch(self._waiting.pop())  # the largest

    async def _fetch(self, file: RemoteFile) -> None:
        part, target = self._hidden / file.name, self._directory / file.name
        tries = _Tries()
        while True:
            before = _size(part)
            response = await self._attempt(file, part, target, tries)
            if target.exists():
                return
            tries.failures = 0 if _size(part) > before else tries.failures + 1
            if tries.failures >= MAX_ATTEMPTS or tries.restarts > _MAX_RESTARTS:
                raise DownloadError(
                    f"{file.url}: {tries.problem}; giving up after several attempts"
                )
            if tries.failures:
                await self._http.pause(tries.failures, response)

    async def _attempt(
        self, file: RemoteFile, part: Path, target: Path, tries: _Tries
    ) -> httpx.Response | None:
        response = None
        tries.problem = "the server ended the file early"
        try:
            if _size(part) < file.size or not file.size:
                async with self._request(file, _size(part)) as response:
                    await self._receive(file, part, response, tries)
            await asyncio.to_thread(_finish, file, part, target)
        except _StaleError as error:
            tries.restarts, tries.problem = tries.restarts + 1, str(error)
            self._drop(file, part)
        except httpx.TransportError as error:
            tries.problem = describe(error)
        except httpx.TooManyRedirects as error:
            raise DownloadError(f"{file.url}: {describe(error)}") from error
        return response

    @contextlib.asynccontextmanager
    async def _request(self, file: RemoteFile, offset: int) -> AsyncIterator[httpx.Response]:
        headers = {}
        if offset:
            headers["Range"] = f"bytes={offset}-"
            if file.etag and not file.etag.startswith("W/"):
                headers["If-Range"] = file.etag
        async with self._http.client.stream("GET", file.url, headers=headers) as response:
            yield response

    async def _receive(
        self, file: RemoteFile, part: Path, response: httpx.Response, tries: _Tries
    ) -> None:
        """Append the body to the part. Raises _StaleError, DownloadError, httpx.TransportError."""
        if is_transient(response):
            tries.problem = f"status {response.status_code}"
            return
        offset = _size(part)
        _check_response(file, offset, response)
        if response.status_code == 200 and offset:
            tries.restarts += 1  # the server sends all of it again
            self._done -= min(offset, file.size)
            offset = 0
        with _open_at(part, offset) as target:
            # Not in blocks of a size: a connection that breaks would lose the bytes of an incomplete one.
            async for block in response.aiter_raw():
                offset += len(block)
                if offset > file.size:
                    raise _StaleError(f"the server sent more than {file.size} bytes")
                await asyncio.to_thread(target.write, block)
                self._count(len(block))

    def _drop(self, file: RemoteFile, part: Path) -> None:
        self._done -= min(_size(part), file.size)
        part.unlink(missing_ok=True)

    def _count(self, received: int) -> None:
        self._done += received
        self._received += received
        seconds = max(0.001, time.monotonic() - self._begun)
        self._report(self._done, self._total, self._received / seconds)


def _check_response(file: RemoteFile, offset: int, response: httpx.Response) -> None:
    if response.status_code == 416:
        raise _StaleError("the server has fewer bytes")
    if response.status_code not in (200, 206):
        raise DownloadError(f"{file.url}: status {response.status_code}")
    if file.etag and response.headers.get("ETag", file.etag) != file.etag:
        raise DownloadError(f"{file.url} was replaced during the download: start it again")
    sent = response.headers.get("Content-Range", "")
    if response.status_code == 206 and not sent.startswith(f"bytes {offset}-"):
        raise _StaleError("the server returned another range")


def _open_at(part: Path, offset: int) -> BinaryIO:
    """Unbuffered, so that a killed process leaves the bytes that it has received."""
    target = part.open("ab", buffering=0)
    target.truncate(offset)
    return target


def _finish(file: RemoteFile, part: Path, target: Path) -> None:
    """Rename a complete part after its check; one that is not complete stays."""
    if _size(part) != file.size:
        return
    if file.md5 is not None and _md5(part) != file.md5:
        raise _StaleError("its bytes do not match its MD5")
    with part.open("rb") as content:
        os.fsync(content.fileno())
    part.rename(target)


def _md5(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0
