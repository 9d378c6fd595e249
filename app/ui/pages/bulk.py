"""Bulk: a file is uploaded, its columns are mapped, its rows are sent to a job; and the jobs so far.

The uploaded file and the rows of a job stay in the API's file store: this process keeps no state.
"""

import contextlib
import tempfile
from collections.abc import AsyncIterator, Mapping
from typing import Any
from uuid import UUID, uuid4

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from app.ui.api import FILE_TIMEOUT, Api, api_of, segment
from app.ui.bulk.conversion import Conversion, convert
from app.ui.bulk.delimited import DELIMITERS
from app.ui.bulk.jobs import Job
from app.ui.bulk.kept_rows import header_line
from app.ui.bulk.mapping import (
    PARAMETERS,
    RowError,
    guess_form,
    read_mapping,
    text_of,
    to_request,
)
from app.ui.bulk.sending import upload_rows
from app.ui.bulk.uploaded_file import Source, UnreadableError, on_thread, open_upload
from app.ui.errors import ApiError, RefusedError
from app.ui.guard import BodyTooLargeError
from app.ui.pages.bulk_jobs import continue_sending, delete_file, to_job
from app.ui.render import page, refreshed

UPLOADS = "/bulk/files"  # takes larger bodies than other forms
FORM_BYTES = 65_536  # of an upload beside its file

# An uploaded file is kept for sending it again with another mapping.
_UPLOAD_RETENTION_DAYS = 7
_PAGE_SIZE = 50
_MAX_BATCHES = 20  # that are shown
_FORM_FIELDS = (
    "kind", "prompt", "template", "system", "documents", "id", "model", "model_column", "skip",
    *PARAMETERS, *(f"{name}_column" for name in PARAMETERS),
)  # fmt: skip


# --- The list, and uploading -------------------------------------------------------------------------


async def upload(request: Request) -> Response:
    most = request.app.state.settings.max_upload_bytes
    too_large = RefusedError(
        413,
        "too_large",
        f"The file is larger than the {most:,} bytes that are taken at once. Split it, and upload "
        "its parts one after another.",
    )
    body = request.stream()
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > most + FORM_BYTES:
        return await _not_uploaded(request, body, too_large)
    headers = {"Content-Type": request.headers.get("content-type", "")}
    if length:
        headers["Content-Length"] = length
    try:
        response = await api_of(request).send(
            "POST", "/v1/files", content=body, headers=headers, timeout=FILE_TIMEOUT
        )
    except ApiError as error:
        return await _not_uploaded(request, body, error)
    except BodyTooLargeError:
        return await _not_uploaded(request, body, too_large)
    path = f"{UPLOADS}/{segment(response.json()['id'])}"
    if "x-part" in request.headers:  # a script, which goes there by itself
        return Response(status_code=201, headers={"Location": path})
    return RedirectResponse(path, 303)


async def _not_uploaded(request: Request, body: AsyncIterator[bytes], error: ApiError) -> Response:
    # The rest is read, within bounds: otherwise the browser reports a broken connection, not the reason.
    with contextlib.suppress(BodyTooLargeError):
        async for _ in body:
            pass
    if not isinstance(error, RefusedError):
        raise error
    if "x-part" in request.headers:
        return Response(error.message, error.status, media_type="text/plain")
    return await _index(request, error)


async def _index(request: Request, error: RefusedError | None = None) -> Response:
    return await page(
        request,
        "bulk.html",
        error,
        max_bytes=request.app.state.settings.max_upload_bytes,
        kept_days=_UPLOAD_RETENTION_DAYS,
        **await _lists(request),
    )


async def lists(request: Request) -> Response:
    context = await _lists(request)
    return refreshed(request, "_bulk_lists.html", is_ended=not context["is_running"], **context)


async def _lists(request: Request) -> dict[str, Any]:
    """The jobs of a page, and the newest batches on the first page."""
    api, after = api_of(request), request.query_params.get("after")
    read = await api.get("/jobs", {"limit": _PAGE_SIZE, "after": after})
    batches: list[Mapping[str, Any]] = []
    if after is None:
        batches = (await api.get("/v1/batches", {"limit": _MAX_BATCHES}))["data"]
    jobs = [to_job(request, one) for one in read]
    return {
        "jobs": jobs,
        "batches": batches,
        "is_first": after is None,
        "next_after": jobs[-1].id if len(jobs) == _PAGE_SIZE else None,
        "lists_path": "/bulk/lists" + (f"?after={segment(after)}" if after else ""),
        "is_running": any(not job.is_over for job in jobs)
        or any(_is_running(one) for one in batches),
    }


def _is_running(batch: Mapping[str, Any]) -> bool:
    return batch["status"] in ("validating", "in_progress", "finalizing", "cancelling")


# --- Mapping and sending -----------------------------------------------------------------------------


async def preview(request: Request) -> Response:
    try:
        async with open_upload(request, request.query_params.get("separator", "")) as source:
            return await _preview(request, source, guess_form(source.found.columns))
    except UnreadableError as error:
        return await _index(request, error)


async def send(request: Request) -> Response:
    form = await request.form()
    texts = {name: value for name, value in form.items() if isinstance(value, str)}
    # Browsers send line ends as CR LF; a prompt has the original ones.
    entered = {name: texts[name].replace("\r\n", "\n") for name in _FORM_FIELDS if name in texts}
    try:
        async with open_upload(request, texts.get("separator", "")) as source:
            return await _send(request, source, entered, _key(texts.get("key", "")))
    except UnreadableError as error:
        return await _index(request, error)


async def _send(request: Request, source: Source, entered: dict[str, str], key: str) -> Response:
    done = None
    try:
        if source.table.is_batch:
            await _create_batch(api_of(request), source, key)
            return RedirectResponse("/bulk#batches", 303)
        mapping = read_mapping(entered, source.found.columns)
        with tempfile.TemporaryFile(prefix="bulk-") as rows:
            done = await on_thread(
                source.file,
                lambda: convert(
                    source.file, source.table, lambda row: to_request(row, mapping), rows
                ),
            )
            _check(done, is_skipping="skip" in entered)
            header = header_line(done.columns, entered)
            file_id = await upload_rows(api_of(request), source.name, header, rows, done.size)
        job = await _create_job(request, source.name, key, done, file_id, mapping.model or "")
    except RefusedError as error:
        return await _preview(request, source, entered, error, done)
    return RedirectResponse(f"/bulk/jobs/{segment(job.id)}", 303)


async def _create_batch(api: Api, source: Source, key: str) -> None:
    """Lines that are requests of OpenAI's dialect already: the file is a batch as it is."""
    body = {
        "input_file_id": source.id,
        "endpoint": source.endpoint,
        "completion_window": "24h",
        "metadata": {"bulk_name": source.name[:200]},
    }
    await api.send("POST", "/v1/batches", json=body, headers={"Idempotency-Key": f"bulk-{key}"})


async def _create_job(
    request: Request, name: str, key: str, done: Conversion, file_id: str, model: str
) -> Job:
    """Create the job and begin to send its rows. A form that is sent twice makes one job."""
    api = api_of(request)
    metadata = {"bulk_rows": file_id, "bulk_left_out": str(done.left_out), "bulk_model": model}
    body = {"name": name[:255], "key": f"bulk-{key}", "total": done.requests, "metadata": metadata}
    try:
        job = to_job(request, await api.post("/jobs", json=body))
    except ApiError:
        await delete_file(api, file_id)
        raise
    if job.rows_file_id != file_id:
        await delete_file(api, file_id)
    continue_sending(request, job)
    return job


def _check(done: Conversion, *, is_skipping: bool) -> None:
    """Raises RefusedError for a conversion that is not to be sent."""
    problem = None
    if not done.requests:
        problem = "No line can be sent: correct the mapping, or the file. Nothing was sent."
    elif done.left_out and not is_skipping:
        problem = (
            f"{done.left_out:,} of {done.rows:,} lines cannot be sent. Correct them and upload the "
            "file again, or have them left out (below). Nothing was sent."
        )
    if problem:
        raise RefusedError(422, "unsendable", problem)


def _key(text: str) -> str:
    try:
        return UUID(text).hex
    except ValueError:
        return uuid4().hex


async def _preview(
    request: Request,
    source: Source,
    form: Mapping[str, str],
    error: RefusedError | None = None,
    checked: Conversion | None = None,
) -> Response:
    """The mapping's form; `checked`: the conversion with the lines' errors, else that of the upload."""
    checked = checked or source.found
    models = [] if source.table.is_batch else await api_of(request).get_models()
    return await page(
        request,
        "bulk_file.html",
        error,
        source=source,
        rows=[
            (row.line, [_shown(row.values.get(column)) for column in source.found.columns])
            for row in source.table.sample
        ],
        delimiters=DELIMITERS,
        form=form,
        key=uuid4().hex,
        models=models,
        parameters=PARAMETERS,
        wrong=dict(error.fields if error else ()),
        checked=checked,
        can_skip=not source.table.is_batch and (bool(checked.left_out) or "skip" in form),
        kept_days=_UPLOAD_RETENTION_DAYS,
    )


def _shown(value: Any) -> str:
    try:
        return text_of(value)
    except RowError as error:
        return f"({error})"


routes = [
    Route("/bulk", _index),
    Route("/bulk/lists", lists),
    Route(UPLOADS, upload, methods=["POST"]),
    Route("/bulk/files/{file_id}", preview),
    Route("/bulk/files/{file_id}", send, methods=["POST"]),
]
