"""The lines of a batch whose results are in the queue or running."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from uuid import UUID

from app.batches.dialect import Render
from app.batches.rows import Line


@dataclass(slots=True)
class InFlightLine:
    """A line, and its results that have not ended."""

    line: Line
    open_ids: set[UUID]
    render: Render | None  # None: another process has sent the line
    is_stored: bool = True  # False: its texts are erased after its outcome is stored
    size: int = 0  # of the outputs of its results that have ended, in bytes


class InFlightLines:
    def __init__(self) -> None:
        self._lines: dict[int, InFlightLine] = {}
        self._line_of: dict[UUID, int] = {}  # of each result that has not ended
        self._ended: set[UUID] = set()  # results that are reported to have ended

    @property
    def is_empty(self) -> bool:
        return not self._lines

    @property
    def result_ids(self) -> list[UUID]:
        return list(self._line_of)

    @property
    def result_count(self) -> int:
        return len(self._line_of)

    def load(self, lines: Iterable[Line]) -> None:
        self._lines.clear()
        self._line_of.clear()
        for line in lines:
            self.add(line, None)

    def add(self, line: Line, render: Render | None) -> None:
        """Add a line that is sent; its body is dropped, since all bodies would fill the memory."""
        self._lines[line.line] = InFlightLine(replace(line, body=""), set(line.result_ids), render)
        for result_id in line.result_ids:
            self._line_of[result_id] = line.line

    def mark_ended(self, ids: Iterable[UUID] | None) -> bool:
        """Note that results may have ended, all of them for None; whether any is of this batch."""
        ended = self._line_of.keys() if ids is None else self._line_of.keys() & set(ids)
        self._ended |= ended
        return bool(ended)

    def take_ended(self) -> set[UUID]:
        ended, self._ended = self._ended, set()
        return ended

    def remove_results(self, sizes: Mapping[UUID, int]) -> list[InFlightLine]:
        """Remove ended results, with their sizes; the lines all of whose results have ended."""
        for result_id, size in sizes.items():
            if (number := self._line_of.pop(result_id, None)) is not None:
                self._lines[number].open_ids.discard(result_id)
                self._lines[number].size += size
        return [one for one in self._lines.values() if not one.open_ids]

    def remove(self, lines: Sequence[InFlightLine]) -> None:
        for one in lines:
            del self._lines[one.line.line]
