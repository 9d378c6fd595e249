"""Report of a goal: figures, verdicts, and their tables."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import orjson

from bench import plots
from bench.plots import Plot

RESULTS = Path(__file__).parent / "results"
DOCUMENT = Path(__file__).parents[1] / "docs" / "benchmarks.md"
IMAGES = "images/bench"  # beside the document


@dataclass(slots=True, frozen=True)
class Options:
    """Length of the measurement: `rounds` of every arm in turn, `seconds` each."""

    rounds: int
    seconds: float
    rows: int  # of P7's table
    corpus: int = 50_000_000  # bytes that the index of `ngram` is built of


@dataclass(slots=True, frozen=True)
class Check:
    """One part of a goal: the figure found, and its bound."""

    what: str
    found: float
    relation: str  # "<=" or ">="
    bound: float
    unit: str = ""

    @property
    def is_met(self) -> bool:
        return self.found <= self.bound if self.relation == "<=" else self.found >= self.bound


@dataclass(slots=True)
class Report:
    """One goal: its figures by arm, its checks, and the raw numbers."""

    goal: str
    title: str
    columns: Sequence[str]
    rows: list[tuple[str, Sequence[float | None]]] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    raw: dict[str, object] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # findings outside the columns, printed below
    plots: list[Plot] = field(default_factory=list)
    method: str = ""
    seconds: float = 0.0  # that it took in all

    def check(self, what: str, found: float, relation: str, bound: float, unit: str = "") -> None:
        """Add a verdict."""
        self.checks.append(Check(what, found, relation, bound, unit))

    def to_markdown(self) -> str:
        """Two tables, figures and verdicts; and notes."""
        lines = [_line(["", *self.columns]), _line(["---", *["---:"] * len(self.columns)])]
        lines += [_line([arm, *(_number(value) for value in values)]) for arm, values in self.rows]
        lines += ["", _line(["check", "found", "goal", ""]), _line(["---", "---:", "---:", "---"])]
        lines += [
            _line(
                [
                    check.what,
                    f"{_number(check.found)} {check.unit}".strip(),
                    f"{check.relation} {_number(check.bound)} {check.unit}".strip(),
                    "met" if check.is_met else "**missed**",
                ]
            )
            for check in self.checks
        ]
        if self.notes:
            lines += ["", *(f"- {note}" for note in self.notes)]
        return "\n".join(lines)


def median_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """The median over rounds of the ratio within each round: slow drifts cancel."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def medians(rows: Sequence[Sequence[float | None]]) -> list[float | None]:
    """Column by column over the rounds; a column without values stays empty."""
    columns = (
        [value for value in column if value is not None] for column in zip(*rows, strict=True)
    )
    return [statistics.median(column) if column else None for column in columns]


def save(reports: Sequence[Report], machine: Mapping[str, object], options: Options) -> Path:
    """Write everything as JSON into bench/results/, the plots beside it; the JSON's file."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}.json"
    content = {
        "machine": machine,
        "options": asdict(options),
        "goals": [
            asdict(report) | {"met": all(check.is_met for check in report.checks)}
            for report in reports
        ],
    }
    path.write_bytes(orjson.dumps(content, option=orjson.OPT_INDENT_2))
    for report in reports:
        plots.write(report.plots, f"{path.stem}-{report.goal.lower()}", RESULTS)
    return path


def record(reports: Sequence[Report], machine: Mapping[str, object], options: Options) -> None:
    """Put tables and plots into docs/benchmarks.md, each between the marks of its goal."""
    text = DOCUMENT.read_text()
    for report in reports:
        setting = (
            f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, revision {machine['revision']}, "
            f"{machine['cores']} cores ({machine['cpu']}), others used "
            f"{machine['other_load']} cores, fdatasync {machine['fdatasync_ms']} ms; "
            f"PostgreSQL {machine['postgresql']}, Python {machine['python']}; "
            f"{options.rounds} rounds of {options.seconds:g} s an arm, {report.seconds / 60:.1f} "
            "minutes in all."
        )
        begin, end = f"<!-- {report.goal} -->", f"<!-- end {report.goal} -->"
        before, _, rest = text.partition(begin)
        _, is_there, after = rest.partition(end)
        if not is_there:
            raise RuntimeError(f"{DOCUMENT.name} has no marks of {report.goal}")
        section = "\n\n".join([setting, report.to_markdown(), *_draw(report)])
        text = f"{before}{begin}\n{section}\n{end}{after}"
    DOCUMENT.write_text(text)


def _draw(report: Report) -> list[str]:
    """Plots of a goal into the images of the document, in place of its former ones; their Markdown."""
    directory = DOCUMENT.parent / IMAGES
    prefix = report.goal.lower()
    for former in directory.glob(f"{prefix}-*.svg"):
        former.unlink()
    drawn = plots.write(report.plots, prefix, directory)
    return [
        f"![{plot.text}]({IMAGES}/{path.name})"
        for plot, path in zip(report.plots, drawn, strict=True)
    ]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _number(value: float | None) -> str:
    if value is None:
        return ""
    if value == int(value) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.3g}"
