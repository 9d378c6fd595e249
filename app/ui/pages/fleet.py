"""Models and servers: readiness, queues, and, for operators, the servers."""

import asyncio
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from app.ui.api import LOAD_TIMEOUT, Api, api_of, segment
from app.ui.charts import sparkline
from app.ui.errors import RefusedError
from app.ui.history_rows import Row, series, steps, total
from app.ui.render import fragment, number, page
from app.ui.sending import read_form

_SERVER_FIELDS = ("name", "grpc", "http", "metrics", "slots", "secret")
_NO_VALUES = dict.fromkeys(_SERVER_FIELDS, "")


async def show(request: Request) -> Response:
    return await _page(request)


async def part(request: Request) -> Response:
    return fragment(request, "_fleet.html", **await _fleet(api_of(request)))


async def load(request: Request) -> Response:
    form, action = await read_form(request), _action(request, "load", "unload")
    path = f"/models/{segment(str(form.get('name', '')))}/{action}"
    try:
        await api_of(request).send("POST", path, timeout=LOAD_TIMEOUT)
    except RefusedError as error:
        return await _page(request, error)
    return RedirectResponse("/models", 303)


async def register(request: Request) -> Response:
    form = await read_form(request)
    values = {name: str(form.get(name, "")).strip() for name in _SERVER_FIELDS}
    body: dict[str, Any] = {name: value for name, value in values.items() if value}
    if values["slots"].isascii() and values["slots"].isdigit():
        body["slots"] = int(values["slots"])
    try:
        await api_of(request).post("/servers", body)
    except RefusedError as error:
        return await _page(request, error, values | {"secret": ""})
    return RedirectResponse("/models#servers", 303)


async def change(request: Request) -> Response:
    form, action = await read_form(request), _action(request, "drain", "resume", "remove")
    path = f"/servers/{segment(str(form.get('name', '')))}"
    try:
        if action == "remove":
            await api_of(request).delete(path)
        else:
            await api_of(request).post(f"{path}/{action}")
    except RefusedError as error:
        return await _page(request, error)
    return RedirectResponse("/models#servers", 303)


def _action(request: Request, *known: str) -> str:
    action: str = request.path_params["action"]
    if action not in known:
        raise HTTPException(404)
    return action


async def _page(
    request: Request,
    error: RefusedError | None = None,
    values: Mapping[str, str] = _NO_VALUES,
) -> Response:
    fleet = await _fleet(api_of(request))
    return await page(request, "fleet.html", error, values=values, **fleet)


async def _fleet(api: Api) -> dict[str, Any]:
    me = await api.me()
    models, history = await asyncio.gather(
        api.get("/models/"), api.get_cached("/history?minutes=60")
    )
    servers = await api.get("/servers") if me.is_operator else []
    lines = _lines(history)
    for model in models:
        line = lines.get(model["name"])
        model["done"] = sum(value or 0 for value in line or ())
        # The last step is not over, and left out.
        title = f"{model['done']:,.0f} results completed in the last hour"
        model["spark"] = sparkline(title, line[:-1]) if line else None
        model["slots"] = _slots(model["name"], servers)
    return {
        "models": models,
        "servers": servers,
        "is_operator": me.is_operator,
        "tiles": _tiles(models, servers, is_operator=me.is_operator),
    }


def _lines(rows: Sequence[Row]) -> dict[str, Sequence[float | None]]:
    times = steps(datetime.now(UTC), 60, rows)
    by_name: dict[str, list[Row]] = {}
    for row in rows:
        by_name.setdefault(row["model_name"], []).append(row)
    completed = total("completed")
    return {name: series(name, times, own, completed, 0).values for name, own in by_name.items()}


def _slots(name: str, servers: Sequence[dict[str, Any]]) -> int:
    """Results that each worker can run of a model at a time, on all servers that have it ready."""
    return sum(
        server["slots"]
        for server in servers
        if server["healthy"] and server["state"] == "active"
        and any(one["name"] == name and one["ready"] for one in server["models"])
    )  # fmt: skip


def _tiles(
    models: Sequence[dict[str, Any]], servers: Sequence[dict[str, Any]], *, is_operator: bool
) -> list[tuple[str, str, bool]]:
    """Tuples (name, value, is good)."""
    ready, healthy = sum(one["ready"] for one in models), sum(one["healthy"] for one in servers)
    found = [("Models ready", f"{ready} of {len(models)}", ready == len(models) > 0)]
    if is_operator:
        found.append(
            ("Servers healthy", f"{healthy} of {len(servers)}", healthy == len(servers) > 0)
        )
    waiting = sum(one["queued"] for one in models if not one["ready"])
    queued, running = (f"{sum(one[name] for one in models):,}" for name in ("queued", "running"))
    speed = sum(one["tokens_per_second"] for one in models)
    return [
        *found,
        ("Running", running, True),
        ("Queued", queued, True),
        ("Queued, model not ready", f"{waiting:,}", waiting == 0),
        ("Tokens a second", number(speed), True),
    ]


routes = [
    Route("/models", show),
    Route("/models/part", part),
    Route("/models/servers", register, methods=["POST"]),
    Route("/models/servers/{action:str}", change, methods=["POST"]),
    Route("/models/{action:str}", load, methods=["POST"]),
]
