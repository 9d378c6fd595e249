"""Filters of the history as addresses, as the API's parameters, and as people read them."""

import pytest

from app.ui.errors import FormError
from app.ui.history_filters import (
    address,
    newer,
    older,
    read_filters,
    to_chips,
    to_form,
    to_params,
)


def test_times_without_a_zone_are_of_utc() -> None:
    filters = read_filters(
        {"created_after": "2026-11-22T08:30", "created_before": "2026-11-22T08:30:01+02:00"}
    )
    assert to_params(filters) == {
        "created_after": "2026-11-22T08:30:00+00:00",
        "created_before": "2026-11-22T06:30:01+00:00",
    }
    form = to_form(filters)
    assert (form["created_after"], form["created_before"]) == (
        "2026-11-22T08:30",
        "2026-11-22T06:30:01",
    )


@pytest.mark.parametrize("text", ["yesterday", "2026-13-01", "0001-01-01T00:00+23:00", "\x00"])
def test_what_is_no_time_is_reported(text: str) -> None:
    with pytest.raises(FormError) as caught:
        to_params(read_filters({"created_after": text, "q": "x"}))
    assert [name for name, _ in caught.value.fields] == ["created_after"]
    assert to_form({"created_after": text})["created_after"] == text


def test_a_pair_of_metadata() -> None:
    filters = read_filters({"metadata": "run = a=b", "state": "failed"})
    assert to_params(filters) == {"metadata[run]": "a=b", "state": "failed"}
    assert [(chip.label, chip.value) for chip in to_chips(filters)] == [
        ("State", "failed"),
        ("Metadata", "run = a=b"),
    ]
    for text in ("run", "=x"):
        with pytest.raises(FormError) as caught:
            to_params(read_filters({"metadata": text}))
        assert [name for name, _ in caught.value.fields] == ["metadata"]


def test_each_chip_leaves_its_own_filter_out() -> None:
    filters = read_filters({"q": 'a&b "c"', "state": " failed ", "model_name": "", "other": "1"})
    assert filters == {"q": 'a&b "c"', "state": "failed"}
    words, state = to_chips(filters)
    assert words.without == "/history?state=failed"
    assert state.without == "/history?q=a%26b+%22c%22"


def test_the_way_back_is_the_way_there() -> None:
    filters = {"state": "failed"}
    trail, after, pages = "", "", []
    for last in ("id-1", "id-2", "id-3"):
        pages.append(address(filters, after=after, trail=trail))
        following = older(filters, trail, after, last)
        trail, after = following.split("trail=")[1], last
    for page in reversed(pages):
        back = newer(filters, trail)
        assert back == page
        trail = back.split("trail=")[1] if "trail=" in back else ""


def test_a_trail_stays_short_and_its_end_is_the_newest_page() -> None:
    trail = ".".join(f"id-{number}" for number in range(1000))
    assert len(older({}, trail, "x" * 36, "y" * 36)) < 1000
    assert newer({}, "") == "/history"
