"""Downloads of models into the caches of profiles' hosts: the form, and the progress of each."""

import asyncio
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from app.ui.api import api_of, identifier
from app.ui.errors import RefusedError
from app.ui.render import fragment, page
from app.ui.sending import read_form, texts_of

_PATH = "/launches/downloads"
_PAGE_SIZE = 50
_MEMBERS = ("model", "profile", "revision")
_BADGES = {"queued": "queued", "running": "running", "completed": "good", "failed": "bad", "cancelled": ""}  # fmt: skip
_MEANINGS = {
    "queued": "waits for a worker",
    "running": "its files are received and checked",
    "completed": "all files are there",
    "failed": "ended by an error; another download continues it",
    "cancelled": "ended on request; another download continues it",
}


async def show(request: Request) -> Response:
    return await _page(request, request.query_params)


async def part(request: Request) -> Response:
    return fragment(request, "_downloads.html", **await _list(request))


async def create(request: Request) -> Response:
    values = texts_of(await read_form(request))
    filled = {name: values[name].strip() for name in _MEMBERS if values.get(name, "").strip()}
    try:
        await api_of(request).post(_PATH, filled)
    except RefusedError as error:
        return await _page(request, values, error)
    return RedirectResponse(_PATH, 303)


async def cancel(request: Request) -> Response:
    download_id = identifier(request.path_params["download_id"])
    await api_of(request).post(f"{_PATH}/{download_id}/cancel")
    return RedirectResponse(_PATH, 303)


async def _page(
    request: Request, values: Mapping[str, str], error: RefusedError | None = None
) -> Response:
    return await page(
        request,
        "downloads.html",
        error,
        tab="downloads",
        values={name: values.get(name, "") for name in _MEMBERS},
        wrong=dict(error.fields if error else ()),
        **await _list(request),
    )


async def _list(request: Request) -> dict[str, Any]:
    api, after = api_of(request), request.query_params.get("after", "")
    rows, profiles, me = await asyncio.gather(
        api.get(_PATH, {"after": after, "limit": _PAGE_SIZE}),
        api.get_cached("/launches/profiles"),
        api.me(),
    )
    return {
        "rows": rows,
        "profiles": profiles,
        "is_operator": me.is_operator,
        "after": after,
        "next_after": rows[-1]["id"] if len(rows) == _PAGE_SIZE else None,
        "badges": _BADGES,
        "meanings": _MEANINGS,
    }


routes = [
    Route(_PATH, show),
    Route(_PATH, create, methods=["POST"]),
    Route(f"{_PATH}/part", part),
    Route(f"{_PATH}/{{download_id}}/cancel", cancel, methods=["POST"]),
]
