"""System, for operators: queues, throughput, errors, and the processes behind the service."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from app.ui.api import api_of
from app.ui.charts import MAX_SERIES, Series, line_chart
from app.ui.history_rows import Row, series, steps, total, worst
from app.ui.remedies import explain
from app.ui.render import fragment, number, page, seconds, size, to_time

RANGES = {60: "1 hour", 360: "6 hours", 1440: "24 hours"}


async def show(request: Request) -> Response:
    return await page(request, "system.html", **await _system(request))


async def part(request: Request) -> Response:
    return fragment(request, "_system.html", **await _system(request))


async def _system(request: Request) -> dict[str, Any]:
    text = request.query_params.get("minutes", "")
    minutes = int(text) if text in map(str, RANGES) else 60
    system = await api_of(request).get("/system", {"minutes": minutes})
    return {
        "system": system,
        "minutes": minutes,
        "ranges": RANGES,
        "tiles": _tiles(system, minutes),
        "charts": _charts(system, minutes),
        "alive": [worker for worker in system["workers"] if worker["is_alive"]],
        "ended": [worker for worker in system["workers"] if not worker["is_alive"]],
        "failures": [(row, *explain(row["code"], row["code"])) for row in system["failures"]],
        "api_url": request.app.state.settings.shown_api_url,
    }


def _tiles(system: Mapping[str, Any], minutes: int) -> list[tuple[str, str, bool]]:
    """Tuples (name, value, is good)."""
    alive = sum(worker["is_alive"] for worker in system["workers"])
    queued = sum(queue["queued"] for queue in system["queues"])
    oldest = max((queue["oldest_seconds"] or 0 for queue in system["queues"]), default=0)
    completed = sum(row["completed"] for row in system["history"])
    failed = sum(row["count"] for row in system["failures"] if row["code"] != "cancelled")
    slowest = worst("ttft_p95")(system["history"])
    return [
        ("Workers alive", number(alive), alive > 0),
        ("Queued", number(queued), alive > 0 or not queued),
        ("Oldest waits", seconds(oldest) if queued else "none", oldest < 600),
        ("Running", number(sum(queue["running"] for queue in system["queues"])), True),
        (f"Completed, {RANGES[minutes]}", number(completed), True),
        (f"Failed, {RANGES[minutes]}", number(failed), failed * 20 <= completed + failed),
        ("First token, p95", seconds(slowest), True),
        ("Database", size(system["database"]["size_bytes"]), True),
    ]


def _charts(system: Mapping[str, Any], minutes: int) -> list[Markup]:
    history, queues = system["history"], system["queue_history"]
    times = steps(to_time(system["now"]), minutes, history or queues)
    width = (times[1] - times[0]).total_seconds()

    def rate(name: str, member: str, seconds: float) -> Series:
        found = series(name, times, history, total(member), 0).values
        return Series(name, [*((value or 0) * seconds / width for value in found[:-1]), None])

    throughput = [rate("completed", "completed", 60), rate("failed or cancelled", "failed", 60)]
    tokens = [rate("completion", "completion_tokens", 1), rate("prompt", "prompt_tokens", 1)]
    charts = (
        ("Queue depth", "results queued", _depths(times, queues)),
        ("Throughput", "results a minute", throughput),
        ("Tokens", "tokens a second", tokens),
        ("Time in the queue", "seconds", _percentiles(times, history, "queue")),
        ("Time to the first token", "seconds", _percentiles(times, history, "ttft")),
        ("Time in all", "seconds", _percentiles(times, history, "seconds")),
    )
    return [line_chart(title, unit, times, lines) for title, unit, lines in charts]


def _depths(times: Sequence[datetime], rows: Sequence[Row]) -> list[Series]:
    deepest: dict[str, int] = {}
    for row in rows:
        deepest[row["name"]] = max(deepest.get(row["name"], 0), row["queued"])
    names = sorted(deepest, key=lambda name: (-deepest[name], name))
    shown = names if len(names) <= MAX_SERIES else names[: MAX_SERIES - 1]
    lines = [
        series(name, times, [row for row in rows if row["name"] == name], worst("queued"), 0)
        for name in shown
    ]
    if others := [row for row in rows if row["name"] not in shown]:
        lines.append(series("the others", times, others, total("queued"), 0))
    return lines or [Series("all", [None] * len(times))]


def _percentiles(times: Sequence[datetime], rows: Sequence[Row], name: str) -> list[Series]:
    return [
        series("half are faster", times, rows, worst(f"{name}_p50")),
        series("95 of 100 are faster", times, rows, worst(f"{name}_p95")),
    ]


routes = [Route("/system", show), Route("/system/part", part)]
