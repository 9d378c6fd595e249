"""A job: its state, its failed rows, stopping and retrying it, and its answers. And files of batches."""

from contextlib import AsyncExitStack
from pathlib import PurePath
from typing import Any
from urllib.parse import quote

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from app.ui.api import FILE_TIMEOUT, Api, api_of, identifier, segment
from app.ui.bulk.background import Background
from app.ui.bulk.jobs import Job
from app.ui.bulk.kept_rows import read_columns
from app.ui.bulk.reading import read_ended, rows_by_end, rows_of_file
from app.ui.bulk.results import to_csv, to_jsonl
from app.ui.bulk.sending import Retrying, Sending
from app.ui.errors import Ignoring, RefusedError
from app.ui.proxied_response import ProxiedResponse, open_stream, parts_of
from app.ui.remedies import explain
from app.ui.render import page, refreshed

_MAX_SHOWN_FAILURES = 100


async def job(request: Request) -> Response:
    return await _page(request)


async def _page(request: Request, error: RefusedError | None = None) -> Response:
    return await page(request, "bulk_job.html", error, **await _job_context(request))


async def progress(request: Request) -> Response:
    context = await _job_context(request)
    return refreshed(request, "_bulk_job.html", is_ended=context["job"].is_over, **context)


async def _job_context(request: Request) -> dict[str, Any]:
    found = await _job(request)
    failures = []
    if found.is_over and found.counts["failed"]:
        failures = await read_ended(
            api_of(request), found.id, state="failed", limit=_MAX_SHOWN_FAILURES
        )
    return {
        "job": found,
        "errors": [(code, count, explain(code, "")[0]) for code, count in found.errors],
        "failures": failures,
        "note": _background(request).note(found.id),
        "path": f"/bulk/jobs/{segment(found.id)}",
    }


# --- Changes -----------------------------------------------------------------------------------------


async def cancel(request: Request) -> Response:
    path = await _path(request)
    await api_of(request).post(f"{path}/cancel")
    return RedirectResponse(f"/bulk{path}", 303)


async def resume(request: Request) -> Response:
    """Send the rest of the rows of a job of this page."""
    continue_sending(request, await _job(request))
    return RedirectResponse(f"/bulk{await _path(request)}", 303)


async def retry(request: Request) -> Response:
    """Send failed rows again: the first batch at once, to report what is refused; the others behind it."""
    form, path = await request.form(), await _path(request)
    code = form.get("error_code")
    api, job_id = api_of(request), identifier(request.path_params["job_id"])
    retrying = Retrying(api, job_id, code if isinstance(code, str) else None)
    background = _background(request)
    try:
        has_more = await retrying.step()
    except RefusedError as error:
        return await _page(request, error)
    if has_more:
        background.start(api.owner, job_id, retrying.run)
    else:
        background.report(job_id, retrying.summary())
    return RedirectResponse(f"/bulk{path}", 303)


async def delete(request: Request) -> Response:
    """Delete an ended job and the file of its rows; its results stay in the history."""
    api, found = api_of(request), await _job(request)
    try:
        await api.delete(await _path(request))
    except RefusedError as error:
        return await _page(request, error)
    if found.rows_file_id:
        await delete_file(api, found.rows_file_id)
    return RedirectResponse("/bulk", 303)


async def delete_file(api: Api, file_id: str) -> None:
    with Ignoring(404):
        await api.delete(f"/v1/files/{segment(file_id)}")


def continue_sending(request: Request, found: Job) -> None:
    """Send the rows that the job does not have yet, when this request has been answered."""
    if found.is_open and found.rows_file_id:
        api = api_of(request)
        sending = Sending(api, found.id, found.rows_file_id)
        _background(request).start(api.owner, found.id, sending.run)


# --- Answers -----------------------------------------------------------------------------------------


async def results(request: Request) -> Response:
    kind = request.path_params["kind"]
    if kind not in ("csv", "jsonl"):
        raise HTTPException(404)
    api, found = api_of(request), await _job(request)
    columns, rows = ["key"], rows_by_end(api, found)
    if found.rows_file_id is not None:
        with Ignoring(404):  # the file may have been deleted
            columns = await read_columns(api, found.rows_file_id)
            rows = rows_of_file(api, found, found.rows_file_id)
    held = AsyncExitStack()
    held.push_async_callback(rows.aclose)
    if kind == "csv":
        content, media_type = to_csv(rows, columns), "text/csv; charset=utf-8"
    else:
        content, media_type = to_jsonl(rows), "application/jsonl"
    return ProxiedResponse(
        content, held, _as_file(f"{PurePath(found.name).stem}-results.{kind}"), media_type
    )


async def batch_file(request: Request) -> Response:
    """A file of a batch of the API, as it is."""
    path = f"/v1/files/{segment(request.path_params['file_id'])}"
    api = api_of(request)
    stored = await api.get(path)
    response, held = await open_stream(api.stream("GET", f"{path}/content", timeout=FILE_TIMEOUT))
    headers = _as_file(stored["filename"])
    return ProxiedResponse(parts_of(response), held, headers, "application/jsonl")


async def cancel_batch(request: Request) -> Response:
    with Ignoring(409):  # it has ended meanwhile
        batch = segment(request.path_params["batch_id"])
        await api_of(request).post(f"/v1/batches/{batch}/cancel")
    return RedirectResponse("/bulk#batches", 303)


def to_job(request: Request, read: dict[str, Any]) -> Job:
    return Job(read, is_sending=_background(request).is_busy(read["id"]))


async def _job(request: Request) -> Job:
    return to_job(request, await api_of(request).get(await _path(request)))


async def _path(request: Request) -> str:
    return f"/jobs/{identifier(request.path_params['job_id'])}"


def _background(request: Request) -> Background:
    background: Background = request.app.state.bulk_background
    return background


def _as_file(name: str) -> dict[str, str]:
    return {"Content-Disposition": f"attachment; filename*=utf-8''{quote(name, safe='')}"}


routes = [
    Route("/bulk/jobs/{job_id}", job),
    Route("/bulk/jobs/{job_id}/progress", progress),
    Route("/bulk/jobs/{job_id}/cancel", cancel, methods=["POST"]),
    Route("/bulk/jobs/{job_id}/continue", resume, methods=["POST"]),
    Route("/bulk/jobs/{job_id}/retry", retry, methods=["POST"]),
    Route("/bulk/jobs/{job_id}/delete", delete, methods=["POST"]),
    Route("/bulk/jobs/{job_id}/results.{kind}", results),
    Route("/bulk/batches/{batch_id}/cancel", cancel_batch, methods=["POST"]),
    Route("/bulk/batches/files/{file_id}", batch_file),
]
