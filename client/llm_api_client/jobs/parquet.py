"""Parquet files, by pyarrow (the extra `parquet`)."""

from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from llm_api_client.errors import ConfigurationError
from llm_api_client.jobs.files import publish

# Rows that are in memory at the same time, and rows of a group of a file that is written.
_READ_ROWS = 1000
_GROUP_ROWS, _VECTOR_GROUP_ROWS = 10_000, 1_000
_TEXTS = ("key", "text", "result_id", "model", "finish_reason")
_NUMBERS = ("place", "prompt_tokens", "completion_tokens")


def parquet_library() -> Any:
    """The module pyarrow.parquet.

    Raises:
        ConfigurationError: it is not installed.
    """
    try:
        from pyarrow import parquet
    except ImportError:
        raise ConfigurationError(
            "Parquet needs pyarrow: pip install 'llm-api-client[parquet]'."
        ) from None
    return parquet


def parquet_total(path: Path) -> int:
    """The number of rows of a file."""
    total: int = parquet_library().read_metadata(path).num_rows
    return total


def parquet_rows(path: Path) -> Iterator[Any]:
    """The rows of a file, as mappings."""
    with closing(parquet_library().ParquetFile(path)) as file:
        for batch in file.iter_batches(batch_size=_READ_ROWS):
            yield from batch.to_pylist()


def write_parquet(lines: Path, path: Path) -> None:
    """Write the lines of a file of answers as a Parquet file, at once; with a column for vectors or scores."""
    import pyarrow as arrow

    fields = [(name, arrow.string()) for name in _TEXTS] + [
        (name, arrow.int64()) for name in _NUMBERS
    ]
    group_rows = _GROUP_ROWS
    for name in _members(lines) & {"vector", "scores"}:
        fields.append((name, arrow.list_(arrow.float32())))
        group_rows = _VECTOR_GROUP_ROWS
    schema = arrow.schema(fields)
    new = path.with_name(path.name + ".new")
    with lines.open("rb") as file, parquet_library().ParquetWriter(new, schema) as writer:
        while group := [msgspec.json.decode(line) for line in islice(file, group_rows)]:
            writer.write_table(arrow.Table.from_pylist(group, schema=schema))
    publish(new, path)


def _members(lines: Path) -> set[str]:
    with lines.open("rb") as file:
        first = file.readline()
    return set(msgspec.json.decode(first)) if first else set()
