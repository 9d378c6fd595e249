"""The output of the benchmarks: tables and plots between the marks of the document."""

import re
from pathlib import Path
from xml.etree import ElementTree as ET

import orjson
import pytest

from bench import plots, report
from bench.__main__ import _GOALS
from bench.plots import Bar, Bars, Goal, Lines, Series
from bench.report import Options, Report

MACHINE = {
    "revision": "abc", "cores": 2, "cpu": "a CPU", "other_load": 0.1, "fdatasync_ms": 0.2,
    "postgresql": "18.4", "python": "3.11",
}  # fmt: skip
OPTIONS = Options(rounds=2, seconds=1.0, rows=10)
DOCUMENT = "# B\n\nbefore\n\n<!-- P1 -->\nold\n<!-- end P1 -->\n\nafter\n"
BARS = Bars(
    "cpu", "CPU of a server", "us of CPU per request",
    [Bar("ours", 114.1), Bar("theirs <&> more", 77.2, is_ours=False)], Goal(128.7, "at most"),
)  # fmt: skip
LINES = Lines(
    "growth", "Cost as it grows", "how many", "us of CPU per result",
    [Series("rows", [1e3, 1e6], [997, 995]), Series("waiters", [1, 2_000], [1_404, 1_485])],
    is_log=True,
)  # fmt: skip


def make_report(*drawn: plots.Plot) -> Report:
    made = Report("P1", "a goal", ["us"], [("ours", [114.1])], plots=list(drawn), seconds=120)
    made.check("CPU", 114.1, "<=", 128.7, "us")
    return made


@pytest.fixture
def document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "benchmarks.md"
    path.write_text(DOCUMENT)
    monkeypatch.setattr(report, "DOCUMENT", path)
    return path


def test_a_record_replaces_what_is_between_the_marks_of_its_goal(document: Path) -> None:
    report.record([make_report()], MACHINE, OPTIONS)
    text = document.read_text()
    assert text.startswith("# B\n\nbefore\n\n<!-- P1 -->\n")
    assert text.endswith("\n<!-- end P1 -->\n\nafter\n")
    assert "old" not in text
    assert "2 rounds of 1 s an arm, 2.0 minutes in all." in text
    assert "| ours | 114.1 |" in text
    assert "| CPU | 114.1 us | <= 128.7 us | met |" in text


def test_a_goal_without_marks_is_reported(document: Path) -> None:
    with pytest.raises(RuntimeError, match="no marks of P2"):
        report.record([Report("P2", "another", [])], MACHINE, OPTIONS)
    assert document.read_text() == DOCUMENT


def test_a_record_embeds_its_plots_and_drops_those_of_former_ones(document: Path) -> None:
    images = document.parent / "images" / "bench"
    report.record([make_report(BARS, LINES)], MACHINE, OPTIONS)
    embedded = re.findall(r"^!\[(.+)\]\((.+)\)$", document.read_text(), re.MULTILINE)
    assert [path for _, path in embedded] == [
        "images/bench/p1-cpu.svg",
        "images/bench/p1-growth.svg",
    ]
    assert "ours: 114" in embedded[0][0]
    assert "rows: 997 at 1,000, 995 at 1,000,000" in embedded[1][0]
    (images / "p10-load.svg").touch()
    report.record([make_report(LINES)], MACHINE, OPTIONS)
    assert sorted(path.name for path in images.iterdir()) == ["p1-growth.svg", "p10-load.svg"]


def test_saved_numbers_have_their_plots_beside_them_and_can_be_drawn_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path / "results")
    saved = report.save([make_report(BARS, LINES)], MACHINE, OPTIONS)
    assert orjson.loads(saved.read_bytes())["goals"][0]["met"]
    drawn = sorted(saved.parent.glob("*.svg"))
    assert [path.name for path in drawn] == [
        f"{saved.stem}-p1-cpu.svg",
        f"{saved.stem}-p1-growth.svg",
    ]
    plots.main(saved, tmp_path / "again")
    for path in drawn:
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("plot", [BARS, LINES], ids=["bars", "lines"])
def test_a_plot_is_small_the_same_each_time_and_of_this_text(
    plot: plots.Plot, tmp_path: Path
) -> None:
    (first,) = plots.write([plot], "p1", tmp_path / "first")
    (second,) = plots.write([plot], "p1", tmp_path / "second")
    assert first.read_bytes() == second.read_bytes()
    assert first.stat().st_size < 40_000
    texts = {node.text for node in ET.parse(first).iter("{http://www.w3.org/2000/svg}text")}  # noqa: S314
    assert {plot.title, plot.x_label} <= texts
    assert "\n" not in plot.text
    assert "]" not in plot.text


def test_every_goal_has_its_marks_in_the_document() -> None:
    text = report.DOCUMENT.read_text().upper()
    for goal in _GOALS:
        name = goal.upper()
        assert f"<!-- {name} -->" in text, f"{report.DOCUMENT.name} has no place for {name}"
        assert f"<!-- END {name} -->" in text
