"""Formats of texts and numbers."""

from datetime import UTC, datetime, timedelta

import pytest

from app.ui.render import UNKNOWN, ago, capitalize_first, quoted, size


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("needs `operate`.", "needs <code>operate</code>."),
        ("`<b>` & <i>", "<code>&lt;b&gt;</code> &amp; &lt;i&gt;"),
        ("one ` and <b>", "one ` and &lt;b&gt;"),
        ("", ""),
    ],
)
def test_backticks_are_code_and_all_is_escaped(text: str, html: str) -> None:
    assert str(quoted(text)) == html


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, UNKNOWN), (0, "0 B"), (999, "999 B"), (200_000_000, "200 MB"), (1_234_567, "1.2 MB")],
)
def test_sizes(value: int | None, text: str) -> None:
    assert size(value) == text


def test_future_times_are_worded_as_such() -> None:
    now = datetime.now(UTC)
    assert ">in 4 min" in ago(now + timedelta(minutes=5))
    assert " ago<" in ago(now - timedelta(minutes=5))


def test_a_phrase_begins_a_sentence() -> None:
    assert [capitalize_first("not loaded by Triton"), capitalize_first("")] == [
        "Not loaded by Triton", ""
    ]  # fmt: skip
