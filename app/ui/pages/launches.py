"""Launches: servers that the service starts; the plan, the form, and the state of each."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from app.ui import launch_form
from app.ui.api import Api, api_of, identifier, segment
from app.ui.engine_fields import sections_of
from app.ui.errors import Ignoring, RefusedError
from app.ui.launch_form import Section
from app.ui.render import fragment, page, refreshed, seconds, to_time
from app.ui.sending import read_form, texts_of

_PAGE_SIZE = 50
_ENDED = frozenset({"stopped", "timeout", "failed"})
_BADGES = {
    "healthy": "good", "starting": "running", "submitted": "queued", "pending": "queued",
    "unhealthy": "bad", "failed": "bad", "timeout": "warn", "stopping": "warn", "stopped": "",
}  # fmt: skip
_MEANINGS = {
    "submitted": "stored; its job is not submitted yet",
    "pending": "its job waits in the queue of the cluster",
    "starting": "its job runs; the model is not ready yet",
    "healthy": "the model is ready, and gets results",
    "unhealthy": "its job runs, but the server does not answer",
    "stopping": "the server is drained, then the job ended",
    "stopped": "ended, as it was asked to or by itself",
    "timeout": "ended by its time limit",
    "failed": "ended by an error",
}


async def show(request: Request) -> Response:
    return await page(request, "launches.html", tab="list", **await _list(request))


async def part(request: Request) -> Response:
    return fragment(request, "_launches.html", **await _list(request))


async def vast(request: Request) -> Response:
    me = await api_of(request).me()
    return await page(
        request,
        "launch_vast.html",
        tab="vast",
        is_operator=me.is_operator,
        api_url=request.app.state.settings.shown_api_url,
        auth=" -H 'Authorization: Bearer ...'" if me.is_authenticated else "",
    )


async def _list(request: Request) -> dict[str, Any]:
    api, query = api_of(request), request.query_params
    state, after = query.get("state", ""), query.get("after", "")
    rows, profiles, me = await asyncio.gather(
        api.get("/launches", {"state": state, "after": after, "limit": _PAGE_SIZE}),
        api.get_cached("/launches/profiles"),
        api.me(),
    )
    return {
        "rows": rows,
        "profiles": profiles,
        "is_operator": me.is_operator,
        "state": state,
        "states": list(_MEANINGS),
        "after": after,
        "next_after": rows[-1]["id"] if len(rows) == _PAGE_SIZE else None,
        "badges": _BADGES,
        "meanings": _MEANINGS,
    }


# --- A new one ---------------------------------------------------------------------------------------


@dataclass
class _Form:
    values: dict[str, str]
    options: Sequence[Section]
    plan: dict[str, Any] | None = None
    dry_run: dict[str, Any] | None = None
    notice: str = ""
    error: RefusedError | None = None

    @property
    def filled(self) -> set[str]:
        return {name for name, value in self.values.items() if value}

    @property
    def has_options(self) -> bool:
        """True if a field of the engine's options is filled."""
        return any(field.name in self.filled for part in self.options for field in part.fields)

    def body(self) -> dict[str, Any]:
        """The request of a launch."""
        return launch_form.to_launch(self.values, self.options)


async def new(request: Request) -> Response:
    return await _new_page(request, await _form(api_of(request), request.query_params))


async def _form(api: Api, texts: Mapping[str, str]) -> _Form:
    listing, profiles = await asyncio.gather(
        api.get_cached("/launches/engine-options"), api.get_cached("/launches/profiles")
    )
    options = sections_of(listing, profiles)
    names = [field.name for part in options for field in part.fields]
    return _Form({name: texts.get(name, "") for name in (*launch_form.NAMES, *names)}, options)


async def submit(request: Request) -> Response:
    """Do the pressed button's action: plan, take a row of the plan, show the script, launch."""
    texts = texts_of(await read_form(request))
    api, action = api_of(request), texts.get("do", "plan")
    shown = await _form(api, texts)
    try:
        if action == "launch":
            launch = await api.post("/launches", shown.body())
            return RedirectResponse(f"/launches/{segment(launch['id'])}", 303)
        if action == "script":
            shown.dry_run = await api.post("/launches", shown.body(), {"dry_run": "true"})
        else:
            await _plan(api, shown, action.removeprefix("pick:") if ":" in action else None)
    except RefusedError as error:
        shown.error = error
    return await _new_page(request, shown)


async def _plan(api: Api, shown: _Form, picked: str | None) -> None:
    shown.plan = await api.post("/launches/plan", launch_form.to_plan(shown.values))
    assert shown.plan is not None
    shown.plan["plans"].sort(key=lambda row: not row["fits"])
    for row in shown.plan["plans"]:
        if row["gpu"] == picked and row["resources"]:
            profiles = await api.get_cached("/launches/profiles")
            profile = _profile(profiles, shown.values["profile"])
            shown.values = launch_form.with_plan_row(
                row, shown.plan["model"], shown.values, profile
            )
            nodes = f"{row['nodes']} nodes, each with " if row["nodes"] > 1 else ""
            shown.notice = (
                f"Filled in for {nodes}{row['gpus']} {row['title']}. The cluster chooses the kind of "
                "GPU: if it has several, name one as Slurm's gres or as a constraint."
            )


async def _new_page(request: Request, shown: _Form) -> Response:
    api = api_of(request)
    profiles, catalogue, me = await asyncio.gather(
        api.get_cached("/launches/profiles"), _catalogue(api), api.me()
    )
    profile = _profile(profiles, shown.values["profile"])
    return await page(
        request,
        "launch_new.html",
        shown.error,
        tab="new",
        shown=shown,
        values=shown.values,
        wrong=dict(shown.error.fields if shown.error else ()),
        profiles=profiles,
        profile=profile,
        sizes=_sizes(profile, shown.plan, launch_form.nodes_of(shown.values)),
        catalogue=catalogue,
        is_operator=me.is_operator,
        form=launch_form,
    )


async def _catalogue(api: Api) -> list[dict[str, Any]]:
    with Ignoring(409):  # the operator's file is wrong: a launch reports it
        found: list[dict[str, Any]] = await api.get_cached("/launches/catalogue")
        return found
    return []


def _profile(profiles: Sequence[dict[str, Any]], name: str) -> dict[str, Any] | None:
    """The named profile; else a launch's default."""
    if name:
        return next((one for one in profiles if one["name"] == name), None)
    default = next((one for one in profiles if one["default"]), None)
    return default or next(iter(profiles), None)


def _sizes(
    profile: Mapping[str, Any] | None, plan: Mapping[str, Any] | None, nodes: int
) -> list[tuple[Mapping[str, Any], str]]:
    """The profile's sizes, each with a note whether nodes of it take the planned model's weights."""
    if profile is None:
        return []
    model = plan["model"] if plan else None

    def verdict(size: Mapping[str, Any]) -> str:
        if size["max_model_size_gb"] is None:
            return "takes any"
        if model is None:
            return ""
        is_enough = launch_form.takes(size, model, nodes)
        share = model["disk_bytes"] / nodes / 1e9
        return "takes it" if is_enough else f"too small for {share:,.1f} GB"

    return [(size, verdict(size)) for size in profile["tiers"]]


# --- One launch --------------------------------------------------------------------------------------


async def one(request: Request) -> Response:
    return await page(request, "launch.html", tab="list", **await _one(request))


async def one_part(request: Request) -> Response:
    return refreshed(request, "_launch.html", **await _one(request))


async def act(request: Request) -> Response:
    launch_id, action = request.path_params["launch_id"], request.path_params["action"]
    path = f"/launches/{identifier(launch_id)}"
    if action == "stop":
        await api_of(request).post(f"{path}/stop")
        return RedirectResponse(path, 303)
    if action == "delete":
        await api_of(request).delete(path)
        return RedirectResponse("/launches", 303)
    raise HTTPException(404)


async def _one(request: Request) -> dict[str, Any]:
    api = api_of(request)
    path = f"/launches/{identifier(request.path_params['launch_id'])}"
    launch, me = await asyncio.gather(api.get(path), api.me())
    log = (await api.get(f"{path}/log"))["log"] if me.is_operator else None
    return {
        "launch": launch,
        "log": log,
        "steps": _steps(launch),
        "again": launch_form.from_spec(launch["spec"]),
        "is_ended": launch["state"] in _ENDED,
        "is_operator": me.is_operator,
        "badges": _BADGES,
        "meanings": _MEANINGS,
    }


def _steps(launch: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Tuples (event, time, time since the previous event)."""
    names = (
        ("created_at", "Asked for"), ("submitted_at", "Job submitted"), ("started_at", "Job started"),
        ("healthy_at", "Model ready"), ("stopping_at", "Stopping"), ("ended_at", "Ended"),
    )  # fmt: skip
    happened = sorted((to_time(launch[name]), words) for name, words in names if launch[name])
    steps, before = [], None
    for time, words in happened:
        after = seconds((time - before).total_seconds()) if before else ""
        steps.append((words, time.isoformat(), after))
        before = time
    return steps


routes = [
    Route("/launches", show),
    Route("/launches/part", part),
    Route("/launches/new", new),
    Route("/launches/new", submit, methods=["POST"]),
    Route("/launches/vast", vast),
    Route("/launches/{launch_id}", one),
    Route("/launches/{launch_id}/part", one_part),
    Route("/launches/{launch_id}/{action:str}", act, methods=["POST"]),
]
