"""The output of a running attempt: its text, and the log probabilities of its tokens."""

from bisect import bisect_right
from typing import Any

import orjson


class OutputBuffer:
    """Pieces of text in the order they came. Offsets and lengths are Unicode code points."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._ends: list[int] = []  # the offset behind each piece

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __str__(self) -> str:
        return "".join(self._pieces)

    def append(self, text: str) -> None:
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


class TokenLog:
    """The log probabilities of tokens, as encoded JSON: a fifth of the memory of Python's objects.

    Each part is the inside of a list that came. Text would take four times its size where one token
    in a part holds an emoji.
    """

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._ends: list[int] = []  # how many tokens there are up to the end of each part

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def append(self, logprobs: str) -> None:
        """Raises ValueError unless it is a JSON list."""
        items = orjson.loads(logprobs)
        if not isinstance(items, list):
            raise ValueError("they are not a list")  # noqa: TRY004 - a fault of the text
        if items:
            self._ends.append(len(self) + len(items))
            self._parts.append(_with_marks(logprobs, items))

    def since(self, count: int, limit: int | None = None) -> list[Any]:
        """The tokens behind the first `count`, of at most `limit` lists."""
        first = bisect_right(self._ends, count)
        stop = None if limit is None else first + limit
        items: list[Any] = orjson.loads(b"[" + b",".join(self._parts[first:stop]) + b"]")
        known = self._ends[first - 1] if first else 0
        return items[count - known :]

    def parts(self, first: int = 0) -> tuple[bytes, ...]:
        """The parts since token `first`, where one begins."""
        return tuple(self._parts[bisect_right(self._ends, first) :])


def _with_marks(logprobs: str, items: list[Any]) -> bytes:
    """The inside of the list, with `"sampled": true` at the token that was chosen where others stand
    beside it.

    vLLM puts the chosen token first, which `jsonb` and other languages do not keep.
    """
    crowded = [item for item in items if isinstance(item, dict) and len(item) > 1]
    if not crowded:
        return logprobs.strip()[1:-1].encode()
    for item in crowded:
        next(iter(item.values()))["sampled"] = True
    return orjson.dumps(items)[1:-1]
