"""Rows in the order of the data, from rows in the order of their ends."""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from llm_api_client.jobs.records import Row, failed_row


@dataclass
class _Expected:
    key: str
    input: Any
    refused: Row[Any] | None = None


class Ordering:
    """Keeps the rows that ended before their turn; its length is the number of rows that wait for theirs."""

    def __init__(self) -> None:
        self._expected: deque[_Expected] = deque()
        self._ended: dict[str, Row[Any]] = {}

    def __len__(self) -> int:
        return len(self._expected)

    @property
    def first_key(self) -> str | None:
        """The key of the row whose turn it is; None if no row waits."""
        return self._expected[0].key if self._expected else None

    def expect(self, rows: Iterable[tuple[str, Any]]) -> None:
        """Keys and inputs of rows that follow those before."""
        self._expected.extend(_Expected(key, given) for key, given in rows)

    def refuse(self, rows: Iterable[Row[Any]]) -> None:
        """Rows that will not end; of several with one key, it is the last."""
        for row in rows:
            for expected in reversed(self._expected):
                if expected.key == row.key and expected.refused is None:
                    expected.refused = row
                    break

    def end(self, rows: Iterable[Row[Any]]) -> None:
        """Rows that have ended."""
        self._ended.update((row.key, row) for row in rows)

    def ready(self) -> Iterator[Row[Any]]:
        """The rows whose turn it is, with their inputs."""
        while self._expected:
            first = self._expected[0]
            row = first.refused or self._ended.pop(first.key, None)
            if row is None:
                return
            self._expected.popleft()
            yield msgspec.structs.replace(row, input=first.input)

    def skip(self) -> Iterator[Row[Any]]:
        """The first row, which has the key and the request of an earlier one, and those behind it."""
        if self._expected:
            first = self._expected.popleft()
            reason = "an earlier row has the same key and request"
            yield failed_row(first.key, "duplicate_key", reason, input=first.input)
            yield from self.ready()
