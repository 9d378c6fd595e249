"""Sizes of plain contexts that this process has seen: sending one again reads no text."""

from collections import OrderedDict
from dataclasses import dataclass
from uuid import UUID

_CAPACITY = 10_000  # contexts; about 2 MB


@dataclass(slots=True, frozen=True)
class TextSize:
    characters: int
    bytes: int  # in UTF-8


class PlainContexts:
    """The contexts of this process that were used last and are text, not messages.

    A text does not change. It may be erased or deleted: the statement that stores a result finds that.
    """

    def __init__(self, capacity: int = _CAPACITY) -> None:
        self._capacity = capacity
        self._sizes: OrderedDict[tuple[str, UUID], TextSize] = OrderedDict()

    def remember(self, team_id: str, context_id: UUID, size: TextSize) -> None:
        self._sizes[team_id, context_id] = size
        if len(self._sizes) > self._capacity:
            self._sizes.popitem(last=False)

    def size(self, team_id: str, context_id: UUID) -> TextSize | None:
        """Return the size of its text; None if this process has not seen it."""
        size = self._sizes.get((team_id, context_id))
        if size is not None:
            self._sizes.move_to_end((team_id, context_id))
        return size
