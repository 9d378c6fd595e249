"""Wrong tokens by address: how many, how they come back, what is counted together."""

import logging

import pytest

from app.auth import failed_attempts
from app.auth.failed_attempts import FailedAttempts, site_of


def tries(counter: FailedAttempts, address: str, numbers: range, now: float) -> list[float | None]:
    return [counter.count(address, f"{number}".encode(), now) for number in numbers]


def test_a_minutes_worth_then_one_at_a_time() -> None:
    counter = FailedAttempts(60)  # one comes back each second
    assert tries(counter, "192.0.2.1", range(60), 0) == [None] * 60
    assert tries(counter, "192.0.2.1", range(60, 62), 0) == [1.0, 1.0]
    assert tries(counter, "192.0.2.1", range(62, 63), 0.5) == [0.5]
    assert tries(counter, "192.0.2.1", range(63, 65), 1) == [None, 1.0]
    assert tries(counter, "192.0.2.2", range(60), 1) == [None] * 60
    assert tries(counter, "192.0.2.1", range(100, 161), 1000) == [None] * 60 + [1.0]


def test_the_same_token_is_one_failure_a_minute() -> None:
    counter = FailedAttempts(2)
    assert [counter.count("192.0.2.1", b"same", now) for now in range(50)] == [None] * 50
    assert counter.count("192.0.2.1", b"other", 50) is None
    # The first was forgotten after its minute, and by then both tries had come back.
    assert [counter.count("192.0.2.1", b"same", 61 + now) for now in range(50)] == [None] * 50


def test_a_token_counts_again_after_its_minute() -> None:
    counter = FailedAttempts(1)
    assert counter.count("192.0.2.1", b"same", 0) is None
    assert counter.count("192.0.2.1", b"same", 60) is None
    assert counter.count("192.0.2.1", b"other", 60) == 60.0


def test_without_a_limit_nothing_is_counted() -> None:
    assert tries(FailedAttempts(0), "192.0.2.1", range(1000), 0) == [None] * 1000


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failed_attempts, "_MAX_ADDRESSES", 3)
    counter = FailedAttempts(1)
    assert tries(counter, "198.51.100.1", range(1), 0) == [None]
    for address in range(10):
        assert tries(counter, f"192.0.2.{address}", range(1), 0) == [None]
        # An address that goes on is not evicted.
        assert tries(counter, "198.51.100.1", range(1, 2), 0) == [60.0]
    assert len(counter._buckets) == 3


def test_the_log_names_an_address_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    counter = FailedAttempts(1)
    with caplog.at_level(logging.WARNING):
        for second in range(100):
            counter.count("192.0.2.1", f"{second}".encode(), second / 2)
    assert len(caplog.records) == 1
    assert "192.0.2.1" in caplog.text


def test_the_log_names_an_address_again_after_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    counter = FailedAttempts(1)
    for number, second in enumerate((0, 0, 59, 60, 60)):
        counter.count("192.0.2.1", f"{number}".encode(), second)
    assert len(caplog.records) == 2


def test_one_subscriber_is_one_site() -> None:
    assert site_of("192.0.2.1") == site_of("::ffff:192.0.2.1") == "192.0.2.1"
    assert site_of("2001:db8:1:2::1") == site_of("2001:db8:1:2:ffff::9")
    assert site_of("2001:db8:1:2::1") != site_of("2001:db8:1:3::1")
    assert site_of("") == ""
    assert len(site_of("x" * 1000)) == 64
