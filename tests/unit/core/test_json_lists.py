"""A long JSON list is the same in pieces, for texts with any characters."""

import json
from typing import Any

import orjson
import pytest
from hypothesis import given, strategies as st

from app.core.json_lists import behind, items_in_pieces

TEXTS = st.text(alphabet='}{,"\\[] a', max_size=12)
ITEMS = st.none() | st.dictionaries(TEXTS, st.dictionaries(TEXTS, TEXTS, max_size=2), max_size=2)


@given(st.lists(ITEMS, max_size=20), st.integers(0, 40))
def test_the_pieces_are_the_list(items: list[Any], size: int) -> None:
    for text in (orjson.dumps(items).decode(), json.dumps(items)):
        pieces = list(items_in_pieces(text, size))
        assert [item for piece in pieces for item in piece] == items


@given(st.lists(st.lists(st.integers(), max_size=3), max_size=5), st.integers(0, 20))
def test_the_first_items_are_left_out(pieces: list[list[int]], count: int) -> None:
    items = [item for piece in pieces for item in piece]
    found = list(behind(pieces, count))
    assert [item for piece in found for item in piece] == items[count:]
    assert all(found)


def test_a_piece_is_short() -> None:
    text = orjson.dumps([{"1": {"decoded_token": "a"}}] * 1_000).decode()
    pieces = list(items_in_pieces(text, 300))
    assert max(map(len, pieces)) < 20
    assert sum(map(len, pieces)) == 1_000


def test_what_is_no_json_is_refused() -> None:
    with pytest.raises(orjson.JSONDecodeError):
        list(items_in_pieces('[{"1": {}}, {"1": {]'))
