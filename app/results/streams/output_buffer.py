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
    """The log probabilities of tokens, as the JSON lists that came: a tenth of the memory."""

    def __init__(self) -> None:
        self._lists: list[str] = []
        self._ends: list[int] = []  # how many tokens there are up to the end of each list

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def append(self, logprobs: str) -> None:
        items = orjson.loads(logprobs)
        self._ends.append(len(self) + len(items))
        self._lists.append(_with_marks(logprobs, items))

    def since(self, count: int) -> list[Any]:
        first = bisect_right(self._ends, count)
        items = [item for part in self._lists[first:] for item in orjson.loads(part)]
        known = self._ends[first - 1] if first else 0
        return items[count - known :]

    def to_json(self, first: int = 0) -> str | None:
        """One JSON list of all since token `first`, where a list begins; None if there is none."""
        lists = self._lists[bisect_right(self._ends, first) :]
        inner = (part.strip()[1:-1].strip() for part in lists)
        return "[" + ",".join(part for part in inner if part) + "]" if lists else None


def _with_marks(logprobs: str, items: list[Any]) -> str:
    """The list, with `"sampled": true` at the token that was chosen where others stand beside it.

    vLLM puts the chosen token first, which `jsonb` and other languages do not keep.
    """
    crowded = [item for item in items if isinstance(item, dict) and len(item) > 1]
    if not crowded:
        return logprobs
    for item in crowded:
        next(iter(item.values()))["sampled"] = True
    return orjson.dumps(items).decode()
