"""Submission of kept rows to a job in lists, and of its failed rows again."""

import asyncio
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Mapping,
    Sequence,
)
from contextlib import aclosing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4

import orjson

from app.ui.api import FILE_TIMEOUT, Api, segment
from app.ui.bulk.background import Report
from app.ui.bulk.kept_rows import KeptRow, read_rows
from app.ui.errors import ApiError, RefusedError

MAX_ROWS = 1_000  # of a list, as the API takes them
_MAX_BYTES = 1_200_000  # of a list; below the API's default of LLM_MAX_BODY_BYTES
_CHUNK = 262_144
_PAUSE_SECONDS = 2.0
_MAX_PAUSE_SECONDS = 30.0
_LATER = frozenset({429, 502, 503, 504})  # a later request may succeed


class JobOverError(Exception):
    """The job takes no further rows: it was cancelled or deleted."""


async def upload_rows(api: Api, name: str, header: bytes, rows: BinaryIO, size: int) -> str:
    """Store the file of a job's rows; its id. Raises ApiError."""
    boundary, filename = uuid4().hex, f"{Path(name).stem}-rows.jsonl"
    before = (
        f'--{boundary}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        f'--{boundary}\r\nContent-Disposition: form-data; name="file"; '
        f'filename="{_quotable(filename)}"\r\n\r\n'
    ).encode() + header
    after = f"\r\n--{boundary}--\r\n".encode()
    response = await api.send(
        "POST",
        "/v1/files",
        content=_pieces(rows, before, after),
        headers={
            "Content-Type": f"multipart/form-data; boundary={boundary}",
            "Content-Length": str(len(before) + size + len(after)),
        },
        timeout=FILE_TIMEOUT,
    )
    return str(response.json()["id"])


@dataclass(slots=True)
class Sending:
    """Sends the rows of a file to a job and closes it; rows that the job has already change nothing."""

    api: Api
    job_id: str
    file_id: str
    _sent: int = 0  # rows with requests

    async def run(self, report: Report) -> None:
        """Raises ApiError for an error that another attempt would meet, too."""

        async def step() -> bool:
            await self._send_rest(report)
            await self.api.post(f"/jobs/{segment(self.job_id)}/close")
            return False

        with suppress(JobOverError):
            await _patiently(step, report)

    async def _send_rest(self, report: Report) -> None:
        async with aclosing(self._items()) as rest, aclosing(in_lists(rest)) as lists:
            async for items in lists:
                await self._post(items)
                self._sent += len(items)
                report("")

    async def _items(self) -> AsyncGenerator[bytes, None]:
        place = 0
        async with aclosing(read_rows(self.api, self.file_id)) as rows:
            async for row in rows:
                place += not row.error
                if not row.error and place > self._sent:
                    yield item_of(self.job_id, row)

    async def _post(self, items: Sequence[bytes]) -> None:
        outcomes = await post_rows(self.api, items)
        if any(one.get("code") in ("job_closed", "not_found") for one in outcomes):
            raise JobOverError
        for one in outcomes:
            _check_is_final(one)


def _check_is_final(outcome: Mapping[str, Any]) -> None:
    """Raise RefusedError for a row that may be accepted later: its job is not closed without it."""
    status = outcome.get("status", 0)
    is_busy = status == 429 and outcome.get("limit") != "max_job_rows"
    if is_busy or status >= 500:
        raise RefusedError(status, outcome["code"], outcome["detail"])


def item_of(job_id: str, row: KeptRow) -> bytes:
    """A row as an item of a list."""
    return orjson.dumps({"job_id": job_id, "job_key": row.key} | row.request)


async def in_lists(items: AsyncIterable[bytes]) -> AsyncGenerator[list[bytes], None]:
    """Items in lists as the API takes them, bounded in rows and bytes."""
    some, size = list[bytes](), 0
    async for item in items:
        if some and (len(some) >= MAX_ROWS or size + len(item) > _MAX_BYTES):
            yield some
            some, size = [], 0
        some.append(item)
        size += len(item)
    if some:
        yield some


async def post_rows(api: Api, items: Sequence[bytes]) -> list[dict[str, Any]]:
    """Send a list; of each row its result or the problem in its place. Raises ApiError.

    With a lower LLM_MAX_BODY_BYTES, a list that is too large is sent in parts.
    """
    try:
        response = await api.send(
            "POST",
            "/results/",
            content=b"[" + b",".join(items) + b"]",
            headers={"Content-Type": "application/json"},
            timeout=FILE_TIMEOUT,
        )
    except RefusedError as error:
        if error.status != 413:
            raise
        if len(items) == 1:
            return [{"code": error.code, "detail": error.message}]
        middle = len(items) // 2
        return [*await post_rows(api, items[:middle]), *await post_rows(api, items[middle:])]
    outcomes: list[dict[str, Any]] = orjson.loads(response.content)
    return outcomes


@dataclass(slots=True)
class Retrying:
    """Sends the rows that have failed until now again, batch by batch."""

    api: Api
    job_id: str
    error_code: str | None = None
    _after: int = 0
    _until: int | None = None
    _refused: int = 0
    _reason: str = ""

    async def step(self) -> bool:
        """Send a batch; False if it was the last one. Raises ApiError."""
        path = f"/jobs/{segment(self.job_id)}"
        if self._until is None:
            self._until = (await self.api.get(path))["last_place"]
        body: dict[str, Any] = {"after": self._after, "until": self._until}
        if self.error_code:
            body["error_code"] = self.error_code
        batch = await self.api.post(f"{path}/retry", json=body)
        if batch["refused"]:
            self._refused += len(batch["refused"])
            self._reason = self._reason or batch["refused"][0]["error"]["detail"]
        self._after = batch["following"] or 0
        return batch["following"] is not None

    async def run(self, report: Report) -> None:
        await _patiently(self.step, report)
        report(self.summary())

    def summary(self) -> str:
        if not self._refused:
            return ""
        return f"{self._refused:,} failed rows cannot be sent again: {self._reason}"


async def _patiently(step: Callable[[], Awaitable[bool]], report: Report) -> None:
    """Repeat it while it returns True, and as long as the API is unavailable, or takes nothing."""
    while True:
        try:
            if not await step():
                return
        except RefusedError as error:
            if error.status not in _LATER or error.code == "budget_exhausted":
                raise
            report(f"Waiting: {error.message}")
            await asyncio.sleep(_pause(error))


def _pause(error: ApiError) -> float:
    text = error.retry_after or ""
    seconds = float(text) if text.isascii() and text.isdigit() else 0.0
    return min(max(seconds, _PAUSE_SECONDS), _MAX_PAUSE_SECONDS)


async def _pieces(rows: BinaryIO, before: bytes, after: bytes) -> AsyncIterator[bytes]:
    yield before
    rows.seek(0)
    while piece := await asyncio.to_thread(rows.read, _CHUNK):
        yield piece
    yield after


def _quotable(filename: str) -> str:
    return "".join("_" if one in '"\\\r\n' else one for one in filename)
