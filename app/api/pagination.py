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


def page_response(
    request: Request, items: Sequence[dict[str, Any]], following: UUID | str | None
) -> Response:
    """A page as JSON, with a link to the page behind the id `following` (RFC 8288)."""
    headers = {}
    if following is not None:
        url = request.url.include_query_params(after=following)
        headers["Link"] = f'<{url.path}?{url.query}>; rel="next"'
    return json_response(items, headers=headers)


def last_of_full(items: Sequence[dict[str, Any]], limit: int) -> str | None:
    """The id behind which the next page begins, if this one is full."""
    return items[-1]["id"] if len(items) == limit else None
