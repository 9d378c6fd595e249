"""Keyset pagination of lists."""

from collections.abc import Sequence
from typing import Annotated, Any
from uuid import UUID

from fastapi import Query, Request, Response

from app.api.json_codec import json_response

MAX_PAGE = 1000

Limit = Annotated[int, Query(ge=1, le=MAX_PAGE, description="Most rows of a page.")]

After = Annotated[
    UUID | None, Query(description="Id of the last row of the previous page (keyset paging).")
]


def page_response(request: Request, items: Sequence[dict[str, Any]], limit: int) -> Response:
    """A page as JSON; a full page links to the next (RFC 8288)."""
    headers = {}
    if len(items) == limit:
        following = request.url.include_query_params(after=items[-1]["id"])
        target = f"{following.path}?{following.query}"
        headers["Link"] = f'<{target}>; rel="next"'
    return json_response(items, headers=headers)
