"""Bulk: a file is uploaded, its columns are mapped, its rows are sent; and the jobs so far.

The uploaded file stays in the API's file store between the steps, and a job is its batches: this
process keeps nothing.
"""

import contextlib
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote
from uuid import UUID, uuid4

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from app.ui.api import FILE_TIMEOUT, Api, api_of, segment
from app.ui.bulk.conversion import Bounds, Conversion, convert
from app.ui.bulk.jobs import MAX_PARTS, Job, to_jobs, to_part
from app.ui.bulk.mapping import (
    CHAT,
    COMPLETION,
    PARAMETERS,
    RESPONSE,
    RowError,
    check_line,
    guess_form,
    read_mapping,
    text_of,
    to_line,
)
from app.ui.bulk.sending import AlreadySentError, Sending
from app.ui.bulk.table import DELIMITERS
from app.ui.bulk.uploaded_file import Source, UnreadableError, on_thread, open_upload
from app.ui.errors import ApiError, EntryError, RefusedError
from app.ui.guard import BodyTooLargeError
from app.ui.pages.bulk_jobs import read_parts
from app.ui.render import page

UPLOADS = "/bulk/files"  # takes larger bodies than other forms
FORM_BYTES = 65_536  # of an upload beside its file

# An uploaded file is kept for sending it again with another mapping.
_UPLOAD_RETENTION_DAYS = 7
_PAGE_SIZE = 100
_FORM_FIELDS = (
    "endpoint", "prompt", "template", "system", "id", "model", "model_column", "skip",
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
    api = api_of(request)
    after = request.query_params.get("after")
    listed = await api.get("/v1/batches", {"limit": _PAGE_SIZE, "after": after})
    jobs = to_jobs(listed["data"], request.query_params.get("job", ""))
    is_known = "sent" in request.query_params
    note = "This form was sent before; its job is the first of the list." if is_known else None
    return await page(
        request,
        "bulk.html",
        error,
        note=note,
        jobs=await _whole(api, jobs),
        is_first=after is None,
        next_page=_next_page(listed),
        max_bytes=request.app.state.settings.max_upload_bytes,
        kept_days=_UPLOAD_RETENTION_DAYS,
    )


async def _whole(api: Api, jobs: Sequence[Job]) -> list[Job]:
    """The jobs with their parts from other pages of the list: at most as many as one job may have.

    One page ends within one job; batches of programs may have any metadata.
    """
    whole, left = [], MAX_PARTS
    for job in jobs:
        known = {part.id: part for part in job.parts}
        ids = job.last.earlier_ids
        missing = [one for one in ids if one not in known]
        if missing and len(missing) <= left:
            left -= len(missing)
            known |= {part.id: part for part in await read_parts(api, missing)}
        if missing:
            found = [known[one] for one in ids if one in known]
            job = Job([*found, job.last], is_whole=len(found) == len(ids))
        whole.append(job)
    return whole


def _next_page(listed: Mapping[str, Any]) -> str | None:
    """The query of the next page, with the job that this one ends within, so that it is not repeated."""
    if not listed["has_more"]:
        return None
    return f"?after={quote(listed['last_id'])}&job={quote(to_part(listed['data'][-1]).job)}"


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
    bounds = Bounds(lines=request.app.state.settings.batch_lines)
    done = None
    try:
        to_request, endpoint = _reader(source, entered)
        with tempfile.TemporaryDirectory(prefix="bulk-") as directory:
            done = await on_thread(
                source.file,
                lambda: convert(source.file, source.table, to_request, Path(directory), bounds),
            )
            _check(done, is_skipping="skip" in entered, bounds=bounds)
            model = entered.get("model", "").strip()
            sending = Sending(api_of(request), key, source.name, endpoint, model)
            job_id = await _send_parts(sending, done)
    except AlreadySentError:
        return RedirectResponse("/bulk?sent=1", 303)
    except RefusedError as error:
        return await _preview(request, source, entered, error, done)
    return RedirectResponse(f"/bulk/jobs/{segment(job_id)}", 303)


async def _send_parts(sending: Sending, done: Conversion) -> str:
    try:
        return await sending.send(done)
    except RefusedError as error:
        words = f"Nothing was sent. The file makes {len(done.parts)} batches: {error}"
        raise RefusedError(error.status, error.code, words) from error


def _reader(
    source: Source, entered: Mapping[str, str]
) -> tuple[Callable[[Any], tuple[str, bytes]], str]:
    if source.table.is_batch:
        endpoint = source.endpoint
        if endpoint not in (CHAT, COMPLETION, RESPONSE):
            known = f"{CHAT}, {COMPLETION} or {RESPONSE}"
            raise EntryError("endpoint", f"The first line's url is “{endpoint}”, not {known}.")
        return lambda row: check_line(row, endpoint), endpoint
    mapping = read_mapping(entered, source.found.columns)
    return lambda row: to_line(row, mapping), mapping.endpoint


def _check(done: Conversion, *, is_skipping: bool, bounds: Bounds) -> None:
    """Raises RefusedError for a conversion that is not to be sent."""
    problem = None
    if not done.requests:
        problem = "No line can be sent: correct the mapping, or the file. Nothing was sent."
    elif done.left_out and not is_skipping:
        problem = (
            f"{done.left_out:,} of {done.rows:,} lines cannot be sent. Correct them and upload the "
            "file again, or have them left out (below). Nothing was sent."
        )
    elif len(done.parts) > MAX_PARTS:
        files = -(-len(done.parts) // MAX_PARTS)
        problem = (
            f"The file makes {len(done.parts)} batches of up to {bounds.lines:,} lines, and a job "
            f"has at most {MAX_PARTS}. Split it into {files} files. Nothing was sent."
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
        can_skip=bool(checked.left_out) or "skip" in form,
        kept_days=_UPLOAD_RETENTION_DAYS,
    )


def _shown(value: Any) -> str:
    try:
        return text_of(value)
    except RowError as error:
        return f"({error})"


routes = [
    Route("/bulk", _index),
    Route(UPLOADS, upload, methods=["POST"]),
    Route("/bulk/files/{file_id}", preview),
    Route("/bulk/files/{file_id}", send, methods=["POST"]),
]
