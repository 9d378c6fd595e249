"""An uploaded file in the API's file store: fetched, and read once for its format and errors."""

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import BinaryIO, TypeVar

from starlette.requests import Request

from app.ui.api import FILE_TIMEOUT, api_of, segment
from app.ui.bulk.conversion import Conversion, check_rows
from app.ui.bulk.table import Table, read_table
from app.ui.bulk.text import SourceError
from app.ui.errors import RefusedError

# Two files at a time are read: more would only share the one interpreter.
_READERS = ThreadPoolExecutor(2, thread_name_prefix="bulk")
_T = TypeVar("_T")


@dataclass(slots=True, frozen=True)
class Source:
    id: str
    name: str
    size: int  # bytes
    file: BinaryIO
    table: Table
    found: Conversion  # the result of reading all rows

    @property
    def endpoint(self) -> str:
        return str(self.table.sample[0].values.get("url", ""))


class SpaceBudget:
    """Budget of the temporary directory, in bytes, for the files of current requests.

    Together they may have the size of one largest file: further ones are refused.
    """

    def __init__(self, most: int) -> None:
        self._free = most

    @contextlib.contextmanager
    def reserve(self, size: int) -> Iterator[None]:
        if size > self._free:
            raise RefusedError(
                503,
                "busy",
                "Other files are being read, and there is no room for this one beside them. It is "
                "kept: try again in a minute.",
                retry_after="30",
            )
        self._free -= size
        try:
            yield
        finally:
            self._free += size


@contextlib.asynccontextmanager
async def open_upload(request: Request, delimiter: str) -> AsyncIterator[Source]:
    """The uploaded file, read once. Raises ApiError with a message for people."""
    api, file_id = api_of(request), request.path_params["file_id"]
    stored = await api.get(f"/v1/files/{segment(file_id)}")
    most = request.app.state.settings.max_upload_bytes
    if stored["bytes"] > most:  # a program's upload, which the API accepts
        raise UnreadableError(stored["filename"], f"It is larger than {most:,} bytes. Split it.")
    space: SpaceBudget = request.app.state.bulk_space
    with space.reserve(stored["bytes"]), tempfile.TemporaryFile(prefix="bulk-") as file:
        async with api.stream(
            "GET", f"/v1/files/{segment(file_id)}/content", timeout=FILE_TIMEOUT
        ) as response:
            async for piece in response.aiter_bytes():
                file.write(piece)

        def read() -> tuple[Table, Conversion]:
            table = read_table(file, stored["filename"], delimiter)
            file.seek(0)
            return table, check_rows(file, table)

        try:
            table, found = await on_thread(file, read)
        except SourceError as error:
            raise UnreadableError(stored["filename"], str(error)) from error
        yield Source(file_id, stored["filename"], stored["bytes"], file, table, found)


class UnreadableError(RefusedError):
    def __init__(self, filename: str, message: str) -> None:
        super().__init__(422, "unreadable", f"{filename} cannot be used. {message}")


async def on_thread(file: BinaryIO, work: Callable[[], _T]) -> _T:
    file.seek(0)
    return await asyncio.get_running_loop().run_in_executor(_READERS, work)
