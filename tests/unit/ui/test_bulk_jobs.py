"""Jobs in words: states, counts, and how long the rest takes."""

from typing import Any

import pytest

from app.ui.bulk.jobs import Job

CREATED = "2026-11-25T10:00:00+00:00"


def read(state: str = "ended", **members: Any) -> dict[str, Any]:
    """A job of 10 rows, of which the API has all, as the API returns it."""
    counts = {"rows": 10, "pending": 0, "completed": 10, "failed": 0} | members.pop("counts", {})
    return {
        "id": "0199a0f2-7c5d-7b3a-a1c5-e0f1d2c3b4a5",
        "name": "a.csv",
        "key": None,
        "state": state,
        "total": 10,
        "metadata": {},
        "counts": counts,
        "errors": {},
        "cancel_requested_at": None,
        "created_at": CREATED,
        "estimated_seconds_left": None,
    } | members


@pytest.mark.parametrize(
    ("state", "members", "shown", "badge"),
    [
        ("open", {}, "open", "running"),
        ("closed", {}, "running", "running"),
        ("closed", {"cancel_requested_at": CREATED}, "stopping", "running"),
        ("ended", {}, "completed", "completed"),
        ("ended", {"counts": {"failed": 1}}, "completed with failures", "warn"),
        ("ended", {"errors": {"cancelled": 1}}, "cancelled", "failed"),
    ],
)
def test_states(state: str, members: dict[str, Any], shown: str, badge: str) -> None:
    job = Job(read(state, **members))
    assert (job.state, job.badge) == (shown, badge)


def test_a_job_whose_rows_are_being_sent() -> None:
    job = Job(read("open", counts={"rows": 4, "completed": 1}), is_sending=True)
    assert (job.state, job.lines, job.done, job.refused) == ("sending", 10, 1, 0)


def test_rows_that_the_api_did_not_take() -> None:
    metadata = {"bulk_rows": "file-x", "bulk_left_out": "3", "bulk_model": "m"}
    job = Job(read(metadata=metadata, counts={"rows": 8}))
    assert (job.refused, job.left_out, job.model, job.rows_file_id) == (2, 3, "m", "file-x")
    assert job.state == "completed with failures"
    assert Job(read(counts={"rows": 8})).refused == 0  # another program's `total` is its own


def test_metadata_and_names_of_programs() -> None:
    odd = {"bulk_rows": 5, "bulk_left_out": "-1", "bulk_model": ["m"]}
    job = Job(read(metadata=odd, name="", key="k"))
    assert (job.rows_file_id, job.left_out, job.model, job.name) == (None, 0, "", "k")
    assert Job(read(name="")).name == "Job e0f1d2c3b4a5"


def test_errors_are_sorted_by_their_number() -> None:
    assert Job(read(errors={"a": 1, "b": 5, "c": 1})).errors == [("b", 5), ("a", 1), ("c", 1)]


def test_the_remaining_time_is_the_estimate_of_the_api() -> None:
    assert Job(read("closed", estimated_seconds_left=30.0)).seconds_left == 30
    assert Job(read("open", estimated_seconds_left=30.0), is_sending=True).seconds_left == 30
    assert Job(read("open", estimated_seconds_left=30.0)).seconds_left is None
    assert Job(read("ended")).seconds_left is None
