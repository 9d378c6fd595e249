"""The first step of a batch: its input file becomes lines, or the batch is refused."""

from collections.abc import Sequence
from uuid import UUID

from app.batches.dialect import BatchServices
from app.batches.errors import to_service_error
from app.batches.lease import BatchLease
from app.batches.lines import LineReader, split_lines
from app.batches.rows import Batch, NewLine
from app.core.errors import NotFoundError

_PAGE = 100  # lines that are stored at once
_PAGE_BYTES = 4_000_000  # or bytes of their bodies


class Validator:
    """Stores the lines of an input file, or its errors."""

    def __init__(self, services: BatchServices, batch_id: UUID, lease: BatchLease) -> None:
        self._services = services
        self._batch_id = batch_id
        self._lease = lease

    async def validate(self, batch: Batch) -> None:
        """Read the whole file, then begin or refuse the batch."""
        reader = LineReader(batch.endpoint, self._services.settings.max_batch_lines)
        try:
            await self._read_file(batch, reader)
        except NotFoundError:
            reader.refuse("file_not_found", "The input file was deleted.")
        if not reader.total and not reader.errors:
            reader.refuse("empty_file", "The input file has no requests.")
        if reader.errors:
            await self._services.work.refuse(self._batch_id, reader.errors)
        else:
            await self._services.work.begin(self._batch_id, reader.total)

    async def _read_file(self, batch: Batch, reader: LineReader) -> None:
        settings = self._services.settings
        parts = self._services.files.read(batch.team_id, batch.input_file_id)
        lines: list[NewLine] = []
        number = 0
        async for content in split_lines(parts, settings.max_body_bytes):
            number += 1
            if line := self._read_line(reader, number, content):
                lines.append(line)
            if reader.is_full or reader.total > settings.max_batch_lines:
                break
            if len(lines) == _PAGE or sum(len(line.body) for line in lines) > _PAGE_BYTES:
                await self._store(lines, reader)
                lines = []
        await self._store(lines, reader)

    def _read_line(self, reader: LineReader, number: int, content: bytes | None) -> NewLine | None:
        if content is None:
            most = self._services.settings.max_body_bytes
            reader.refuse("line_too_long", f"A line may have at most {most} bytes.", number)
            return None
        try:
            return reader.read(number, content)
        except Exception as error:  # noqa: BLE001 # reported as an error of the line
            message = str(to_service_error(error, self._batch_id))
            reader.refuse("invalid_request", message, number)
            return None

    async def _store(self, lines: Sequence[NewLine], reader: LineReader) -> None:
        if lines and not reader.errors:
            await self._services.work.add_lines(self._batch_id, lines)
        await self._lease.renew()
