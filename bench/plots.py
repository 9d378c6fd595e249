"""Plots of what a goal found, as SVG files that stand alone: the same data gives the same bytes.

    python -m bench.plots bench/results/TIME.json [DIRECTORY]

draws the plots of a run again, beside its raw numbers or elsewhere.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import orjson
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

# Okabe and Ito's palette, whose colors differ for every kind of sight; markers differ too.
_COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00"]
_MARKERS = ["o", "s", "^", "D", "v", "P"]
_OURS, _OTHERS, _GOAL = "#0072B2", "#A0A0A0", "#222222"
_STYLE: dict[Any, Any] = {  # its keys' type is a list of all their names
    "svg.fonttype": "none",  # text stays text: small files
    "svg.hashsalt": "bench",  # ids that do not change from run to run
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#DDDDDD",
    "legend.frameon": False,
}
_PAPER = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # so that no line crosses a number
_WIDTH = 8.0  # inches, of 72 points


@dataclass(slots=True, frozen=True)
class Goal:
    """A line that the values are compared with."""

    value: float
    text: str


@dataclass(slots=True, frozen=True)
class Series:
    """One line of a plot: its points from left to right."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


@dataclass(slots=True, frozen=True)
class Lines:
    """Growth of one value with another. `name` becomes part of the file's; labels have units."""

    name: str
    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    goal: Goal | None = None
    is_log: bool = False  # of the x axis

    @property
    def text(self) -> str:
        """The plot's alternative text."""
        ends = (
            f"{one.name}: {_number(one.y[0])} at {_number(one.x[0])}, "
            f"{_number(one.y[-1])} at {_number(one.x[-1])}"
            for one in self.series
        )
        return _described(f"{self.title}; {self.y_label} by {self.x_label}", ends, self.goal)


@dataclass(slots=True, frozen=True)
class Bar:
    """One bar: a measured value, or one that it is compared with."""

    label: str
    value: float
    is_ours: bool = True


@dataclass(slots=True, frozen=True)
class Bars:
    """Values side by side, from top to bottom."""

    name: str
    title: str
    x_label: str
    bars: Sequence[Bar]
    goal: Goal | None = None

    @property
    def text(self) -> str:
        """The plot's alternative text."""
        values = (f"{bar.label}: {_number(bar.value)}" for bar in self.bars)
        return _described(f"{self.title}; {self.x_label}", values, self.goal)


Plot = Lines | Bars


def write(plots: Sequence[Plot], prefix: str, directory: Path) -> list[Path]:
    """Draw each plot into a file of its own; their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    return [_write(plot, directory / f"{prefix}-{plot.name}.svg") for plot in plots]


def _write(plot: Plot, path: Path) -> Path:
    with mpl.rc_context(_STYLE):
        height = 4.4 if isinstance(plot, Lines) else 1.4 + 0.36 * len(plot.bars)
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        axes = figure.add_subplot()
        axes.set_title(plot.title)
        axes.set_xlabel(plot.x_label)
        if isinstance(plot, Lines):
            _draw_lines(axes, plot)
        else:
            _draw_bars(axes, plot)
        if isinstance(plot, Lines) or plot.goal:
            figure.legend(loc="outside lower center", ncols=3)
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
    # Some lines end in blanks.
    path.write_text("".join(f"{line.rstrip()}\n" for line in path.read_text().splitlines()))
    return path


def _draw_lines(axes: Axes, plot: Lines) -> None:
    for place, one in enumerate(plot.series):
        axes.plot(
            one.x,
            one.y,
            label=one.name,
            color=_COLORS[place % len(_COLORS)],
            marker=_MARKERS[place % len(_MARKERS)],
        )
    if plot.is_log:
        axes.set_xscale("log")
    else:
        axes.set_xticks(sorted({x for one in plot.series for x in one.x}))
    axes.xaxis.set_major_formatter(FuncFormatter(_tick))
    axes.yaxis.set_major_formatter(FuncFormatter(_tick))
    axes.set_ylabel(plot.y_label)
    if plot.goal:
        axes.axhline(plot.goal.value, color=_GOAL, linestyle="--", label=plot.goal.text)
    axes.set_ylim(bottom=0)


def _draw_bars(axes: Axes, plot: Bars) -> None:
    places = range(len(plot.bars))
    drawn = axes.barh(
        places,
        [bar.value for bar in plot.bars],
        color=[_OURS if bar.is_ours else _OTHERS for bar in plot.bars],
    )
    axes.set_yticks(places, [bar.label for bar in plot.bars])
    axes.bar_label(drawn, [_number(bar.value) for bar in plot.bars], padding=4, bbox=_PAPER)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.12)
    axes.xaxis.set_major_formatter(FuncFormatter(_tick))
    if plot.goal:
        axes.axvline(plot.goal.value, color=_GOAL, linestyle="--", label=plot.goal.text)


def _described(title: str, values: Iterator[str], goal: Goal | None) -> str:
    members = [*values, *([f"{goal.text}: {_number(goal.value)}"] if goal else [])]
    return f"{title}. {'; '.join(members)}."


def _tick(value: float, _: float) -> str:
    return _number(value)


def _number(value: float) -> str:
    if value == int(value) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _load(content: Mapping[str, Any]) -> Plot:
    """A plot as it stands in the raw numbers."""
    members = dict(content)
    members["goal"] = Goal(**members["goal"]) if members["goal"] else None
    if "bars" in members:
        return Bars(**members | {"bars": [Bar(**bar) for bar in members["bars"]]})
    return Lines(**members | {"series": [Series(**one) for one in members["series"]]})


def main(results: Path, directory: Path) -> None:
    """Draw again what a run saved."""
    for goal in orjson.loads(results.read_bytes())["goals"]:
        prefix = f"{results.stem}-{goal['goal'].lower()}"
        for path in write([_load(plot) for plot in goal["plots"]], prefix, directory):
            print(path)


if __name__ == "__main__":
    file = Path(sys.argv[1])
    main(file, Path(sys.argv[2]) if len(sys.argv) > 2 else file.parent)
