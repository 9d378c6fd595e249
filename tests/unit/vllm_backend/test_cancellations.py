"""Cancellations that come before their requests, or after their end."""

import pytest

from tests.conftest import ROOT
from tests.unit.vllm_backend.modules import load

module = load("cancellations")
KEPT = module._KEPT_SECONDS


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_cancellation_ends_the_request_that_it_names_once() -> None:
    cancellations = module.Cancellations()
    cancellations.remember("a")
    cancellations.remember("a")
    assert not cancellations.take("b")
    assert cancellations.take("a")
    assert not cancellations.take("a")


def test_an_old_one_is_forgotten() -> None:
    cancellations = module.Cancellations(clock := Clock())
    cancellations.remember("a")
    clock.now += KEPT / 2
    cancellations.remember("b")
    clock.now += KEPT / 2
    assert not cancellations.take("a")
    assert cancellations.take("b")


def test_one_that_is_repeated_is_kept_from_then_on() -> None:
    cancellations = module.Cancellations(clock := Clock())
    for _ in range(2):
        cancellations.remember("a")
        cancellations.remember("b")
        clock.now += KEPT / 2
    assert cancellations.take("a")


def test_a_late_one_cancels_no_later_request_of_the_same_id() -> None:
    cancellations = module.Cancellations(clock := Clock())
    assert not cancellations.take("a")
    cancellations.end("a")
    cancellations.remember("a")
    assert not cancellations.take("a")
    cancellations.end("a")
    clock.now += KEPT
    cancellations.remember("a")
    assert cancellations.take("a")


def test_their_number_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_IDS", 3)
    cancellations = module.Cancellations()
    for number in range(5):
        cancellations.remember(f"early {number}")
        cancellations.end(f"ended {number}")
    assert len(cancellations._early._added) == len(cancellations._ended._added) == 3
    assert [cancellations.take(f"early {number}") for number in range(5)] == [False] * 2 + [
        True
    ] * 3


def test_what_is_old_takes_no_memory() -> None:
    cancellations = module.Cancellations(clock := Clock())
    for number in range(5):
        cancellations.remember(str(number))
    clock.now += KEPT
    cancellations.remember("new")
    assert list(cancellations._early._added) == ["new"]


@pytest.mark.parametrize("request_id", ["", "x" * 257])
def test_an_id_that_names_no_request_is_not_kept(request_id: str) -> None:
    cancellations = module.Cancellations()
    cancellations.remember(request_id)
    assert not cancellations.take(request_id)


def test_the_scripted_model_has_the_same() -> None:
    copy = ROOT / "triton" / "models" / "scripted" / "1" / "cancellations.py"
    original = ROOT / "triton" / "backends" / "vllm" / "cancellations.py"
    assert copy.read_text() == original.read_text()
