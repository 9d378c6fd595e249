"""Templates: rendering of pages, and formats of numbers, times and sizes."""

import hashlib
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from markupsafe import Markup, escape
from starlette.requests import Request
from starlette.responses import HTMLResponse

from app.ui.api import Me, api_of
from app.ui.errors import RefusedError
from app.ui.parameters import model_of

_HERE = Path(__file__).parent
STATIC = _HERE / "static"
UNKNOWN = "\N{EN DASH}"


class Section(NamedTuple):
    path: str
    title: str
    is_for_operators: bool = False


SECTIONS = (
    Section("/playground", "Playground"),
    Section("/compare", "Compare"),
    Section("/history", "History"),
    Section("/bulk", "Bulk"),
    Section("/usage", "Usage"),
    Section("/models", "Models"),
    Section("/launches", "Launch"),
    Section("/system", "System", is_for_operators=True),
)


async def page(
    request: Request, template: str, error: RefusedError | None = None, /, **context: Any
) -> HTMLResponse:
    """A whole page, with navigation if the API is available, and with the error if there is one."""
    shown = {
        "problem": error.message if error else None,
        "fields": error.fields if error else (),
        **context,
    }
    try:
        me: Me | None = await api_of(request).me()
    except RefusedError:
        me = None
    return fragment(request, template, error.status if error else 200, me=me, **shown)


def fragment(request: Request, template: str, status: int = 200, /, **context: Any) -> HTMLResponse:
    text = _environment().get_template(template).render(request=request, **context)
    return HTMLResponse(text, status)


def refreshed(request: Request, template: str, *, is_ended: bool, **context: Any) -> HTMLResponse:
    """A part that the page requests again and again, until it has ended."""
    response = fragment(request, template, is_ended=is_ended, **context)
    if is_ended:
        response.headers["X-Part-Ended"] = "1"
    return response


# --- Filters -----------------------------------------------------------------------------------------


def to_time(value: str | datetime) -> datetime:
    return value if isinstance(value, datetime) else datetime.fromisoformat(value)


def number(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 100 else f"{value:,.1f}"


def seconds(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    if value < 0.9995:
        return f"{value * 1000:.0f} ms"
    if value < 59.95:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    return f"{hours // 24} d {hours % 24} h"


def size(value: float | None) -> str:
    """Bytes, in decimal units, as files, disks and limits are described."""
    if value is None:
        return UNKNOWN
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            return f"{value:,.1f}".removesuffix(".0") + f" {unit}"
        value /= 1000
    raise AssertionError


def quoted(text: str) -> Markup:
    """A sentence of the API: text in backticks is code, everything is escaped."""
    parts = text.split("`")
    if len(parts) % 2 == 0:  # one is left over
        return escape(text)
    return Markup().join(
        Markup("<code>{}</code>").format(part) if place % 2 else part
        for place, part in enumerate(parts)
    )


def capitalize_first(text: str) -> str:
    return text[:1].upper() + text[1:]


def ago(value: str | datetime | None) -> Markup:
    """A time as its distance from now, with the time itself in the title."""
    if value is None:
        return Markup("&ndash;")
    time = to_time(value)
    distance = (datetime.now(UTC) - time).total_seconds()
    whole = abs(int(distance))
    text = f"{whole} s" if whole < 60 else seconds(whole)
    text = "just now" if whole < 2 else f"{text} ago" if distance > 0 else f"in {text}"
    exact = time.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return Markup('<time datetime="{}" title="{}">{}</time>').format(time.isoformat(), exact, text)


def at(value: str | datetime | None) -> Markup:
    if value is None:
        return Markup("&ndash;")
    time = to_time(value).astimezone(UTC)
    return Markup('<time datetime="{}">{}</time>').format(
        time.isoformat(), time.strftime("%Y-%m-%d %H:%M:%S UTC")
    )


@cache
def asset(name: str) -> str:
    """The address of a file of `static`, which changes with its content: browsers may cache it indefinitely."""
    digest = hashlib.sha256((STATIC / name).read_bytes()).hexdigest()[:12]
    return f"/static/{name}?v={digest}"


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_HERE / "templates"),
        autoescape=select_autoescape(default=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters = (number, seconds, size, ago, at, capitalize_first, quoted, model_of)
    environment.filters |= {one.__name__: one for one in filters}
    environment.globals |= {"asset": asset, "sections": SECTIONS}
    return environment
