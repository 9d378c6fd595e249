"""Submission of a converted file to the API: all of its batches, or none."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import orjson

from app.ui.api import FILE_TIMEOUT, Api, segment
from app.ui.bulk.conversion import Conversion, Part
from app.ui.bulk.jobs import metadata_of
from app.ui.errors import ApiError

_CHUNK = 262_144


class AlreadySentError(Exception):
    """The form was sent before: its job exists."""


@dataclass(slots=True)
class Sending:
    """Submission of one job. `key` is the form's: a form that is sent twice makes one job."""

    api: Api
    key: str
    name: str
    endpoint: str
    model: str = ""
    _files: list[str] = field(default_factory=list)
    _batches: list[str] = field(default_factory=list)

    async def send(self, conversion: Conversion) -> str:
        """Send all parts, and return the job's id. Raises AlreadySentError, and ApiError after an undo."""
        header = orjson.dumps({"columns": conversion.columns}) + b"\n"
        parts = list(enumerate(conversion.parts, 1))
        try:
            uploaded = [await self._upload_part(number, part, header) for number, part in parts]
            for (number, part), files in zip(parts, uploaded, strict=True):
                await self._create(number, len(parts), part, files)
        except BaseException:
            await self._undo()
            raise
        return self._batches[-1]

    async def _upload_part(self, number: int, part: Part, header: bytes) -> tuple[str, str]:
        stem = f"{Path(self.name).stem}-{number}"
        requests = await self._upload(part.path, part.size, f"{stem}.jsonl")
        name = f"{stem}-rows.jsonl"
        return requests, await self._upload(part.rows_path, part.rows_size, name, header)

    async def _upload(self, path: Path, size: int, filename: str, header: bytes = b"") -> str:
        boundary = uuid4().hex
        before = (
            f'--{boundary}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
            f'--{boundary}\r\nContent-Disposition: form-data; name="file"; '
            f'filename="{_quotable(filename)}"\r\n\r\n'
        ).encode() + header
        after = f"\r\n--{boundary}--\r\n".encode()
        response = await self.api.send(
            "POST",
            "/v1/files",
            content=_pieces(path, before, after),
            headers={
                "Content-Type": f"multipart/form-data; boundary={boundary}",
                "Content-Length": str(len(before) + size + len(after)),
            },
            timeout=FILE_TIMEOUT,
        )
        file_id = str(response.json()["id"])
        self._files.append(file_id)
        return file_id

    async def _create(self, number: int, count: int, part: Part, files: tuple[str, str]) -> None:
        metadata = metadata_of(
            name=self.name, job=self.key, number=number, count=count, lines=part.lines,
            left_out=part.left_out, rows_file_id=files[1], model=self.model,
            earlier_ids=self._batches if number == count else (),
        )  # fmt: skip
        body = {
            "input_file_id": files[0],
            "endpoint": self.endpoint,
            "completion_window": "24h",
            "metadata": metadata,
        }
        headers = {"Idempotency-Key": f"bulk-{self.key}-{number}"}
        try:
            response = await self.api.send(
                "POST", "/v1/batches", json=body, headers=headers, timeout=FILE_TIMEOUT
            )
        except ApiError as error:
            if error.code == "idempotency_conflict":  # its files have other ids than ours
                raise AlreadySentError from error
            raise
        self._batches.append(response.json()["id"])

    async def _undo(self) -> None:
        for batch in self._batches:
            with contextlib.suppress(ApiError):
                await self.api.post(f"/v1/batches/{segment(batch)}/cancel")
        await delete_all(self.api, self._files)


async def delete_all(api: Api, ids: Sequence[str]) -> None:
    for file_id in ids:
        with contextlib.suppress(ApiError):
            await api.delete(f"/v1/files/{segment(file_id)}")


async def _pieces(path: Path, before: bytes, after: bytes) -> AsyncIterator[bytes]:
    yield before
    with path.open("rb") as file:
        while piece := await asyncio.to_thread(file.read, _CHUNK):
            yield piece
    yield after


def _quotable(filename: str) -> str:
    return "".join("_" if one in '"\\\r\n' else one for one in filename)
