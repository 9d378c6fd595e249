"""Long JSON lists, parsed a few items at a time: a parser holds the interpreter to its end."""

import re
from collections.abc import Iterable, Iterator
from typing import Any

import orjson

PIECE_CHARACTERS = 16_384  # parsed in less than a millisecond
_BETWEEN_ITEMS = re.compile(r"\}\}, ?\{")  # objects of objects, as orjson and PostgreSQL write them


def items_in_pieces(text: str, size: int = PIECE_CHARACTERS) -> Iterator[list[Any]]:
    """The items of a JSON list of objects of objects, in pieces of about `size` characters.

    A piece that is no JSON ends within a text that looks like the space between two items: it is taken
    twice as long.
    """
    begins, behind, wanted = text.index("[") + 1, text.rindex("]"), size
    while begins < behind:
        found = _BETWEEN_ITEMS.search(text, begins + wanted, behind)
        ends = found.start() + 2 if found else behind
        try:
            items = orjson.loads(f"[{text[begins:ends]}]")
        except orjson.JSONDecodeError:
            if found is None:
                raise
            wanted *= 2
            continue
        yield items
        begins, wanted = ends + 1, size


def behind(pieces: Iterable[list[Any]], count: int) -> Iterator[list[Any]]:
    """The pieces without their first `count` items."""
    for piece in pieces:
        if count < len(piece):
            yield piece[count:]
        count = max(0, count - len(piece))
