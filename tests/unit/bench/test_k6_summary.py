"""The figures that the benchmarks read from summaries of k6; k6 1.1.0 wrote those of this test.

Only their `root_group` was left out: its hashes look like secrets to those who search for them.
"""

from pathlib import Path

import pytest

from bench.virtual_users import COLUMNS, Summary

_SUMMARIES = Path(__file__).with_name("k6_summaries")


def test_only_right_answers_count() -> None:
    # A server that answered 34 requests: 3 with status 500, 4 with a wrong text.
    summary = Summary.read((_SUMMARIES / "some_failed.json").read_bytes(), cpu=0.27)
    assert (summary.answers, summary.failed, summary.failed_requests) == (27, 7, 3)
    assert summary.milliseconds == pytest.approx(
        (62.338, 22.424, 63.703, 66.230, 63.889, 65.315), abs=1e-3
    )
    assert summary.rate == pytest.approx(32.2374 * 27 / 34, abs=1e-3)
    assert summary.cpu / summary.answers == pytest.approx(0.01)
    assert len(summary.figures) == len(COLUMNS)
    assert summary.figures[-1] == summary.rate


def test_no_right_answer_is_an_error() -> None:
    # Nothing listened.
    with pytest.raises(RuntimeError, match="not one right answer"):
        Summary.read((_SUMMARIES / "none_answered.json").read_bytes())
