"""HTML of records, for notebooks."""

import html
from collections.abc import Iterable, Sequence

_CELL = "text-align:left;vertical-align:top"
_TEXT = "white-space:pre-wrap;text-align:left;margin:0;max-height:24em;overflow:auto"
_COLOURS = {"completed": "#1a7f37", "ended": "#1a7f37", "failed": "#cf222e"}


def table(rows: Iterable[tuple[str, object]]) -> str:
    """Names and values as HTML; values that are None are left out."""
    return columns((name, [value]) for name, value in rows)


def columns(rows: Iterable[tuple[str, Sequence[object]]]) -> str:
    """Names, and the value of each column as HTML; rows whose values are all None are left out."""
    lines = "".join(
        f"<tr><th style='{_CELL}'>{html.escape(name)}</th>{''.join(map(_cell, values))}</tr>"
        for name, values in rows
        if any(value is not None for value in values)
    )
    return f"<table>{lines}</table>"


def _cell(value: object) -> str:
    return f"<td style='{_CELL}'>{'' if value is None else value}</td>"


def text(value: str) -> str:
    """A text as it is, with its spaces and line ends."""
    return f"<pre style='{_TEXT}'>{html.escape(value)}</pre>"


def state(value: str) -> str:
    """A state in its colour."""
    return f"<b style='color:{_COLOURS.get(value, '#9a6700')}'>{html.escape(value)}</b>"


def duration(seconds: float) -> str:
    """A duration as hours, minutes and seconds: 1:02:03, or 2:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def bar(done: int, failed: int, total: int | None) -> str:
    """A bar of the rows that have ended."""
    share = 100 * done / total if total else 0
    label = f"{done:,} of {total:,}" if total else f"{done:,}"
    note = f", {failed:,} failed" if failed else ""
    return (
        "<div style='background:#d0d7de;width:20em;height:.6em'>"
        f"<div style='background:#1a7f37;width:{share:.1f}%;height:100%'></div></div>{label}{note}"
    )
