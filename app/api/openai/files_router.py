"""/v1/files: OpenAI's files: upload, list, read and delete."""

from typing import Annotated, Literal
from urllib.parse import quote

from fastapi import APIRouter, Query
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from app.api.dependencies import ServicesOf, TeamOf, from_wire_id
from app.api.downloads import DOWNLOAD_BYTES, download
from app.api.json_codec import json_response
from app.api.openai.batches_schemas import (
    DeletedRead,
    FileListRead,
    FileRead,
    file_to_wire,
    page_to_wire,
    to_file_details,
)
from app.api.openai.upload_form import UploadForm
from app.batches.files import PART_BYTES
from app.core.byte_budget import charge, read_within

router = APIRouter(tags=["openai"])

UPLOADS = "/v1/files"  # the only path that accepts forms
FORM_BYTES = 65_536  # in addition to the file
_MAX_LIST = 10_000
_LISTED_BYTES = 512  # of a file in a list, about

_FORM = {
    "required": True,
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": ["file", "purpose"],
                "properties": {
                    "file": {"type": "string", "format": "binary"},
                    "purpose": {"type": "string", "enum": ["batch"]},
                    "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
                    "expires_after[seconds]": {
                        "type": "integer",
                        "minimum": 3600,
                        "maximum": 2592000,
                    },
                },
            }
        }
    },
}


@router.post(UPLOADS, response_model=FileRead, openapi_extra={"requestBody": _FORM})
async def upload_file(request: Request, services: ServicesOf, team: TeamOf) -> Response:
    """Upload a file of requests for a batch; it is stored part by part as it arrives."""
    await services.files.check_room(team)
    declared = request.headers.get("content-length", "")
    await charge(min(int(declared) if declared.isdigit() else PART_BYTES, PART_BYTES))
    writer = services.files.writer(team)
    try:
        form = UploadForm(request.headers.get("content-type", ""))
        async for piece in request.stream():
            await writer.write(form.feed(piece))
        form.close()
        details = to_file_details(form.fields, form.filename)
        return json_response(file_to_wire(await services.files.finish(team, writer, details)))
    except ClientDisconnect:
        return Response(status_code=499)  # for the log alone
    finally:
        await writer.discard()


@router.get(UPLOADS, response_model=FileListRead)
async def list_files(
    services: ServicesOf,
    team: TeamOf,
    purpose: Annotated[str | None, Query(max_length=64, pattern=r"^[^\x00]*$")] = None,
    after: Annotated[
        str | None, Query(description="The id of the last file of the previous page.")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=_MAX_LIST)] = _MAX_LIST,
    order: Literal["asc", "desc"] = "desc",
) -> Response:
    """List files, newest first."""
    behind = None if after is None else from_wire_id("file-", after, "file")
    files, _ = await read_within(
        limit * _LISTED_BYTES,
        lambda: services.files.list(
            team, purpose=purpose, after=behind, limit=limit + 1, order=order
        ),
        lambda read: len(read) * _LISTED_BYTES,
    )
    return json_response(page_to_wire([file_to_wire(file) for file in files], limit))


@router.get("/v1/files/{file_id}", response_model=FileRead)
async def read_file(file_id: str, services: ServicesOf, team: TeamOf) -> Response:
    """Read a file's metadata."""
    file = await services.files.get(team, from_wire_id("file-", file_id, "file"))
    return json_response(file_to_wire(file))


@router.get(
    "/v1/files/{file_id}/content",
    response_class=Response,
    responses={
        200: {
            "description": "The file as it was uploaded or written.",
            "content": {"application/octet-stream": {"schema": {"type": "string"}}},
        }
    },
)
async def read_file_content(file_id: str, services: ServicesOf, team: TeamOf) -> Response:
    """Read the content of a file."""
    services.hub.reserve_place(team)
    file = await services.files.get(team, from_wire_id("file-", file_id, "file"))
    pieces = services.files.read(team, file.id, DOWNLOAD_BYTES)
    # Until the first piece is read, an error has a status.
    first = await anext(pieces, b"")
    headers = {
        "Content-Length": str(file.size),
        "Content-Disposition": f"attachment; filename*=utf-8''{quote(file.filename)}",
        "X-Content-Type-Options": "nosniff",
    }
    content = download(services, team, first, pieces)
    return StreamingResponse(content, 200, headers, "application/octet-stream")


@router.delete("/v1/files/{file_id}", response_model=DeletedRead)
async def delete_file(file_id: str, services: ServicesOf, team: TeamOf) -> Response:
    """Delete a file. Batches that are past validation no longer need it."""
    identifier = from_wire_id("file-", file_id, "file")
    await services.files.delete(team, identifier)
    deleted = DeletedRead(id=f"file-{identifier}", object="file", deleted=True)
    return json_response(deleted.model_dump())
