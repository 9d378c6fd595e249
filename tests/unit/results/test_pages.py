"""Pages of lists: the indexes that serve them, and the ids between which they lie."""

from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest

from app.core.ids import lowest_id, new_id
from app.results.pages import ResultFilter, walks_of
from app.results.tags import tag_of

CONTEXT = new_id()


@pytest.mark.parametrize(
    ("members", "walks"),
    [
        ({}, {"team_id": ["true"]}),
        ({"state": "completed"}, {"team_id": ["state = 'completed'"]}),
        ({"state": "pending"}, {"team_id | state = 'pending'": ["true"]}),
        ({"state": "failed"}, {"team_id | state = 'failed'": ["true"]}),
        ({"model_name": "m"}, {"team_id, model_name": ["true"]}),
        (
            {"model_name": "m", "state": "completed"},
            {"team_id, model_name": ["state = 'completed'"]},
        ),
        (
            {"model_name": "m", "state": "pending"},
            {
                "team_id, model_name": ["state = 'pending'"],
                "team_id | state = 'pending'": ["(model_name = $4) IS TRUE"],
            },
        ),
        ({"model_name": "m", "state": "failed"}, {"model_name, team_id | state = 'failed'": ["true"]}),
        ({"context_id": CONTEXT}, {"context_id": ["(team_id = $4) IS TRUE"]}),
        (
            {"context_id": CONTEXT, "model_name": "m"},
            {
                "context_id": ["(team_id = $4) IS TRUE", "(model_name = $5) IS TRUE"],
                "team_id, model_name": ["(context_id = $5) IS TRUE"],
            },
        ),
        (
            {"context_id": CONTEXT, "state": "failed"},
            {
                "context_id": ["(team_id = $4) IS TRUE", "state = 'failed'"],
                "team_id | state = 'failed'": ["(context_id = $4) IS TRUE"],
            },
        ),
        ({"error_code": "x"}, {"team_id, error_code | error_code IS NOT NULL": ["true"]}),
        ({"retryable": True}, {"team_id, error_retryable | error_retryable IS NOT NULL": ["true"]}),
        (
            {"error_code": "x", "retryable": False, "model_name": "m"},
            {
                "team_id, error_code | error_code IS NOT NULL": ["(model_name = $5) IS TRUE", "(error_retryable = $6) IS TRUE"],
                "team_id, error_retryable | error_retryable IS NOT NULL": ["(model_name = $5) IS TRUE", "(error_code = $6) IS TRUE"],
                "model_name, team_id | state = 'failed'": ["(error_code = $5) IS TRUE", "(error_retryable = $6) IS TRUE"],
            },
        ),
    ],
)  # fmt: skip
def test_each_index_that_serves_a_filter_is_a_walk(
    members: dict[str, Any], walks: dict[str, list[str]]
) -> None:
    found = walks_of("red", ResultFilter(**members), None)
    assert len(found) == len(walks)
    for walk, (index, tests) in zip(found, walks.items(), strict=True):
        order, _, where = index.partition(" | ")
        columns = order.split(", ")
        count = len(columns)
        values = ", ".join(f"${place}" for place in range(1, count + 1))
        bounds = [
            f"({order}, id) >= ({values}, ${count + 1})", f"({order}, id) < ({values}, ${count + 2})"
        ]  # fmt: skip
        assert walk.bounds == " AND ".join([*bounds, where] if where else bounds)
        assert walk.tests == " AND ".join(tests)
        assert walk.order == ", ".join(f"{name} DESC" for name in [*columns, "id"])
        placeholders = {
            one for one in walk.conditions.replace(",", " ").replace(")", " ").split() if "$" in one
        }
        assert len(walk.arguments) == len({one.strip("(") for one in placeholders})


def test_ids_are_looked_up_and_every_filter_tested() -> None:
    ids = [new_id(), new_id()]
    narrowed = ResultFilter(ids=ids, model_name="m", context_id=CONTEXT, state="completed")
    (walk,) = walks_of("red", narrowed, None)
    assert walk.bounds == "id = ANY($1::uuid[]) AND id >= $2 AND id < $3"
    assert walk.tests == (
        "(team_id = $4) IS TRUE AND (model_name = $5) IS TRUE AND (context_id = $6) IS TRUE"
        " AND state = 'completed'"
    )
    assert walk.arguments == [ids, walk.low, walk.high, "red", "m", CONTEXT]
    assert walk.below(ids[1]).arguments[2] == ids[1]
    assert not walks_of("red", ResultFilter(ids=ids, state="pending", retryable=True), None)


def test_each_pair_is_a_walk_and_a_test_of_the_others() -> None:
    metadata = {"run": "7", "n": "1"}
    for members, others in (
        ({}, []),
        ({"context_id": CONTEXT}, ["results"]),
        ({"model_name": "m", "state": "pending"}, ["results", "results"]),
    ):
        found = walks_of("red", ResultFilter(metadata=metadata, **members), None)
        by_tag = [walk for walk in found if walk.source != "results"]
        assert [walk.source for walk in found if walk not in by_tag] == others
        assert [walk.arguments[:2] for walk in by_tag] == [
            ["red", tag_of(*pair)] for pair in metadata.items()
        ]
        assert [walk.arguments[-2:] for walk in by_tag] == [["n", "1"], ["run", "7"]]
        assert "context_id" not in members or found[0] not in by_tag
        for walk in found:
            assert walk.tests.count("metadata ->>") == (1 if walk in by_tag else 2)
            assert f"${len(walk.arguments)}" in walk.conditions
            assert f"${len(walk.arguments) + 1}" not in walk.conditions
    (lookup,) = walks_of("red", ResultFilter(ids=[CONTEXT], metadata=metadata), None)
    assert lookup.arguments[-4:] == ["run", "7", "n", "1"]


def test_only_failed_results_have_an_error() -> None:
    for state in ("completed", "pending"):
        for members in ({"error_code": "x"}, {"retryable": False}):
            narrowed = ResultFilter(state=state, **members)
            assert not walks_of("red", narrowed, None)
    assert walks_of("red", ResultFilter(state="failed", error_code="x"), None)


def test_a_walk_lies_between_two_times_and_below_the_last_id() -> None:
    early, late = datetime(2030, 1, 1, tzinfo=UTC), datetime(2031, 1, 1, tzinfo=UTC)
    below, above = (
        lowest_id(datetime(2030, 6, 1, tzinfo=UTC)),
        lowest_id(datetime(2033, 1, 1, tzinfo=UTC)),
    )
    narrowed = ResultFilter(created_after=early, created_before=late)
    for after, high in ((None, lowest_id(late)), (below, below), (above, lowest_id(late))):
        (walk,) = walks_of("red", narrowed, after)
        assert (walk.low, walk.high) == (lowest_id(early), high)
        assert walk.arguments == ["red", lowest_id(early), high]
    (walk,) = walks_of("red", ResultFilter(), None)
    assert (walk.low, walk.high) == (UUID(int=0), UUID(int=2**128 - 1))
    assert walk.select("id", 5).endswith(" ORDER BY team_id DESC, id DESC LIMIT 5")
    rest = walk.below(below)
    assert (rest.high, rest.arguments, rest.bounds) == (
        below,
        ["red", UUID(int=0), below],
        walk.bounds,
    )
    assert walk.arguments == ["red", UUID(int=0), UUID(int=2**128 - 1)]
