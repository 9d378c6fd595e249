"""Pieces that are bounded in bytes and items."""

import pytest

from app.core.pieces import in_pieces


@pytest.mark.parametrize(
    ("items", "pieces"),
    [
        ([], []),
        ([4, 6, 1], [[4, 6], [1]]),
        ([1, 10, 2, 8, 1], [[1], [10], [2, 8], [1]]),
        ([1, 99, 1], [[1], [99], [1]]),
        ([0, 0, 0, 0], [[0, 0, 0], [0]]),
    ],
)
def test_pieces_have_ten_bytes_and_three_items(items: list[int], pieces: list[list[int]]) -> None:
    assert list(in_pieces(items, int, 10, 3)) == pieces


def test_pieces_without_a_bound_of_items() -> None:
    assert list(in_pieces([0] * 50, int, 10)) == [[0] * 50]
