"""Plots: their lines, their alternative texts, and hostile labels."""

import math
import re
from datetime import UTC, datetime, timedelta
from xml.etree import ElementTree

import pytest

from app.ui.charts import (
    Series,
    format_value,
    line_chart,
    nice_ticks,
    sparkline,
    stacked_bar,
)

START = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
EVIL = "<script>alert(1)</script>\"'&--><img src=x onerror=alert(1)>"


ALLOWED = {
    "figure", "figcaption", "small", "div", "span", "svg", "title", "desc", "path", "rect", "ul", "li",
    "p", "details", "summary", "table", "caption", "thead", "tbody", "tr", "th", "td",
}  # fmt: skip


def tree_of(text: str) -> ElementTree.Element:
    """The SVG as a tree: it is well formed."""
    return ElementTree.fromstring(text)  # noqa: S314


def times(count: int, minutes: float = 1) -> list[datetime]:
    return [START + timedelta(minutes=minutes * place) for place in range(count)]


def chart(*series: Series, count: int | None = None) -> str:
    return str(line_chart("Depth", "results", times(count or len(series[0].values)), series))


def paths(svg: str, place: int | str = 1) -> str:
    found = re.search(rf'class="series-{place}" d="([^"]*)"', svg)
    assert found
    return found[1]


def test_a_line_goes_from_zero_up_to_the_last_tick() -> None:
    text = chart(Series("queued", [0, 5, 10]))
    assert paths(text) == "M0 100L500 50L1000 0"
    assert re.findall(r"<span>([^<]*)</span>", text) == [
        "10", "8", "6", "4", "2", "0", "12:00", "12:01", "12:02",
    ]  # fmt: skip


def test_a_value_that_is_missing_is_a_gap_and_one_alone_a_point() -> None:
    text = chart(Series("a", [1, None, 1, 1, None, math.nan, 1]))
    assert paths(text) == "M0 0M333.33 0L500 0M1000 0"
    assert paths(text, "1 dots") == "M0 0h0M1000 0h0"


def test_what_is_drawn_is_reported_in_words_and_numbers() -> None:
    text = chart(Series("queued", [3, None, 1234]), Series("running", [None, None, None]))
    root = tree_of(text)
    svg = root.find(".//svg[@role='img']")
    assert svg is not None
    assert svg.findtext("title") == "Depth, results"
    assert svg.findtext("desc") == (
        "From 12:00 to 12:02 UTC. queued: last 1,234 results, at most 1,234 results; "
        "running: no data."
    )
    cells = [[cell.text for cell in row] for row in root.findall(".//tbody/tr")]
    assert cells == [["12:00", "3", "-"], ["12:01", "-", "-"], ["12:02", "1,234", "-"]]
    assert [item[0].tail for item in root.findall(".//ul/li")] == ["queued", "running"]


def test_no_data_is_reported() -> None:
    text = chart(Series("queued", [None, math.inf]))
    assert "No data yet." in text
    assert "<svg" not in text
    assert "No data yet." in chart(Series("queued", []))


def test_what_cannot_be_drawn() -> None:
    with pytest.raises(ValueError, match="1 to 4 series"):
        line_chart("a", "b", [], [])
    with pytest.raises(ValueError, match="1 to 4 series"):
        line_chart("a", "b", [], [Series("a", [])] * 5)
    with pytest.raises(ValueError, match="for each time"):
        line_chart("a", "b", times(2), [Series("a", [1])])


def test_more_than_a_day_has_dates() -> None:
    text = str(line_chart("a", "b", times(3, 1440), [Series("a", [1, 2, 3])]))
    assert "<span>01 Mar 12:00</span>" in text
    assert "<span>03 Mar 12:00</span>" in text


@pytest.mark.parametrize(
    ("top", "is_whole", "ticks"),
    [
        (0, False, [0, 1]), (1, True, [0, 1]), (3, True, [0, 1, 2, 3]),
        (7, True, [0, 2, 4, 6, 8]), (1, False, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (99, False, [0, 20, 40, 60, 80, 100]), (100, False, [0, 20, 40, 60, 80, 100]),
        (101, False, [0, 50, 100, 150]), (0.003, False, [0, 0.001, 0.002, 0.003]),
    ],
)  # fmt: skip
def test_ticks(top: float, is_whole: bool, ticks: list[float]) -> None:
    assert nice_ticks(top, is_whole=is_whole) == pytest.approx(ticks)


def test_ticks_of_any_size_are_few_and_reach_the_top() -> None:
    for place in range(1, 400):
        top = 1.17**place / 1e9
        ticks = nice_ticks(top)
        assert 3 <= len(ticks) <= 6
        assert ticks[-1] >= top * 0.999999
        assert ticks[-2] < top


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (3.0, "3"), (3.14159, "3.14"), (0.01234, "0.0123"), (1234.5, "1,234"), (2e9, "2,000,000,000")],
)  # fmt: skip
def test_values(value: float, text: str) -> None:
    assert format_value(value) == text


def test_a_bar_has_parts_as_wide_as_their_share() -> None:
    text = str(stacked_bar("Timings", [("queued", 1.0), ("prefill", 0), ("decode", 3)], "s"))
    assert re.findall(r'x="([\d.]+)" y="0" width="([\d.]+)"', text) == [
        ("0", "250"), ("250", "0"), ("250", "750"),
    ]  # fmt: skip
    assert "queued: 1 s; prefill: 0 s; decode: 3 s" in text
    assert "nan" not in str(stacked_bar("Timings", [("queued", 0)], "s"))


def test_a_sparkline() -> None:
    text = str(sparkline("Tokens per second, now 3", [1, None, 3]))
    assert "<title>Tokens per second, now 3</title>" in text
    assert paths(text, "1 dots") == "M0 66.67h0M1000 0h0"
    assert paths(str(sparkline("nothing", []))) == ""


@pytest.mark.parametrize("count", [0, 1, 2])
def test_labels_do_no_harm(count: int) -> None:
    for text in (
        str(line_chart(EVIL, EVIL, times(count), [Series(EVIL, [1] * count)] * 2)),
        str(sparkline(EVIL, [1] * count)),
        str(stacked_bar(EVIL, [(EVIL, 1)] * count, EVIL)),
    ):
        for element in tree_of(text).iter():
            assert element.tag in ALLOWED
            assert not {name for name in element.attrib if name == "style" or name[:2] == "on"}
