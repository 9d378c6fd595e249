"""Jobs, read from their batches: parts, states, and how long the rest takes."""

from typing import Any
from uuid import UUID

import pytest

from app.ui.bulk.jobs import MAX_PARTS, Job, metadata_of, to_jobs, to_part

JOB = "0199a0f27c5d7b3aa1c5e0f1d2c3b4a5"


def batch(number: int, state: str = "completed", **members: Any) -> dict[str, Any]:
    counts = {"total": 10, "completed": 0, "failed": 0} | members.pop("counts", {})
    begun = None if state == "validating" else 1000
    return {
        "id": f"batch_{UUID(int=number)}",
        "status": state,
        "metadata": None,
        "errors": None,
        "created_at": 990,
        "in_progress_at": begun,
        "request_counts": counts,
    } | members


def made(number: int, count: int, state: str = "completed", **members: Any) -> dict[str, Any]:
    earlier = [f"batch_{UUID(int=one)}" for one in range(1, number)] if number == count else []
    metadata = metadata_of(
        name="a.csv", job=JOB, number=number, count=count, lines=10, left_out=1,
        rows_file_id="file-x", model="m", earlier_ids=earlier,
    )  # fmt: skip
    return batch(number, state, metadata=metadata, **members)


def test_the_last_part_names_all_the_others() -> None:
    last = made(MAX_PARTS, MAX_PARTS)
    assert len(last["metadata"]) <= 16
    assert max(len(value) for value in last["metadata"].values()) <= 512
    assert to_part(last).earlier_ids == [f"batch_{UUID(int=one)}" for one in range(1, MAX_PARTS)]
    assert to_part(last).is_last
    assert not to_part(made(1, 2)).is_last


def test_a_page_of_batches_as_jobs() -> None:
    alone = batch(9)
    newest_first = [made(3, 3), alone, made(2, 3), made(1, 3)]
    first, second = to_jobs(newest_first)
    assert [part.id for part in first.parts] == [one["id"] for one in newest_first[:1:-1]] + [
        newest_first[0]["id"]
    ]
    assert (first.id, first.last.name, first.last.model, first.left_out) == (
        newest_first[0]["id"],
        "a.csv",
        "m",
        3,
    )
    assert (first.is_whole, second.is_whole) == (True, True)
    assert (second.id, second.last.name) == (alone["id"], "Batch 000000000009")
    broken = to_jobs([made(2, 3), made(1, 3)])
    assert [job.is_whole for job in broken] == [False]
    assert to_jobs(newest_first, hidden=JOB) == [second]


@pytest.mark.parametrize(
    ("states", "shown", "badge"),
    [
        (["completed", "completed"], "completed", "completed"),
        (["completed", "in_progress"], "running", "running"),
        (["validating", "validating"], "checking", "running"),
        (["completed", "finalizing"], "writing results", "running"),
        (["cancelling", "in_progress"], "stopping", "running"),
        (["completed", "cancelled"], "cancelled", "failed"),
        (["failed", "cancelled"], "failed", "failed"),
        (["completed", "expired"], "expired", "failed"),
    ],
)
def test_states(states: list[str], shown: str, badge: str) -> None:
    counts = {"completed": 10}
    job = Job([to_part(batch(number, one, counts=counts)) for number, one in enumerate(states)])
    assert (job.state, job.badge) == (shown, badge)


def test_what_ended_without_an_answer_failed() -> None:
    done = to_part(batch(1, counts={"completed": 9, "failed": 1}))
    stopped = to_part(made(2, 2, "cancelled", counts={"total": 0}))  # before its lines were read
    assert Job([done]).state == "completed with failures"
    assert Job([done]).badge == "warn"
    assert (Job([done, stopped]).failed, Job([done, stopped]).lines) == (11, 20)


def test_the_rest_takes_as_long_as_the_speed_so_far_says() -> None:
    running = to_part(batch(1, "in_progress", counts={"completed": 3, "failed": 1}))
    assert Job([running]).seconds_left(now=1020) == 30
    assert Job([running]).seconds_left(now=1001) is None
    waiting = to_part(batch(2, "validating"))
    assert Job([waiting]).seconds_left(now=1020) is None
    assert Job([running, waiting]).seconds_left(now=1020) == 80


def test_metadata_that_others_wrote_is_no_trouble() -> None:
    odd = batch(1, counts={"total": 0}, metadata={"bulk_lines": "many", "bulk_part": "x", "bulk_left_out": "-1"})  # fmt: skip
    part = to_part(odd)
    assert (part.lines, part.left_out, part.earlier_ids) == (0, 0, [])
    assert to_part(batch(1, metadata={"bulk_parts_1": "not-an-id"})).earlier_ids == []
