"""The first step of a batch: its input file becomes lines, or the batch is refused."""

from collections.abc import Sequence

from app.batches.dialect import BatchServices, to_service_error
from app.batches.lines import LineReader, split_lines
from app.batches.rows import Batch, NewLine
from app.batches.work import BatchLease
from app.core.errors import NotFoundError

_PAGE = 100  # lines that are stored at once
_PAGE_BYTES = 4_000_000  # or bytes of their bodies


async def validate(services: BatchServices, batch: Batch, lease: BatchLease) -> None:
    reader = LineReader(batch.endpoint, services.settings.max_batch_lines)
    try:
        await _read_file(services, batch, reader, lease)
    except NotFoundError:
        reader.refuse("file_not_found", "The input file was deleted.")
    if not reader.total and not reader.errors:
        reader.refuse("empty_file", "The input file has no requests.")
    if reader.errors:
        await services.work.refuse(batch.id, reader.errors)
    else:
        await services.work.begin(batch.id, reader.total)


async def _read_file(
    services: BatchServices, batch: Batch, reader: LineReader, lease: BatchLease
) -> None:
    async def store(lines: Sequence[NewLine]) -> None:
        if lines and not reader.errors:
            await services.work.add_lines(batch.id, lines)
        await lease.renew()

    max_bytes = services.settings.max_body_bytes
    lines: list[NewLine] = []
    number = 0
    async for content in split_lines(
        services.files.read(batch.team_id, batch.input_file_id), max_bytes
    ):
        number += 1
        if content is None:
            message = f"A line may have at most {max_bytes} bytes."
            reader.refuse("line_too_long", message, number)
        elif line := _read_line(batch, reader, number, content):
            lines.append(line)
        if reader.is_full or reader.total > services.settings.max_batch_lines:
            break
        if len(lines) == _PAGE or sum(len(line.body) for line in lines) > _PAGE_BYTES:
            await store(lines)
            lines = []
    await store(lines)


def _read_line(batch: Batch, reader: LineReader, number: int, content: bytes) -> NewLine | None:
    try:
        return reader.read(number, content)
    except Exception as error:  # noqa: BLE001 # reported as an error of the line
        reader.refuse("invalid_request", str(to_service_error(error, batch.id)), number)
        return None
