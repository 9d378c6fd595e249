"""Lists of rows as they are sent: encoded once, bounded in rows and bytes."""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from llm_api_client.jobs.prompts import Fill, RowError
from llm_api_client.jobs.records import Row, failed_row
from llm_api_client.jobs.sources import BadRow, Source

MAX_ROWS = 1000
# Below the service's default for a request (LLM_MAX_BODY_BYTES); a larger list is halved if it is refused.
_MAX_BYTES = 1_500_000
_MAX_KEY = 255

KeyOf = str | Callable[[Any], Any] | None


@dataclass(frozen=True)
class Item:
    """A row to send: its key, and its request as JSON."""

    key: str
    body: bytes


@dataclass
class Batch:
    """Rows to send, and those that cannot be sent."""

    items: list[Item] = field(default_factory=list)
    failed: list[Row[Any]] = field(default_factory=list)
    # Keys and inputs of all rows in the order of the data, if that is needed.
    order: list[tuple[str, Any]] = field(default_factory=list)

    def split(self, rows: int) -> tuple["Batch", "Batch"]:
        """The first rows, with all that cannot be sent, and the others."""
        return Batch(self.items[:rows], self.failed), Batch(self.items[rows:])

    def encoded(self, job_id: str) -> bytes:
        """The list as JSON; each request names the job."""
        begin = b'{"job_id":' + msgspec.json.encode(job_id) + b","
        return b"[" + b",".join(begin + item.body[1:] for item in self.items) + b"]"


@dataclass
class Batcher:
    """Makes batches of the rows of a source."""

    source: Source
    fill: Fill
    key: KeyOf
    options: Mapping[str, Any]
    keeps_input: bool = False

    def __iter__(self) -> Iterator[Batch]:
        encode = msgspec.json.Encoder().encode
        # The members that all rows share are encoded once: `,"model":"m",...}`.
        shared = b"," + encode(self.options)[1:]
        batch, size, keys = Batch(), 0, dict[str, bytes]()
        for number, row in enumerate(self.source.rows, 1):
            key = f"row-{number}"
            try:
                key = self._key(row, number)
                item = self._item(encode, shared, key, row)
                if keys.get(key, item.body) != item.body:
                    raise DuplicateKeyError(f"the key {key} of row {number} is another row's, too")
            except RowError as error:
                code = "duplicate_key" if isinstance(error, DuplicateKeyError) else "invalid_row"
                batch.failed.append(failed_row(key, code, str(error)))
            else:
                if key not in keys:
                    batch.items.append(item)
                    size += len(item.body)
                    keys[key] = item.body
            if self.keeps_input:
                batch.order.append((key, row))
            if len(batch.items) >= MAX_ROWS or len(batch.failed) >= MAX_ROWS or size >= _MAX_BYTES:
                yield batch
                batch, size, keys = Batch(), 0, {}
        if batch.items or batch.failed:
            yield batch

    def _item(self, encode: Callable[[Any], bytes], shared: bytes, key: str, row: Any) -> Item:
        prompt = self.fill(row)
        member = "content" if isinstance(prompt, str) else "messages"
        try:
            body = encode({"job_key": key, member: prompt})[:-1] + shared
        except (TypeError, ValueError) as error:
            raise RowError(f"the prompt is not JSON: {error}") from error
        return Item(key, body)

    def _key(self, row: Any, number: int) -> str:
        if isinstance(row, BadRow):
            raise RowError(row.reason)
        if self.key is None:
            return f"row-{number}"
        try:
            value = self.key(row) if callable(self.key) else row[self.key]
        except Exception as error:
            raise RowError(f"row {number} has no key ({type(error).__name__}: {error})") from error
        if value is None or value != value or value == "":
            raise RowError(f"the key of row {number} is empty")
        key = str(value)
        if len(key) > _MAX_KEY or not key.isprintable():
            raise RowError(
                f"the key of row {number} is not a printable text of at most {_MAX_KEY} characters"
            )
        return key


class DuplicateKeyError(RowError):
    """Two different rows have the same key."""


def digest(source: Source, first: Batch | None) -> str:
    """A name for the data: the same for the same first rows and size, with the same prompts and options."""
    content = hashlib.sha256(str(source.size).encode())
    for item in first.items if first else ():
        content.update(item.body)
    return content.hexdigest()[:32]
