"""Usage: tokens, engine time and cost of a month, by day, model and key."""

import asyncio
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from app.ui.api import STREAM_TIMEOUT, api_of
from app.ui.charts import MAX_SERIES, Series, line_chart
from app.ui.proxied_response import ProxiedResponse, open_stream, parts_of
from app.ui.render import UNKNOWN, number, page, seconds

_MONTH = re.compile(r"(20\d\d)-(0[1-9]|1[0-2])")
_MONTHS = 12  # to choose from
_ALL_TEAMS = "*"
_TABLES = {"model": "By model", "key": "By key", "outcome": "By outcome"}

Row = Mapping[str, Any]


async def show(request: Request) -> Response:
    api, me = api_of(request), await api_of(request).me()
    today = datetime.now(UTC).date()
    first = _month(request, today)
    team = _ALL_TEAMS if me.is_operator and request.query_params.get("team") == _ALL_TEAMS else ""
    days = await api.get("/usage", _query(first, team, "day,model"))
    groups = ["team", *_TABLES] if team else list(_TABLES)
    found = await asyncio.gather(*(api.get("/usage", _query(first, team, one)) for one in groups))
    budgets = await api.get("/usage/budgets", {"team": team})
    titles = {"team": "By team"} | _TABLES
    month = f"{first:%Y-%m}"
    return await page(
        request,
        "usage.html",
        month=month,
        months=_months(today),
        team=team,
        currency=days["currency"],
        tiles=_tiles(days["total"], days["currency"]),
        charts=_charts(days, first, today),
        tables=[
            (group, titles[group], [_cells(row, group) for row in one["rows"]])
            for group, one in zip(groups, found, strict=True)
        ],
        budgets=[_budget(one) for one in budgets],
        is_empty=not days["rows"],
        export=f"/usage/export?month={month}&team={team}",
    )


async def export(request: Request) -> Response:
    """The month by day, key, model and outcome, as CSV."""
    first = _month(request, datetime.now(UTC).date())
    team = request.query_params.get("team", "")
    groups = "day,key,model,outcome" if team != _ALL_TEAMS else "day,team,key,model,outcome"
    params = _query(first, team, groups) | {"format": "csv"}
    response, held = await open_stream(
        api_of(request).stream("GET", "/usage", params=params, timeout=STREAM_TIMEOUT)
    )
    headers = {
        "content-disposition": f'attachment; filename="usage-{first:%Y-%m}.csv"',
        "x-content-type-options": "nosniff",
    }
    return ProxiedResponse(parts_of(response), held, headers, media_type="text/csv")


def _month(request: Request, today: date) -> date:
    """The first day of the month that the visitor chose, or of this one."""
    found = _MONTH.fullmatch(request.query_params.get("month", ""))
    return date(int(found[1]), int(found[2]), 1) if found else today.replace(day=1)


def _months(today: date) -> list[str]:
    months, first = [], today.replace(day=1)
    for _ in range(_MONTHS):
        months.append(f"{first:%Y-%m}")
        first = (first - timedelta(days=1)).replace(day=1)
    return months


def _last(first: date) -> date:
    return (first + timedelta(days=31)).replace(day=1) - timedelta(days=1)


def _query(first: date, team: str, group_by: str) -> dict[str, str]:
    return {"from": str(first), "to": str(_last(first)), "team": team, "group_by": group_by}


def _tiles(total: Row, currency: str) -> list[tuple[str, str]]:
    return [
        ("Results", number(total["results"])),
        ("Completed", number(total["completed"])),
        ("Prompt tokens", number(total["prompt_tokens"])),
        ("Completion tokens", number(total["completion_tokens"])),
        ("Engine time", seconds(total["engine_seconds"])),
        ("Cost", _cost(total["cost"], currency)),
    ]


def _cost(value: float | None, currency: str = "") -> str:
    return UNKNOWN if value is None else f"{value:,.2f} {currency}".rstrip()


def _cells(row: Row, group: str) -> list[str]:
    return [
        row[group] or "(unknown)",
        *(number(row[name]) for name in ("results", "prompt_tokens", "completion_tokens")),
        seconds(row["engine_seconds"]),
        _cost(row["cost"]),
    ]


def _budget(budget: Row) -> list[str]:
    tokens = f"{number(budget['used_tokens'])} of {number(budget['max_tokens'])}"
    cost = f"{_cost(budget['used_cost'])} of {_cost(budget['max_cost'], budget['currency'])}"
    return [
        budget["team"],
        budget["key"] or "all",
        budget["month"] or UNKNOWN,
        UNKNOWN if budget["max_tokens"] is None else tokens,
        UNKNOWN if budget["max_cost"] is None else cost,
    ]


def _charts(usage: Mapping[str, Any], first: date, today: date) -> list[Any]:
    """Tokens and cost of each day, by the models that have most of them."""
    last = min(_last(first), max(today, first + timedelta(days=1)))
    days = [first + timedelta(days=place) for place in range((last - first).days + 1)]
    times = [datetime(day.year, day.month, day.day, tzinfo=UTC) for day in days]
    return [
        line_chart(title, unit, times, _series(usage["rows"], [str(day) for day in days], members))
        for title, unit, members in (
            ("Tokens by model", "tokens a day", ("prompt_tokens", "completion_tokens")),
            ("Cost by model", f"{usage['currency']} a day", ("cost",)),
        )
    ]


def _series(rows: Sequence[Row], days: Sequence[str], members: Sequence[str]) -> list[Series]:
    """A line for each of the largest models, and one for the others together."""
    sums: dict[str, float] = {}
    for row in rows:
        sums[row["model"]] = sums.get(row["model"], 0) + _value(row, members)
    names = sorted(sums, key=lambda name: (-sums[name], name))
    shown = names if len(names) <= MAX_SERIES else names[: MAX_SERIES - 1]
    lines = [
        _line(name, [row for row in rows if row["model"] == name], days, members) for name in shown
    ]
    if others := [row for row in rows if row["model"] not in shown]:
        lines.append(_line("the others", others, days, members))
    return lines or [Series("all", [None] * len(days))]


def _line(name: str, rows: Sequence[Row], days: Sequence[str], members: Sequence[str]) -> Series:
    values = dict.fromkeys(days, 0.0)
    for row in rows:
        if row["day"] in values:
            values[row["day"]] += _value(row, members)
    return Series(name, list(values.values()))


def _value(row: Row, members: Sequence[str]) -> float:
    return sum(row[member] or 0 for member in members)


routes = [Route("/usage", show), Route("/usage/export", export)]
