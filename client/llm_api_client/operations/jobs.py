"""Jobs: named sets of results, with counts and an order of their ends."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import quote

import msgspec

from llm_api_client.errors import WaitTimeoutError
from llm_api_client.jobs.records import EndedRow, JobInfo, KeyedRow, RefusedRow, RetriedRows
from llm_api_client.operations.paging import MAX_PAGE, following, pages
from llm_api_client.steps import Call, Feed, Request, exchange, fetch

_POLL_SECONDS = 30.0
_GRACE_SECONDS = 15.0  # beyond a wait, for the response


def path_of(job_id: str, part: str = "") -> str:
    return f"/jobs/{quote(job_id, safe='')}{part}"


def create(
    name: str = "",
    *,
    key: str | None = None,
    total: int | None = None,
    priority: int | None = None,
    deadline_seconds: float | None = None,
    webhook_url: str | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Call[JobInfo]:
    """Create a job; `map` does so by itself.

    Args:
        name: for people.
        key: the same key again returns the same job.
        total: rows that it will have, if that is known.
        priority: of its rows, -100 to 100.
        deadline_seconds: of each row.
        webhook_url: kept with the job.
        metadata: kept and returned; at most 16 KiB as JSON.
    """
    members = {
        "name": name, "key": key, "total": total, "priority": priority, "metadata": metadata,
        "deadline_seconds": deadline_seconds, "webhook_url": webhook_url,
    }  # fmt: skip
    body = {member: value for member, value in members.items() if value is not None}
    request = Request("POST", "/jobs", json=body, is_repeatable=key is not None)
    return (yield from fetch(request, JobInfo))


def get(job_id: str, *, wait: float = 0) -> Call[JobInfo]:
    """Read a job with its counts.

    Args:
        job_id: of the job.
        wait: seconds to wait for its end in the same request, at most 60.
    """
    query = {"wait": wait or None}
    timeout = wait + _GRACE_SECONDS if wait else None
    return (yield from fetch(Request("GET", path_of(job_id), query, timeout=timeout), JobInfo))


def wait(job_id: str, timeout: float | None = None) -> Call[JobInfo]:
    """Wait until a job has ended: it is closed, and all its rows have ended.

    Args:
        job_id: of the job.
        timeout: seconds; None: until it has ended.

    Raises:
        WaitTimeoutError: it did not end in that time, and continues.
    """
    until = None if timeout is None else time.monotonic() + timeout
    while True:
        left = _POLL_SECONDS if until is None else until - time.monotonic()
        info = yield from get(job_id, wait=max(0.0, min(left, _POLL_SECONDS)))
        if info.state == "ended":
            return info
        if until is not None and time.monotonic() >= until:
            raise WaitTimeoutError(job_id, timeout or 0.0, "Job")


def list_jobs(
    *, state: Literal["open", "closed", "ended"] | None = None, limit: int | None = None
) -> Feed[JobInfo]:
    """Iterate over jobs, newest first; `limit` None: all."""
    yield from pages("/jobs", JobInfo, {"state": state}, limit, page=50)


def close(job_id: str) -> Call[JobInfo]:
    """Take no further rows: the job ends with its last row."""
    return (yield from fetch(Request("POST", path_of(job_id, "/close")), JobInfo))


def open_again(job_id: str) -> Call[JobInfo]:
    """Open a closed job, so that rows that were not sent can be; a cancelled one only after a retry."""
    return (yield from fetch(Request("POST", path_of(job_id, "/open")), JobInfo))


def cancel(job_id: str) -> Call[JobInfo]:
    """Cancel the pending rows of a job, which takes no further ones."""
    return (yield from fetch(Request("POST", path_of(job_id, "/cancel")), JobInfo))


def delete(job_id: str) -> Call[None]:
    """Delete a job that has ended, and its keys; its results stay."""
    yield from exchange(Request("DELETE", path_of(job_id)))


def ended_rows(
    job_id: str, *, after: int = 0, state: str | None = None, limit: int = MAX_PAGE
) -> Call[list[EndedRow]]:
    """The rows that ended behind a place, in the order of their ends; empty if none has yet."""
    page = yield from ended_page(job_id, after=after, state=state, limit=limit)
    return page.rows


@dataclass(frozen=True)
class EndedPage:
    """Rows that ended, and whether more have ended already: a page ends by its bytes, too."""

    rows: list[EndedRow]
    has_more: bool


def ended_page(
    job_id: str, *, after: int = 0, state: str | None = None, limit: int = MAX_PAGE
) -> Call[EndedPage]:
    """As `ended_rows`."""
    query = {"after": after, "state": state, "limit": limit, "full": True}
    reply = yield from exchange(Request("GET", path_of(job_id, "/results"), query))
    rows = msgspec.json.decode(reply.body, type=list[EndedRow])
    return EndedPage(rows, following(reply) is not None)


def keyed_rows(job_id: str, keys: Sequence[str]) -> Call[list[KeyedRow]]:
    """The rows of these keys, in their order."""
    request = Request("POST", path_of(job_id, "/rows"), json={"keys": keys})
    return (yield from fetch(request, list[KeyedRow]))


def retry_failed(job_id: str, *, error_code: str | None = None) -> Call[RetriedRows]:
    """Send the rows that have failed until now again, batch by batch; none twice if a response is lost.

    Args:
        job_id: of the job.
        error_code: only rows that failed with it.

    Returns:
        The number of rows that were sent, and those that cannot be.
    """
    retried, refused, after = 0, list[RefusedRow](), 0
    job = yield from get(job_id)
    while True:
        body: dict[str, Any] = {"after": after}
        if job.last_place is not None:  # as services of a former version have none
            body["until"] = job.last_place
        if error_code is not None:
            body["error_code"] = error_code
        batch = yield from fetch(Request("POST", path_of(job_id, "/retry"), json=body), RetriedRows)
        retried += batch.retried
        refused += batch.refused
        if batch.following is None:
            return RetriedRows(retried=retried, refused=refused)
        after = batch.following
