"""A bulk job: its state, stopping it, and its answers beside the rows of its file."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing
from pathlib import PurePath
from typing import Any
from urllib.parse import quote

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from app.ui.api import FILE_TIMEOUT, Api, api_of, segment
from app.ui.bulk.jobs import Job, Part, to_part
from app.ui.bulk.results import (
    Answer,
    AnsweredRow,
    LineTooLongError,
    answers_of,
    join,
    read_answer,
    split_lines,
    to_csv,
    to_jsonl,
    without_rows,
)
from app.ui.bulk.sending import delete_all
from app.ui.errors import Ignoring, RefusedError
from app.ui.proxied_response import ProxiedResponse
from app.ui.render import page, refreshed

_MAX_SHOWN_FAILURES = 100

_Lines = AsyncGenerator[bytes, None]


async def job(request: Request) -> Response:
    return await page(request, "bulk_job.html", **await _job_context(request))


async def progress(request: Request) -> Response:
    context = await _job_context(request)
    return refreshed(request, "_bulk_job.html", is_ended=context["job"].is_over, **context)


async def cancel(request: Request) -> Response:
    api = api_of(request)
    found = await _job(request)
    for part in found.parts:
        if not part.is_over:
            with Ignoring(409):  # it has ended meanwhile
                await api.post(f"/v1/batches/{segment(part.id)}/cancel")
    return RedirectResponse(f"/bulk/jobs/{segment(found.id)}", 303)


async def delete_files(request: Request) -> Response:
    found = await _job(request)
    if found.is_over:
        await delete_all(api_of(request), [one for part in found.parts for one in part.file_ids])
    return RedirectResponse(f"/bulk/jobs/{segment(found.id)}", 303)


async def results(request: Request) -> Response:
    kind = request.path_params["kind"]
    if kind not in ("csv", "jsonl"):
        raise HTTPException(404)
    found = await _job(request)
    rows = _answered(api_of(request), found)
    held = AsyncExitStack()
    held.push_async_callback(rows.aclose)
    if kind == "csv":
        columns = await _columns(api_of(request), found)
        content, media_type = to_csv(rows, columns), "text/csv; charset=utf-8"
    else:
        content, media_type = to_jsonl(rows), "application/jsonl"
    filename = quote(f"{PurePath(found.last.name).stem}-results.{kind}")
    headers = {"Content-Disposition": f"attachment; filename*=utf-8''{filename}"}
    return ProxiedResponse(content, held, headers, media_type)


async def _job(request: Request) -> Job:
    api = api_of(request)
    last = await read_part(api, request.path_params["job_id"])
    earlier = await read_parts(api, last.earlier_ids)
    return Job([*earlier, last], is_whole=last.is_last and len(earlier) == len(last.earlier_ids))


async def read_part(api: Api, batch_id: str) -> Part:
    return to_part(await api.get(f"/v1/batches/{segment(batch_id)}"))


async def read_parts(api: Api, ids: Sequence[str]) -> list[Part]:
    """Batches, without missing ones: metadata may name any id. Raises ApiError."""

    async def read(batch_id: str) -> list[Part]:
        with Ignoring(404):
            return [await read_part(api, batch_id)]
        return []

    found = await asyncio.gather(*(read(one) for one in ids))
    return [part for parts in found for part in parts]


async def _job_context(request: Request) -> dict[str, Any]:
    api = api_of(request)
    found = await _job(request)
    failures = await _failures(api, found) if found.is_over and found.failed else []
    return {
        "job": found,
        "failures": failures,
        "has_files": await _has_files(api, found),
        "path": f"/bulk/jobs/{segment(found.id)}",
    }


async def _has_files(api: Api, found: Job) -> bool:
    ended = [part for part in found.parts if part.is_over]
    for file_id in ended[0].file_ids if ended else ():
        with Ignoring(404):
            await api.get(f"/v1/files/{segment(file_id)}")
            return True
    return False


async def _failures(api: Api, found: Job) -> list[Answer]:
    failures: list[Answer] = []
    for part in found.parts:
        if (file_id := part.batch["error_file_id"]) is None:
            continue
        with Ignoring(404):
            async with aclosing(_file_lines(api, file_id)) as lines:
                async for line in lines:
                    failures.append(read_answer(line)[1])
                    if len(failures) == _MAX_SHOWN_FAILURES:
                        return failures
    return failures


async def _columns(api: Api, found: Job) -> Sequence[str]:
    """The names of the file's columns; of another program's batch, only its ids."""
    if (file_id := found.parts[0].rows_file_id) is not None:
        async with aclosing(_file_lines(api, file_id)) as lines:
            with Ignoring(404):
                async for line in lines:
                    return list(orjson.loads(line)["columns"])
    return ["custom_id"]


async def _answered(api: Api, found: Job) -> AsyncGenerator[AnsweredRow, None]:
    for part in found.parts:
        names = (part.batch["output_file_id"], part.batch["error_file_id"], part.rows_file_id)
        files = [_file_lines(api, one) if one is not None else None for one in names]
        async with AsyncExitStack() as held:  # the files of a part, until its end or the reader's
            for file in files:
                if file is not None:
                    held.push_async_callback(file.aclose)
            output, errors, rows = files
            answers = answers_of(part.lines, output, errors, _default_answer(part))
            has_rows = rows is not None and await _skip_header(rows)
            joined = join(rows, answers) if rows and has_rows else without_rows(answers)
            async for row in joined:
                yield row


async def _skip_header(rows: _Lines) -> bool:
    """Skip the names of the columns; False if the file was deleted."""
    with Ignoring(404):  # it may have expired
        await anext(rows)
        return True
    return False


def _default_answer(part: Part) -> Answer:
    if not part.is_over:
        return Answer()
    errors = (part.batch["errors"] or {"data": ()})["data"]
    message = errors[0]["message"] if errors else f"The batch is {part.state}."
    return Answer(status="failed", error_code=f"batch_{part.state}", error_message=message)


async def _file_lines(api: Api, file_id: str) -> _Lines:
    async with api.stream(
        "GET", f"/v1/files/{segment(file_id)}/content", timeout=FILE_TIMEOUT
    ) as response:
        try:
            async for line in split_lines(response.aiter_bytes()):
                yield line
        except LineTooLongError as error:
            raise RefusedError(
                422, "too_large", f"The file {file_id} cannot be shown: {error}."
            ) from error


routes = [
    Route("/bulk/jobs/{job_id}", job),
    Route("/bulk/jobs/{job_id}/progress", progress),
    Route("/bulk/jobs/{job_id}/cancel", cancel, methods=["POST"]),
    Route("/bulk/jobs/{job_id}/delete-files", delete_files, methods=["POST"]),
    Route("/bulk/jobs/{job_id}/results.{kind}", results),
]
