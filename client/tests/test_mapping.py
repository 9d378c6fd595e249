"""The course of a job, step by step: what it reads, and when it pauses."""

from typing import Any

import msgspec
import pytest

from llm_api_client.jobs.mapping import Course
from llm_api_client.jobs.progress import Progress
from llm_api_client.jobs.records import EndedRow, Row
from llm_api_client.jobs.start import start_map
from llm_api_client.schemas import Result
from llm_api_client.steps import Emit, Exchange, Pause, Reply

NEXT = {"link": '</jobs/j/results?after=1&limit=1000>; rel="next"'}
VECTOR = [0.5, -0.25]


def reply(body: object, headers: dict[str, str] | None = None) -> Reply:
    return Reply(200, headers or {}, msgspec.json.encode(body))


def ended(place: int, **members: Any) -> dict[str, Any]:
    result = {"id": f"r{place}", "state": "completed", "model_name": "m"} | members
    row = {"place": place, "key": f"k{place}", "result_id": f"r{place}", "state": result["state"]}
    return row | {"result": result}


def steps_of(*replies: Reply) -> list[object]:
    """Steps of a job of another process with these responses; its requests as their paths."""
    left, steps = list(replies), list[object]()
    running = Course("j", Progress(is_shown=False)).rows()
    step: Any = next(running)
    while True:
        outcome = None
        if isinstance(step, Exchange):
            steps.append(step.request.path)
            outcome = left.pop(0)
        else:
            steps.append(step.item.key if isinstance(step, Emit) else step)
        try:
            step = running.send(outcome)
        except StopIteration:
            assert left == []
            return steps


def test_pages_that_end_by_their_bytes_are_read_without_a_pause() -> None:
    job = {"id": "j", "state": "ended"}
    page = "/jobs/j/results"
    replies = [reply(job), reply([ended(1)], NEXT), reply([ended(2)]), reply([])]
    found = steps_of(*replies)
    pauses = [place for place, step in enumerate(found) if isinstance(step, Pause)]
    assert [step for step in found if not isinstance(step, Pause)] == [
        "/jobs/j", page, "k1", page, "k2", page,
    ]  # fmt: skip
    assert pauses == [5]  # behind the last page alone


@pytest.mark.parametrize(
    ("options", "window"),
    [
        ({}, None),
        ({"order": "input"}, 10_000),
        ({"embedding": {}}, None),
        ({"order": "input", "embedding": {}}, 2_000),
        ({"order": "input", "embedding": {}, "window": 5}, 5),
        ({"order": "input", "score": {}}, 10_000),
    ],
)
def test_the_window_bounds_the_memory(options: dict[str, Any], window: int | None) -> None:
    rows = ["a"] if "score" not in options else [{"query": "a", "documents": "b"}]
    starting = start_map(rows, model="m", **options)
    next(starting)
    with pytest.raises(StopIteration) as ended:
        starting.send(reply({"id": "j", "state": "open"}))
    assert ended.value.value.window == window


@pytest.mark.parametrize(
    ("kind", "result", "vector"),
    [
        ("embedding", {"embedding": VECTOR}, VECTOR),
        ("embedding", None, None),
        ("score", {"score": 0.5}, None),
        ("generation", "text", None),
        ("attribution", {"embedding": VECTOR}, None),
    ],
)
def test_the_vector_of_a_row(kind: str, result: Any, vector: Any) -> None:
    read = Result(id="r", state="completed", model_name="m", kind=kind, result=result)
    assert read.vector == vector
    row: Row[None] = Course("j", Progress(is_shown=False)).read(
        msgspec.convert(ended(1, kind=kind, result=result), type=EndedRow)
    )
    assert (row.vector, row.text) == (vector, result if isinstance(result, str) else "")


@pytest.mark.parametrize(
    ("kind", "result", "scores"),
    [
        ("score", {"score": 0.5}, [0.5]),
        ("score", {"scores": [0.5, 1.0]}, [0.5, 1.0]),
        ("score", None, None),
        ("embedding", {"score": 0.5}, None),
        ("generation", "text", None),
    ],
)
def test_the_scores_of_a_row(kind: str, result: Any, scores: Any) -> None:
    row: Row[None] = Course("j", Progress(is_shown=False)).read(
        msgspec.convert(ended(1, kind=kind, result=result), type=EndedRow)
    )
    assert row.scores == scores
