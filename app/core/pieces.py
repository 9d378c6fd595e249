"""Sequences in pieces that are bounded in bytes."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def in_pieces(
    items: Iterable[T], size: Callable[[T], int], most_bytes: int, most_items: int | None = None
) -> Iterator[list[T]]:
    """The items in their order, each piece of at most so many bytes; a larger item is alone."""
    piece: list[T] = []
    together = 0
    for item in items:
        added = size(item)
        if piece and (together + added > most_bytes or len(piece) == most_items):
            yield piece
            piece, together = [], 0
        piece.append(item)
        together += added
    if piece:
        yield piece
