"""Pages of lists: the index that serves them, and the ids between which they lie."""

from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest

from app.core.ids import lowest_id, new_id
from app.results.pages import ResultFilter, page_of

CONTEXT = new_id()


@pytest.mark.parametrize(
    ("members", "order", "rest"),
    [
        ({}, "team_id", []),
        ({"state": "pending"}, "team_id", ["state = 'pending'"]),
        ({"model_name": "m"}, "team_id, model_name", []),
        ({"model_name": "m", "state": "completed"}, "team_id, model_name", ["state = 'completed'"]),
        ({"model_name": "m", "state": "pending"}, "team_id", ["model_name = $4", "state = 'pending'"]),
        ({"context_id": CONTEXT}, "context_id", ["team_id = $4"]),
        ({"context_id": CONTEXT, "model_name": "m"}, "context_id", ["team_id = $4", "model_name = $5"]),
        ({"error_code": "x"}, "team_id, error_code", ["error_code IS NOT NULL"]),
        (
            {"error_code": "x", "retryable": False, "model_name": "m"},
            "team_id, error_code",
            ["model_name = $5", "error_retryable = $6", "error_code IS NOT NULL"],
        ),
        ({"retryable": True}, "team_id", ["error_retryable = $4", "state = 'failed'"]),
    ],
)  # fmt: skip
def test_the_filter_of_fewest_rows_chooses_the_index(
    members: dict[str, Any], order: str, rest: list[str]
) -> None:
    page = page_of("red", ResultFilter(**members), None)
    assert page is not None
    columns = order.split(", ")
    count = len(columns)
    values = ", ".join(f"${place}" for place in range(1, count + 1))
    bounds = [
        f"({order}, id) >= ({values}, ${count + 1})", f"({order}, id) < ({values}, ${count + 2})"
    ]  # fmt: skip
    assert page.conditions == " AND ".join([*bounds, *rest])
    assert page.order == ", ".join(f"{name} DESC" for name in [*columns, "id"])
    placeholders = {
        one for one in page.conditions.replace(",", " ").replace(")", " ").split() if "$" in one
    }
    assert len(page.arguments) == len({one.strip("(") for one in placeholders})


def test_only_failed_results_have_an_error() -> None:
    for state in ("completed", "pending"):
        for members in ({"error_code": "x"}, {"retryable": False}):
            narrowed = ResultFilter(state=state, **members)
            assert page_of("red", narrowed, None) is None
    assert page_of("red", ResultFilter(state="failed", error_code="x"), None) is not None


def test_a_page_lies_between_two_times_and_below_the_last_id() -> None:
    early, late = datetime(2030, 1, 1, tzinfo=UTC), datetime(2031, 1, 1, tzinfo=UTC)
    below, above = (
        lowest_id(datetime(2030, 6, 1, tzinfo=UTC)),
        lowest_id(datetime(2033, 1, 1, tzinfo=UTC)),
    )
    narrowed = ResultFilter(created_after=early, created_before=late)
    for after, high in ((None, lowest_id(late)), (below, below), (above, lowest_id(late))):
        page = page_of("red", narrowed, after)
        assert page is not None
        assert (page.low, page.high) == (lowest_id(early), high)
        assert page.arguments == ["red", lowest_id(early), high]
    page = page_of("red", ResultFilter(), None)
    assert page is not None
    assert (page.low, page.high) == (UUID(int=0), UUID(int=2**128 - 1))
    assert page.select("id", 5).endswith(" ORDER BY team_id DESC, id DESC LIMIT 5")
