"""An ended result in the metrics of its process, and in the totals of its minute."""

from datetime import UTC, datetime, timedelta
from typing import Any, cast

import orjson
import pytest

from app.core import metrics
from app.core.database import Connection
from app.core.ids import created_at, new_id
from app.results.rows import EndedResult
from app.results.stats import histogram
from app.results.stats.totals import add_to_minutes, observe


def ended(model: str, **members: Any) -> EndedResult:
    """A result that waited 1 s, had its first token after 2 s more, and 3 tokens in the next 4 s."""
    identifier = new_id()
    created = created_at(identifier)
    known: dict[str, Any] = {
        "ended_as": "completed", "team_id": "red", "prompt_tokens": 5, "completion_tokens": 3,
        "started_at": created + timedelta(seconds=1),
        "first_token_at": created + timedelta(seconds=3),
        "finished_at": created + timedelta(seconds=7),
        "max_tokens": 9, "is_counted": True, "is_recent": True, "is_long": False,
        "kind": "generation", "is_chat": False,
    }  # fmt: skip
    return EndedResult(identifier, model_name=model, **known | members)


def observed(model: str) -> dict[str, float]:
    """The sums of a model's histograms, those with an observation."""
    names = (
        "RESULT_SECONDS", "RESULT_PROMPT_TOKENS", "RESULT_COMPLETION_TOKENS", "RESULT_MAX_TOKENS",
        "QUEUE_WAIT", "INFERENCE", "FIRST_TOKEN", "INTER_TOKEN",
    )  # fmt: skip
    series = {name: getattr(metrics, name).of(model) for name in names}
    return {name: round(one.sum, 3) for name, one in series.items() if sum(one.counts)}


def test_an_ended_result_is_observed_in_each_metric() -> None:
    model = "observed-whole"
    observe(ended(model))
    assert observed(model) == {
        "RESULT_SECONDS": 7, "RESULT_PROMPT_TOKENS": 5, "RESULT_COMPLETION_TOKENS": 3,
        "RESULT_MAX_TOKENS": 9, "QUEUE_WAIT": 1, "INFERENCE": 6, "FIRST_TOKEN": 3, "INTER_TOKEN": 2,
    }  # fmt: skip
    assert metrics.RESULTS.of(model, "completed").value == 1
    assert metrics.PROMPT_TOKENS.of("red", model).value == 5
    assert metrics.COMPLETION_TOKENS.of("red", model).value == 3


@pytest.mark.parametrize("tokens", [None, 0, 1, 2])
def test_only_a_second_token_has_a_distance(tokens: int | None) -> None:
    model = f"observed-{tokens}"
    observe(ended(model, completion_tokens=tokens))
    found = observed(model)
    assert found.get("INTER_TOKEN") == (4 if tokens == 2 else None)
    assert found.get("RESULT_COMPLETION_TOKENS") == (tokens or None)


def test_a_result_that_never_ran_has_no_times_of_a_model() -> None:
    model = "observed-never"
    observe(ended(model, started_at=None, prompt_tokens=None, max_tokens=None))
    assert observed(model) == {"RESULT_SECONDS": 7, "RESULT_COMPLETION_TOKENS": 3}
    model = "observed-silent"
    observe(ended(model, first_token_at=None))
    assert not {"FIRST_TOKEN", "INTER_TOKEN"} & observed(model).keys()


def test_clocks_that_differ_make_no_negative_times() -> None:
    early = datetime(2000, 1, 1, tzinfo=UTC)
    model = "observed-early"
    observe(ended(model, started_at=early + timedelta(1), finished_at=early, first_token_at=early))
    times = "RESULT_SECONDS", "QUEUE_WAIT", "INFERENCE", "FIRST_TOKEN", "INTER_TOKEN"
    assert [observed(model)[name] for name in times] == [0] * 5


# --- totals -----------------------------------------------------------------------------------------


class Statements:
    """A connection that keeps the rows of its statements."""

    def __init__(self) -> None:
        self.rows: list[list[dict[str, Any]]] = []

    async def execute(self, _sql: str, rows: str) -> None:
        self.rows.append(orjson.loads(rows))


def counts(*seconds: float) -> list[int]:
    found = [0] * histogram.SIZE
    for one in seconds:
        found[histogram.bucket_of(one)] += 1
    return found


async def test_results_of_a_minute_are_added_up_by_team_model_and_end() -> None:
    results = [
        ended("m"),
        ended("m", prompt_tokens=None, completion_tokens=None, first_token_at=None),
        ended("m", started_at=None),
        ended("a", ended_as="cancelled"),
        ended("m", team_id="blue"),
    ]
    at = datetime(2030, 1, 2, 3, 4, 5, 678, tzinfo=UTC)
    results = [EndedResult(**_members(one) | {"finished_at": at}) for one in results]
    statements = Statements()
    await add_to_minutes(cast(Connection, statements), results)
    (rows,) = statements.rows
    keys = [(one["team_id"], one["model_name"], one["ended_as"]) for one in rows]
    assert keys == [
        ("blue", "m", "completed"),
        ("red", "a", "cancelled"),
        ("red", "m", "completed"),
    ]
    assert {one["minute"] for one in rows} == {"2030-01-02T03:04:00+00:00"}
    total = rows[-1]
    sums = [total[name] for name in ("results", "prompt_tokens", "completion_tokens")]
    assert sums == [3, 10, 6]
    assert total["queue_seconds"] == counts(1, 1)
    assert total["first_token_seconds"] == counts(2)
    assert sum(total["seconds"]) == 3
    await add_to_minutes(cast(Connection, statements), [])
    assert len(statements.rows) == 1


def _members(result: EndedResult) -> dict[str, Any]:
    return {name: getattr(result, name) for name in EndedResult.__slots__}
