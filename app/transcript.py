"""The text of an attempt as it grows, readable from any offset."""

from bisect import bisect_right


class Transcript:
    """Pieces of text in the order they came. Offsets and lengths are Unicode code points."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._ends: list[int] = []  # the offset behind each piece

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __str__(self) -> str:
        return "".join(self._pieces)

    def append(self, text: str) -> None:
        """Add text at the end."""
        if text:
            self._ends.append(len(self) + len(text))
            self._pieces.append(text)

    def since(self, offset: int, limit: int | None = None) -> str:
        """The text from `offset` on, at most `limit` of it; empty at the end and beyond it."""
        first = bisect_right(self._ends, offset)
        if first == len(self._pieces):
            return ""
        last = len(self._pieces)
        if limit is not None:
            last = bisect_right(self._ends, offset + limit, lo=first) + 1
        begins = self._ends[first] - len(self._pieces[first])
        return "".join(self._pieces[first:last])[offset - begins :][:limit]
