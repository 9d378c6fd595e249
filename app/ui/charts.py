"""Plots as SVG, rendered by the server: no script, no style attribute, all text escaped.

The drawing is stretched to its place; its labels are HTML around it. Colours and dashes are those of
`static/charts.css`. Screen readers get a title, a description, and a line chart's values as a table.
"""

import hashlib
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import LiteralString, TypeGuard

from markupsafe import Markup

MAX_SERIES = 4
# The drawing's own units.
_WIDTH, _HEIGHT = 1000, 100


@dataclass(frozen=True, slots=True)
class Series:
    """Values of one quantity, one for each time; None for a gap."""

    name: str
    values: Sequence[float | None]


def line_chart(
    title: str, unit: str, times: Sequence[datetime], series: Sequence[Series]
) -> Markup:
    """One to four series from 0 up over ascending, evenly spaced times, with gaps for missing values.

    The title is unique on its page. Raises ValueError for a wrong number of series or of values.
    """
    if not 1 <= len(series) <= MAX_SERIES:
        raise ValueError(f"a chart has 1 to {MAX_SERIES} series, not {len(series)}")
    if any(len(one.values) != len(times) for one in series):
        raise ValueError("a series has a value, or None, for each time")
    known = [value for one in series for value in one.values if _is_number(value)]
    caption = Markup("<figcaption>{} <small>{}</small></figcaption>").format(title, unit)
    if not known:
        return Markup(
            '<figure class="chart">{}<p class="chart-empty">No data yet.</p></figure>'
        ).format(caption)
    ticks = nice_ticks(max(known), is_whole=all(float(value).is_integer() for value in known))
    description = "; ".join(_summary(one, unit) for one in series)
    return Markup(
        '<figure class="chart">{}<div class="chart-plot"><div class="chart-y" aria-hidden="true">{}'
        '</div><svg role="img" viewBox="0 0 {} {}" preserveAspectRatio="none"><title>{}</title>'
        '<desc>{}</desc>{}{}</svg><div class="chart-x" aria-hidden="true">{}</div></div>{}{}</figure>'
    ).format(
        caption, _spans(format_value(tick) for tick in reversed(ticks)), _WIDTH, _HEIGHT,
        f"{title}, {unit}", f"From {_time(times, 0)} to {_time(times, -1)} UTC. {description}.",
        _grid(ticks), _lines(series, ticks[-1]), _spans(_time_labels(times)),
        _legend([one.name for one in series]) if len(series) > 1 else "",
        _table(title, unit, times, series),
    )  # fmt: skip


def sparkline(title: str, values: Sequence[float | None]) -> Markup:
    known = [value for value in values if _is_number(value)]
    top = max(known, default=0) or 1
    return Markup(
        '<svg class="sparkline" role="img" viewBox="0 0 {} {}" preserveAspectRatio="none">'
        "<title>{}</title>{}</svg>"
    ).format(_WIDTH, _HEIGHT, title, _lines([Series(title, values)], top))


def stacked_bar(title: str, parts: Sequence[tuple[str, float]], unit: str) -> Markup:
    total = sum(value for _, value in parts)
    labels = [f"{name}: {format_value(value)} {unit}" for name, value in parts]
    widths = [_WIDTH * value / total if total > 0 else 0 for _, value in parts[:MAX_SERIES]]
    boxes = _each(
        '<rect class="series-{}" x="{}" y="0" width="{}" height="{}"><title>{}</title></rect>',
        (
            (place + 1, _short(sum(widths[:place])), _short(width), _HEIGHT, labels[place])
            for place, width in enumerate(widths)
        ),
    )
    return Markup(
        '<figure class="chart bar"><figcaption>{} <small>{} {}</small></figcaption><svg role="img" '
        'viewBox="0 0 {} {}" preserveAspectRatio="none"><title>{}</title><desc>{}</desc>{}</svg>{}</figure>'
    ).format(
        title, format_value(total), unit, _WIDTH, _HEIGHT, title, "; ".join(labels), boxes, _legend(labels)
    )  # fmt: skip


def nice_ticks(top: float, *, is_whole: bool = False) -> list[float]:
    """From 0 to `top` or more, in two to five steps of 1, 2 or 5 times a power of ten."""
    if top <= 0:
        return [0, 1]
    power = 10.0 ** math.floor(math.log10(top / 5))
    step = next(power * factor for factor in (1, 2, 5, 10) if top / (power * factor) <= 5.000001)
    if is_whole:
        step = max(1, step)
    return [step * place for place in range(math.ceil(top / step - 1e-9) + 1)]


def format_value(value: float) -> str:
    """A number with three significant digits, or whole."""
    if value == int(value) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _each(template: LiteralString, rows: Iterable[tuple[object, ...]]) -> Markup:
    html = Markup(template)  # noqa: S704 - a literal
    return Markup().join(html.format(*row) for row in rows)


def _is_number(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


def _short(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _grid(ticks: Sequence[float]) -> Markup:
    heights = (_HEIGHT * (1 - tick / ticks[-1]) for tick in ticks)
    return Markup('<path class="chart-grid" d="{}"/>').format(
        "".join(f"M0 {_short(height)}H{_WIDTH}" for height in heights)
    )


def _lines(series: Sequence[Series], top: float) -> Markup:
    points = [_points(one.values, top) for one in series]
    return _each(
        '<path class="series-{0}" d="{1}"/><path class="series-{0} dots" d="{2}"/>',
        ((place, _path(one), _dots(one)) for place, one in enumerate(points, 1)),
    )


def _path(points: Sequence[str | None]) -> str:
    steps = itertools.pairwise([None, *points])
    return "".join(f"{'L' if before else 'M'}{point}" for before, point in steps if point)


def _dots(points: Sequence[str | None]) -> str:
    """The points without a neighbour: lines of no length, which have round ends."""
    around = zip([None, *points], points, [*points[1:], None], strict=False)
    return "".join(
        f"M{point}h0" for before, point, after in around if point and not before and not after
    )


def _points(values: Sequence[float | None], top: float) -> list[str | None]:
    """The values' places in the drawing; None for a gap."""
    step = _WIDTH / max(len(values) - 1, 1)
    return [
        f"{_short(place * step)} {_short(_HEIGHT * (1 - min(max(value, 0), top) / top))}"
        if _is_number(value)
        else None
        for place, value in enumerate(values)
    ]


def _summary(one: Series, unit: str) -> str:
    known = [value for value in one.values if _is_number(value)]
    if not known:
        return f"{one.name}: no data"
    last, most = format_value(known[-1]), format_value(max(known))
    return f"{one.name}: last {last} {unit}, at most {most} {unit}"


def _spans(texts: Iterable[str]) -> Markup:
    return _each("<span>{}</span>", ((text,) for text in texts))


def _legend(names: Iterable[str]) -> Markup:
    items = _each(
        '<li><svg aria-hidden="true" viewBox="0 0 20 10"><path class="series-{}" d="M1 5H19"/>'
        "</svg>{}</li>",
        enumerate(names, 1),
    )
    return Markup('<ul class="chart-legend">{}</ul>').format(items)


def _time(times: Sequence[datetime], place: int) -> str:
    is_long = (times[-1] - times[0]).total_seconds() > 24 * 3600
    return times[place].astimezone(UTC).strftime("%d %b %H:%M" if is_long else "%H:%M")


def _time_labels(times: Sequence[datetime]) -> list[str]:
    count = min(len(times), 5)
    places = {round(place * (len(times) - 1) / max(count - 1, 1)) for place in range(count)}
    return [_time(times, place) for place in sorted(places)]


def _table(title: str, unit: str, times: Sequence[datetime], series: Sequence[Series]) -> Markup:
    heads = _each('<th scope="col">{}</th>', ((one.name,) for one in series))
    lines = zip(*(map(_cell, one.values) for one in series), strict=True)
    rows = _each(
        '<tr><th scope="row">{}</th>{}</tr>',
        (
            (_time(times, place), _each("<td>{}</td>", ((cell,) for cell in cells)))
            for place, cells in enumerate(lines)
        ),
    )
    return Markup(
        '<details class="chart-data" id="{}"><summary>Values</summary><div class="scroll" '
        'id="{}-scroll" role="region" tabindex="0" aria-label="{}"><table><caption>{}</caption><thead><tr>'
        '<th scope="col">Time (UTC)</th>{}</tr></thead><tbody>{}</tbody></table></div></details>'
    ).format(_key(title), _key(title), f"Values: {title}", f"{title}, {unit}", heads, rows)


def _key(title: str) -> str:
    return f"values-{hashlib.sha256(title.encode()).hexdigest()[:12]}"


def _cell(value: float | None) -> str:
    return format_value(value) if _is_number(value) else "-"
