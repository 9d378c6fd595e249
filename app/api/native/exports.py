"""/results/export: results as a file, one JSON object per line."""

import contextlib
import logging
from collections.abc import AsyncGenerator, Sequence
from datetime import UTC, datetime
from typing import Annotated

import orjson
from fastapi import APIRouter, Query, Response

from app.api.container import Services
from app.api.dependencies import ServicesOf, TeamOf
from app.api.native.results import BY_METADATA, Narrowed
from app.api.native.schemas import ExportRead, result_wire
from app.api.pagination import After
from app.api.raw_routes import reference
from app.api.sse import CutOffError, EventStreamResponse
from app.core.errors import ServiceError
from app.core.fair_share import in_turns
from app.results.rows import ExportedResult

logger = logging.getLogger(__name__)

router = APIRouter(tags=["results"])

# The pattern of /results/{result_id} also matches it, so it is registered first.
PATH = "/results/export"
MEDIA_TYPE = "application/x-ndjson"

_MAX_LIMIT = 2**53 - 1


@router.get(
    PATH,
    response_class=Response,
    responses={
        200: {
            "description": "One result a line, as JSON; a body without its end is truncated.",
            "content": {MEDIA_TYPE: {"schema": reference(ExportRead)}},
        }
    },
    openapi_extra=BY_METADATA,
)
async def export_results(
    services: ServicesOf,
    team: TeamOf,
    narrowed: Narrowed,
    limit: Annotated[
        int | None, Query(ge=1, le=_MAX_LIMIT, description="Most lines; all by default.")
    ] = None,
    after: After = None,
) -> Response:
    """Export results with their prompts and whole texts, newest first, as JSON lines.

    `after` continues behind the last whole line of an interrupted export.
    """
    services.hub.reserve_place(team)
    pieces = services.export.read(team, narrowed, after=after, limit=limit)
    # Until the first read succeeds, an error is a problem, not a truncated file.
    first: Sequence[ExportedResult] = await anext(pieces, [])
    name = f"results-{datetime.now(UTC):%Y%m%dT%H%M%SZ}.jsonl"
    headers = {
        "Content-Disposition": f'attachment; filename="{name}"',
        "X-Content-Type-Options": "nosniff",
    }
    lines = _lines(services, team, first, pieces)
    return EventStreamResponse(lines, headers, media_type=MEDIA_TYPE)


async def _lines(
    services: Services,
    team: str,
    first: Sequence[ExportedResult],
    pieces: AsyncGenerator[Sequence[ExportedResult], None],
) -> AsyncGenerator[bytes, None]:
    """The lines of each piece; an error cuts the connection before the body's end."""
    try:
        with services.hub.downloading(team):
            async with contextlib.aclosing(pieces):
                yield await _to_lines(services, first)
                async for rows in pieces:
                    yield await _to_lines(services, rows)
    except ServiceError as error:
        logger.warning("an export was broken off: %s", error, extra={"action": "export_broken"})
        raise CutOffError(error.code) from error


async def _to_lines(services: Services, rows: Sequence[ExportedResult]) -> bytes:
    lines = [
        orjson.dumps(
            result_wire(services, one.row)
            | {
                "content": one.content,
                "messages": orjson.Fragment(one.messages) if one.messages else None,
            },
            option=orjson.OPT_APPEND_NEWLINE,
        )
        async for one in in_turns(rows)
    ]
    return b"".join(lines)
