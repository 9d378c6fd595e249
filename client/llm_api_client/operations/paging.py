"""Lists, page by page."""

import re
from collections.abc import Mapping

import msgspec

from llm_api_client.steps import Emit, Feed, QueryValue, Reply, Request, T, exchange

MAX_PAGE = 1000
# A page has up to this many rows unless the caller wants fewer.
_PAGE = 200
_NEXT = re.compile(r'<([^>]*)>\s*;\s*rel="?next"?')
_AFTER = re.compile(r"[?&]after=([^&]+)")


def pages(
    path: str, kind: type[T], query: Mapping[str, QueryValue], limit: int | None, page: int = _PAGE
) -> Feed[T]:
    """The rows of a list, up to `limit`; the next page is read when its first row is needed."""
    after: str | None = None
    left = limit
    while left is None or left > 0:
        size = page if left is None else min(left, page)
        request = Request("GET", path, {**query, "limit": size, "after": after})
        reply = yield from exchange(request)
        rows = msgspec.json.decode(reply.body, type=list[kind])  # type: ignore[valid-type]
        for row in rows:
            yield Emit(row)
        after = following(reply)
        if after is None:
            return
        left = None if left is None else left - len(rows)


def following(reply: Reply) -> str | None:
    """The id behind which the next page begins, from the header `Link`; None behind the last page."""
    found = _NEXT.search(reply.headers.get("link", ""))
    after = _AFTER.search(found[1]) if found else None
    return after[1] if after else None
