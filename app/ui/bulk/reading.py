"""The answers of a job: beside the rows of its file, or in the order of their ends."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import orjson

from app.ui.api import FILE_TIMEOUT, Api, segment
from app.ui.bulk.jobs import Job
from app.ui.bulk.kept_rows import KeptRow, read_rows
from app.ui.bulk.results import Answer, AnsweredRow, answer_of
from app.ui.bulk.sending import in_lists, item_of, post_rows
from app.ui.errors import RefusedError

_ROWS_AT_ONCE = 500
_PAGE = 1_000


async def rows_of_file(api: Api, job: Job, file_id: str) -> AsyncGenerator[AnsweredRow, None]:
    """Each row of the file, in its order. Raises ApiError."""
    async with aclosing(read_rows(api, file_id)) as rows:
        some: list[KeptRow] = []
        async for row in rows:
            some.append(row)
            if len(some) == _ROWS_AT_ONCE:
                for answered in await _answered(api, job, some):
                    yield answered
                some = []
    for answered in await _answered(api, job, some):
        yield answered


async def rows_by_end(api: Api, job: Job) -> AsyncGenerator[AnsweredRow, None]:
    """The ended rows of a job of another program, with their keys. Raises ApiError."""
    after = number = 0
    while page := await read_ended(api, job.id, after=after, limit=_PAGE):
        for row in page:
            number += 1
            yield AnsweredRow(number, {"key": row["key"]}, answer_of(row))
        after = page[-1]["place"]


async def read_ended(api: Api, job_id: str, **query: str | int) -> list[dict[str, Any]]:
    response = await api.send("GET", f"/jobs/{segment(job_id)}/results", params=query)
    rows: list[dict[str, Any]] = orjson.loads(response.content)
    return rows


async def _answered(api: Api, job: Job, rows: Sequence[KeptRow]) -> list[AnsweredRow]:
    sent = [row for row in rows if not row.error]
    answers = await _by_key(api, job, [row.key for row in sent])
    if not job.is_open:
        missing = [row for row in sent if row.key not in answers]
        answers |= await _refusals(api, job, missing)
    return [
        AnsweredRow(row.line, row.columns, _left_out(row) or answers.get(row.key, Answer()))
        for row in rows
    ]


def _left_out(row: KeptRow) -> Answer | None:
    if not row.error:
        return None
    return Answer("left_out", error_code="left_out", error_message=row.error)


async def _by_key(api: Api, job: Job, keys: Sequence[str]) -> dict[str, Answer]:
    answers: dict[str, Answer] = {}
    place = 0
    while place < len(keys):
        body = {"keys": keys[place:]}
        path = f"/jobs/{segment(job.id)}/rows"
        response = await api.send("POST", path, json=body, timeout=FILE_TIMEOUT)
        page = orjson.loads(response.content)
        answers |= {row["key"]: answer_of(row) for row in page if row["state"]}
        place += len(page)
    return answers


async def _refusals(api: Api, job: Job, rows: Sequence[KeptRow]) -> dict[str, Answer]:
    """Reasons why a closed job does not have these rows: the API reports them again, and stores nothing."""
    problems: list[dict[str, Any]] = []
    async with aclosing(_items(job, rows)) as items, aclosing(in_lists(items)) as lists:
        async for some in lists:
            try:
                problems += await post_rows(api, some)
            except RefusedError as error:  # the list as a whole
                problems += [{"code": error.code, "detail": error.message}] * len(some)
    return {row.key: _refusal(problem) for row, problem in zip(rows, problems, strict=True)}


async def _items(job: Job, rows: Sequence[KeptRow]) -> AsyncGenerator[bytes, None]:
    for row in rows:
        yield item_of(job.id, row)


def _refusal(problem: Mapping[str, Any]) -> Answer:
    code, detail = problem.get("code", ""), problem.get("detail", "")
    if code == "job_closed":
        code, detail = "not_sent", "The job was closed before this row was sent."
    return Answer("failed", error_code=code, error_message=detail)
