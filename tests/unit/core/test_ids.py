"""UUIDv7: version, order, the time inside, and the lower bound of a moment."""

import time
from datetime import UTC, datetime, timedelta, timezone
from unittest import mock

import pytest

from app.core.ids import created_at, lowest_id, new_id


def test_ids_are_uuid7_and_rise() -> None:
    made = [new_id() for _ in range(10_000)]
    assert made == sorted(made)
    assert len(set(made)) == len(made)
    assert {identifier.version for identifier in made} == {7}
    assert {identifier.variant for identifier in made} == {"specified in RFC 4122"}


def test_ids_rise_within_one_millisecond_and_when_the_clock_steps_back() -> None:
    now = time.time_ns()
    with mock.patch("app.core.ids.time.time_ns", return_value=now):
        first = [new_id() for _ in range(1000)]
    with mock.patch("app.core.ids.time.time_ns", return_value=now - 10**10):
        second = [new_id() for _ in range(1000)]
    assert first + second == sorted(first + second)
    assert all(created_at(a) == created_at(first[0]) for a in second)


def test_ids_go_back_with_a_clock_that_was_set() -> None:
    now, day = time.time_ns(), 86_400 * 10**9
    with mock.patch("app.core.ids.time.time_ns", return_value=now + day):
        ahead = [new_id() for _ in range(1000)]
    with mock.patch("app.core.ids.time.time_ns", return_value=now):
        after = [new_id() for _ in range(1000)]
    assert ahead == sorted(ahead)
    assert after == sorted(after)
    assert {int(created_at(one).timestamp() * 1000) for one in after} == {now // 1_000_000}
    assert len({*ahead, *after}) == 2000


def test_the_time_inside() -> None:
    before = datetime.now(UTC)
    moment = created_at(new_id())
    assert before - timedelta(milliseconds=1) <= moment <= datetime.now(UTC)
    assert moment.tzinfo is UTC


def test_ids_cannot_be_guessed_from_one_another() -> None:
    steps = {b.int - a.int for a, b in [(new_id(), new_id()) for _ in range(100)]}
    assert len(steps) > 90


def test_the_lowest_id_of_a_moment_bounds_its_ids() -> None:
    identifier = new_id()
    moment = created_at(identifier)
    assert lowest_id(moment) <= identifier < lowest_id(moment + timedelta(milliseconds=1))
    assert created_at(lowest_id(moment)) == moment


@pytest.mark.parametrize(
    "moment",
    [
        datetime.min,  # noqa: DTZ901 - a client may send a time without a zone
        datetime.max,  # noqa: DTZ901
        datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=14))),
        datetime(9999, 12, 31, 23, 59, tzinfo=timezone(timedelta(hours=-14))),
        datetime(1969, 12, 31, tzinfo=UTC),
    ],
)
def test_the_lowest_id_of_any_moment(moment: datetime) -> None:
    assert lowest_id(moment).version == 7


def test_a_moment_without_a_zone_is_utc() -> None:
    naive = datetime(2026, 1, 1)  # noqa: DTZ001 - on purpose
    assert lowest_id(naive) == lowest_id(naive.replace(tzinfo=UTC))
