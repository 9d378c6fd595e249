"""Rows that a service refuses for the moment: sent again, and never reported as failed."""

import json
from dataclasses import dataclass, field
from typing import Any

import pytest

from llm_api_client.errors import APIStatusError
from llm_api_client.jobs.batches import Batcher
from llm_api_client.jobs.mapping import Course
from llm_api_client.jobs.ordering import Ordering
from llm_api_client.jobs.progress import Progress
from llm_api_client.jobs.prompts import compile_prompt
from llm_api_client.jobs.records import Row
from llm_api_client.jobs.sources import open_source
from llm_api_client.retries import with_retries
from llm_api_client.steps import Emit, Exchange, Outcome, Pause, Reply, Request

ROWS = [{"id": key} for key in ("a", "b", "c")]


def problem(status: int, code: str, **more: Any) -> dict[str, Any]:
    return {"status": status, "code": code, "detail": "d"} | more


BUSY = problem(503, "templates_busy")


@dataclass
class Job:
    """A job whose rows end as they are accepted.

    Attributes:
        refusals: of each list, the problems of some rows by key, or of the whole list.
        unplaced: reads of ended rows that do not see the last row yet.
    """

    refusals: list[dict[str, Any]] = field(default_factory=list)
    unplaced: int = 0
    is_cancelled: bool = False
    state: str = "open"
    keys: list[str] = field(default_factory=list)
    sent: list[list[str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)

    def answer(self, request: Request) -> Reply:
        action = request.path.removeprefix("/jobs/j").strip("/")
        self.paths.append(action)
        body = json.loads(request.body or b"null")
        if action == "results" and request.method == "POST":
            return self.take(body)
        if action == "results":
            return self.page(int(request.query["after"] or 0))
        if action == "rows":
            return reply(200, [self.keyed(key) for key in body["keys"]])
        if action == "open":
            if self.is_cancelled:
                return reply(409, problem(409, "conflict"))
            self.state = "open"
        if action == "close":
            self.state = "ended"
        counts = {"rows": len(self.keys), "completed": len(self.keys)}
        # It has ended once all of its rows have their places.
        state = "closed" if self.state == "ended" and self.unplaced else self.state
        return reply(200, {"id": "j", "state": state, "counts": counts})

    def take(self, items: list[dict[str, Any]]) -> Reply:
        keys = [item["job_key"] for item in items]
        self.sent.append(keys)
        refused = self.refusals.pop(0) if self.refusals else {}
        if "status" in refused:
            return reply(refused["status"], refused)
        return reply(202, [refused.get(key) or self.outcome(key) for key in keys])

    def outcome(self, key: str) -> dict[str, Any]:
        if key not in self.keys:
            if self.state == "ended":
                return problem(409, "job_closed")
            self.keys.append(key)
        return {"id": f"r-{key}", "state": "completed"}

    def page(self, after: int) -> Reply:
        last = len(self.keys)
        if self.unplaced and last:
            self.unplaced, last = self.unplaced - 1, last - 1
        result = {"id": "r", "state": "completed", "model_name": "m", "result": "text"}
        rows = [
            {"place": place, "key": self.keys[place - 1], "result_id": "r", "state": "completed"}
            for place in range(after + 1, last + 1)
        ]
        return reply(200, [row | {"result": result} for row in rows])

    def keyed(self, key: str) -> dict[str, Any]:
        place = self.keys.index(key) + 1 if key in self.keys else None
        is_placed = place is not None and (not self.unplaced or place < len(self.keys))
        return {"key": key, "place": place if is_placed else None}


def reply(status: int, body: Any) -> Reply:
    return Reply(status, {}, json.dumps(body).encode())


@pytest.fixture
def clock() -> list[float]:
    """The time of the client: its pauses move it."""
    return [0.0]


def course_of(
    rows: Any, clock: list[float], *, order: str = "completed", window: int | None = None
) -> Course[None]:
    in_order = order == "input"
    batcher = Batcher(
        open_source(rows), compile_prompt("{id}"), "id", {"model": "m"}, keeps_input=in_order
    )
    ordering = Ordering() if in_order else None
    progress = Progress(is_shown=False)
    return Course(
        "j", progress, iter(batcher), window=window, ordering=ordering, clock=lambda: clock[0]
    )


def mapped(job: Job, clock: list[float], rows: Any = None, **options: Any) -> list[tuple[str, str]]:
    """The rows of a course with their error codes, in its order; a pause takes no time here."""
    steps = with_retries(course_of(rows or ROWS, clock, **options).rows(), 60)
    found: list[tuple[str, str]] = []
    outcome: Outcome = None
    for _ in range(50_000):
        try:
            step = steps.send(outcome)
        except StopIteration:
            return found
        outcome = None
        if isinstance(step, Pause):
            clock[0] += step.seconds
        elif isinstance(step, Exchange):
            outcome = job.answer(step.request)
        else:
            assert isinstance(step, Emit)
            row: Row[None] = step.item
            found.append((row.key, row.error.code if row.error else ""))
    raise AssertionError(f"no end: {found}, {job.paths[-5:]}")


ALL = [("a", ""), ("b", ""), ("c", "")]


@pytest.mark.parametrize("order", ["completed", "input"])
@pytest.mark.parametrize(("status", "code"), [(503, "memory_busy"), (500, "x"), (429, "x")])
def test_a_row_that_is_refused_for_the_moment_is_sent_again(
    clock: list[float], status: int, code: str, order: str
) -> None:
    job = Job([{"b": problem(status, code)}, {"b": problem(status, code)}])
    assert sorted(mapped(job, clock, ROWS, order=order)) == ALL
    assert job.sent == [["a", "b", "c"], ["b"], ["b"]]
    assert clock[0] > 0  # it rests meanwhile
    assert job.paths.count("close") == 1


@pytest.mark.parametrize("status", [429, 500, 503, 520])
def test_a_list_that_is_refused_for_the_moment_is_sent_again(
    clock: list[float], status: int
) -> None:
    job = Job([problem(status, "x"), problem(status, "x")])
    assert sorted(mapped(job, clock)) == ALL


def test_a_full_window_waits_for_its_refused_row(clock: list[float]) -> None:
    job = Job([{"a": BUSY}] * 40)
    assert mapped(job, clock, ROWS, order="input", window=1) == ALL


def test_a_row_that_gets_its_place_late_is_not_taken_for_a_repeated_one(
    clock: list[float],
) -> None:
    assert mapped(Job(unplaced=30), clock, order="input") == ALL
    rows = ({"id": key} for key in [*map(str, range(1000)), "3"])
    found = mapped(Job(), clock, rows, order="input")
    assert found == [*((str(key), "") for key in range(1000)), ("3", "duplicate_key")]


def test_a_row_that_is_refused_for_an_hour_has_failed(clock: list[float]) -> None:
    job = Job([{"b": BUSY}] * 10_000)
    found = mapped(job, clock)
    assert sorted(found) == [("a", ""), ("b", "templates_busy"), ("c", "")]
    assert 3000 < clock[0] <= 3700
    job.refusals.clear()
    assert mapped(job, clock)[-1] == ("b", "")  # by the same call again


def test_a_full_queue_is_waited_for_however_long(clock: list[float]) -> None:
    job = Job([problem(429, "queue_full")] * 5_000 + [{"b": BUSY}])
    assert sorted(mapped(job, clock)) == ALL
    assert clock[0] > 3600


@pytest.mark.parametrize("code", ["result_deleted", "erased"])
def test_a_row_that_has_ended_is_no_failure(clock: list[float], code: str) -> None:
    job = Job([{"b": problem(410, code)}], keys=["b"])
    assert sorted(mapped(job, clock)) == ALL


def test_rows_that_no_other_time_changes_have_failed(clock: list[float]) -> None:
    job = Job(
        [{"a": problem(422, "invalid_request"), "b": problem(429, "x", limit="max_job_rows")}]
    )
    assert mapped(job, clock) == [
        ("a", "invalid_request"), ("b", "x"), ("c", ""),
    ]  # fmt: skip


def test_a_closed_job_without_some_rows_is_opened_again(clock: list[float]) -> None:
    job = Job(state="ended", keys=["a", "b"])
    assert mapped(job, clock) == ALL
    assert (job.state, job.paths.count("open")) == ("ended", 1)
    assert mapped(job, clock) == ALL
    assert job.paths.count("open") == 1  # for nothing missing


def test_a_cancelled_job_is_not(clock: list[float]) -> None:
    job = Job(state="ended", keys=["a"], is_cancelled=True)
    with pytest.raises(APIStatusError, match="job_closed"):
        mapped(job, clock)
