"""Rests of retention: short only behind a backlog on a server that is not busy."""

import pytest

from app.results.retention.pacing import Pacing

ROWS = 200
TOOK = 0.01


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, to be changed by the test."""
    now = [1000.0]
    monkeypatch.setattr("app.results.retention.pacing.time.monotonic", lambda: now[0])
    return now


def test_a_short_pass_works_a_fifth_of_the_time(clock: list[float]) -> None:
    pace = Pacing()
    clock[0] += 4.9
    assert pace.rest(TOOK, ROWS) == pytest.approx(4 * TOOK)


def test_a_pass_with_a_backlog_works_four_fifths_of_the_time(clock: list[float]) -> None:
    pace = Pacing()
    clock[0] += 5.1
    assert pace.rest(TOOK, ROWS) == pytest.approx(TOOK / 4)
    pace.begin()
    assert pace.rest(TOOK, ROWS) == pytest.approx(4 * TOOK)


def test_a_busy_server_gets_the_long_rest(clock: list[float]) -> None:
    pace = Pacing()
    clock[0] += 60
    assert pace.rest(TOOK, ROWS) == pytest.approx(TOOK / 4)
    assert pace.rest(3 * TOOK, ROWS) == pytest.approx(12 * TOOK)
    assert pace.rest(1.5 * TOOK, ROWS) == pytest.approx(1.5 * TOOK / 4)


def test_a_server_that_became_slower_for_good_is_not_busy_for_ever(clock: list[float]) -> None:
    pace = Pacing()
    clock[0] += 60
    pace.rest(TOOK, ROWS)
    rests = [pace.rest(3 * TOOK, ROWS) for _ in range(100)]
    assert rests[0] == pytest.approx(12 * TOOK)
    assert rests[-1] == pytest.approx(3 * TOOK / 4)


@pytest.mark.parametrize("rows", [0, 1, 49])
def test_steps_of_few_rows_say_nothing_about_the_server(clock: list[float], rows: int) -> None:
    pace = Pacing()
    clock[0] += 60
    assert pace.rest(TOOK, rows) == pytest.approx(4 * TOOK)
    assert pace.rest(TOOK, ROWS) == pytest.approx(TOOK / 4)


def test_a_pass_that_works_all_the_time_never_rests(clock: list[float]) -> None:
    pace = Pacing(1.0)
    for seconds in (0, 60):
        clock[0] += seconds
        assert pace.rest(TOOK, ROWS) == 0
        assert pace.rest(9 * TOOK, ROWS) == 0
