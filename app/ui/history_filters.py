"""Filters of the history: in an address, as parameters of the API, and as text for people."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import NamedTuple
from urllib.parse import urlencode

from app.ui.api import Params
from app.ui.errors import FormError

LABELS: Mapping[str, str] = {
    "q": "Words",
    "state": "State",
    "model_name": "Model",
    "error_code": "Error",
    "retryable": "Worth a retry",
    "created_after": "From",
    "created_before": "Until",
    "context_id": "Prompt",
    "metadata": "Metadata",
}
_TIMES = ("created_after", "created_before")
_PATH = "/history"
# Pages that "newer" can go back through; beyond them it leads to the newest.
_MAX_TRAIL = 20


class Chip(NamedTuple):
    label: str
    value: str
    without: str


def read_filters(query: Mapping[str, str]) -> dict[str, str]:
    return {name: text for name in LABELS if (text := query.get(name, "").strip())}


def to_params(filters: Mapping[str, str]) -> Params:
    """Parameters of the API's lists: times with their zone. Raises FormError."""
    params: dict[str, str | int | float | bool | None] = dict(filters)
    wrong = []
    for name in _TIMES:
        if name in filters:
            time = _to_time(filters[name])
            if time is None:
                wrong.append((name, "must be a day and a time, such as 2026-11-22T08:30"))
            else:
                params[name] = time.isoformat()
    if pair := params.pop("metadata", None):
        key, equals, value = str(pair).partition("=")
        if not (key and equals):
            wrong.append(("metadata", "must have the form KEY=VALUE"))
        params[f"metadata[{key.strip()}]"] = value.strip()
    if wrong:
        raise FormError(wrong)
    return params


def to_form(filters: Mapping[str, str]) -> dict[str, str]:
    form = dict.fromkeys(LABELS, "") | dict(filters)
    for name in _TIMES:
        if time := _to_time(form[name]):
            form[name] = time.strftime("%Y-%m-%dT%H:%M:%S" if time.second else "%Y-%m-%dT%H:%M")
    return form


def to_chips(filters: Mapping[str, str]) -> list[Chip]:
    return [
        Chip(
            LABELS[name],
            f"{value} UTC" if name in _TIMES else value,
            address({other: text for other, text in filters.items() if other != name}),
        )
        for name, value in to_form(filters).items()
        if value
    ]


def address(filters: Mapping[str, str], path: str = _PATH, **more: str) -> str:
    members = {name: value for name, value in {**filters, **more}.items() if value}
    return f"{path}?{urlencode(members)}" if members else path


def older(filters: Mapping[str, str], trail: str, after: str, last: str) -> str:
    """The address of the next page; `trail` has the beginnings of the pages before."""
    begun = [*_split(trail), after or "-"][-_MAX_TRAIL:]
    return address(filters, after=last, trail=".".join(begun))


def newer(filters: Mapping[str, str], trail: str) -> str:
    """The address of the page before this one by the trail; else of the newest."""
    *begun, after = _split(trail) or ["-"]
    if after == "-":
        return address(filters)
    return address(filters, after=after, trail=".".join(begun))


def _split(trail: str) -> list[str]:
    return [part[:40] for part in trail.split(".") if part][-_MAX_TRAIL:]


def _to_time(text: str) -> datetime | None:
    """A time without a zone is in UTC: the page's server cannot know its visitor's."""
    try:
        time = datetime.fromisoformat(text)
        return time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)
    except (ValueError, OverflowError):
        return None
