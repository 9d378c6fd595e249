"""The mean of finished results per second: nothing at first, then soon true, and true after changes."""

import pytest

from app.worker.throughput import Throughput


class Clock:
    """A clock that the test advances."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def run(
    throughput: Throughput, clock: Clock, beats: int, results: int, seconds: float = 3.0
) -> float:
    """So many beats with work, each of which finished so many results; the rate after them."""
    rate = 0.0
    for _ in range(beats):
        for _ in range(results):
            throughput.count("m")
        clock.now += seconds
        rate = throughput.beat(["m"])["m"]
    return rate


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def throughput(clock: Clock) -> Throughput:
    return Throughput(clock)


def test_nothing_is_known_before_there_was_work(throughput: Throughput) -> None:
    assert throughput.beat([]) == {}


def test_the_first_beat_reports_its_own_rate(throughput: Throughput, clock: Clock) -> None:
    assert run(throughput, clock, 1, 12) == pytest.approx(4.0)
    assert run(throughput, clock, 5, 12) == pytest.approx(4.0)


def test_a_slow_model_has_a_rate_between_its_results(throughput: Throughput, clock: Clock) -> None:
    rates = [run(throughput, clock, 1, int(beat % 10 == 9)) for beat in range(40)]
    assert rates[:9] == [0.0] * 9
    assert all(0.01 < rate < 0.08 for rate in rates[20:])  # one result in thirty seconds


def test_a_change_is_noticed_within_a_minute(throughput: Throughput, clock: Clock) -> None:
    assert run(throughput, clock, 40, 30) == pytest.approx(10.0)
    assert run(throughput, clock, 20, 3) < 3.0
    assert run(throughput, clock, 60, 3) == pytest.approx(1.0, rel=0.1)


def test_idle_time_does_not_slow_a_model_down(throughput: Throughput, clock: Clock) -> None:
    run(throughput, clock, 3, 12)
    for _ in range(100):
        clock.now += 3.0
        assert throughput.beat([])["m"] == pytest.approx(4.0)


def test_models_are_counted_apart(throughput: Throughput, clock: Clock) -> None:
    throughput.count("fast")
    throughput.count("fast")
    clock.now += 2.0
    assert throughput.beat(["fast", "slow"]) == {"fast": 1.0, "slow": 0.0}


def test_two_beats_at_one_moment(throughput: Throughput, clock: Clock) -> None:
    run(throughput, clock, 2, 12)
    assert throughput.beat(["m"])["m"] == pytest.approx(4.0, rel=0.01)
