"""Pages of models in Anthropic's shape: order, cursors, and models that are not ready."""

from datetime import UTC, datetime
from typing import Any

import pytest

from app.api.model_lists import anthropic_page
from app.core.errors import InvalidRequestError
from app.inference.model_registry import Model


def model(name: str, day: int | None, *, ready: bool = True) -> Model:
    seen_at = None if day is None else datetime(2026, 1, day, 12, 30, 5, 600, UTC)
    return Model(name, 1, ready, "", None, seen_at)


MODELS = [
    model("a", 3),
    model("b", 9),
    model("c", 3),
    model("d", 5, ready=False),
    model("e", None),
    model("f", 7),
]
ORDER = ["b", "f", "a", "c", "e"]  # d would be behind f


def ids(page: dict[str, Any]) -> list[str]:
    return [one["id"] for one in page["data"]]


def test_the_newest_is_first() -> None:
    page = anthropic_page(MODELS, "red")
    assert ids(page) == ORDER
    assert (page["has_more"], page["first_id"], page["last_id"]) == (False, "b", "e")
    assert page["data"][0]["created_at"] == "2026-01-09T12:30:05Z"
    assert page["data"][-1]["created_at"] == "1970-01-01T00:00:00Z"


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 6])
def test_pages_behind_each_other_are_the_list(limit: int) -> None:
    found, page = [], anthropic_page(MODELS, "red", limit=limit)
    while True:
        assert len(ids(page)) <= limit
        found += ids(page)
        assert page["has_more"] == (len(found) < len(ORDER))
        if not page["has_more"]:
            break
        page = anthropic_page(MODELS, "red", limit=limit, after_id=page["last_id"])
    assert found == ORDER
    back, page = ["e"], anthropic_page(MODELS, "red", limit=limit, before_id="e")
    while True:
        back = ids(page) + back
        if not page["has_more"]:
            break
        page = anthropic_page(MODELS, "red", limit=limit, before_id=page["first_id"])
    assert back == ORDER


def test_a_model_that_is_gone_is_a_cursor_still() -> None:
    assert ids(anthropic_page(MODELS, "red", after_id="d")) == ["a", "c", "e"]
    assert ids(anthropic_page(MODELS, "red", before_id="d")) == ["b", "f"]
    assert ids(anthropic_page(MODELS, "red", after_id="b", before_id="c")) == ["f", "a"]
    nothing = anthropic_page(MODELS, "red", after_id="e")
    assert nothing == {"data": [], "has_more": False, "first_id": None, "last_id": None}


@pytest.mark.parametrize("cursor", ["after_id", "before_id"])
def test_a_cursor_of_no_model_is_refused(cursor: str) -> None:
    with pytest.raises(InvalidRequestError, match=cursor):
        anthropic_page(MODELS, "red", **{cursor: "x"})  # type: ignore[arg-type]
