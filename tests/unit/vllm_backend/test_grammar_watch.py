"""A generation whose constraint takes too much of the engine's time ends; the others go on."""

from collections.abc import Iterable
from importlib.metadata import PathDistribution
from types import SimpleNamespace
from typing import Any

import pytest

from app.core.errors import FailureCode
from tests.conftest import ROOT
from tests.unit.vllm_backend.modules import load

BACKEND = ROOT / "triton" / "backends" / "vllm"


class Manager:
    """In the place of vLLM's: each question to a grammar takes the seconds that it names."""

    def __init__(self, module: Any) -> None:
        self.now = 0.0
        module.time = SimpleNamespace(thread_time=lambda: self.now)
        self.fill = module.timed_fill(Manager._fill)
        self.accept = module.timed_accept(Manager._accept)

    def _fill(self, batch: Iterable[tuple[Any, int, bool]]) -> None:
        self.now += sum(grammar.mask_seconds for grammar, _, _ in batch)

    def _accept(self, request: Any, token_ids: list[int]) -> bool:
        if request.use_structured_output:
            self.now += request.structured_output_request.grammar.token_seconds * len(token_ids)
        return request.accepts is True


def request(mask: float = 0.0, token: float = 0.0, *, accepts: bool = True, tokens: int = 0) -> Any:
    grammar = SimpleNamespace(mask_seconds=mask, token_seconds=token)
    return SimpleNamespace(
        use_structured_output=True, structured_output_request=SimpleNamespace(grammar=grammar),
        accepts=accepts, num_output_tokens=tokens, stop_reason=None,
    )  # fmt: skip


def run(manager: Manager, requests: list[Any], steps: int) -> list[int]:
    """Steps of the engine; the tokens of each request until it ended."""
    for _ in range(steps):
        running = [one for one in requests if one.stop_reason is None]
        grammars = [one.structured_output_request.grammar for one in running]
        manager.fill(manager, [(grammar, place, True) for place, grammar in enumerate(grammars)])
        for one in running:
            one.num_output_tokens += 1
            assert manager.accept(manager, one, [7]) is (one.stop_reason is None)
    return [one.num_output_tokens for one in requests]


@pytest.fixture
def module() -> Any:
    return load("grammar_watch")


def test_the_slow_one_ends_and_no_other(module: Any) -> None:
    manager = Manager(module)
    requests = [request(0.002), request(0.105), request(0.0, 0.255), request(0.005)]
    assert run(manager, requests, 500) == [500, 11, 5, 500]
    assert [one.stop_reason for one in requests] == [
        None, module.TOO_SLOW, module.TOO_SLOW, None
    ]  # fmt: skip


def test_a_token_that_the_grammar_refuses_stays_refused(module: Any) -> None:
    manager, refused = Manager(module), request(accepts=False)
    assert not manager.accept(manager, refused, [7])
    assert refused.stop_reason is None
    free = SimpleNamespace(use_structured_output=False, accepts=True)
    assert manager.accept(manager, free, [7])


def test_its_reason_is_the_code_of_the_failure(module: Any) -> None:
    def reason(finish: str | None, stop: object = None) -> object:
        return module.reason_of(SimpleNamespace(finish_reason=finish, stop_reason=stop))

    assert reason("error", module.TOO_SLOW) == FailureCode.GRAMMAR_TOO_SLOW
    assert reason("stop", module.TOO_SLOW) == "stop"  # a text to stop at
    assert [reason(one) for one in (None, "error", "length")] == [None, "error", "length"]


def test_vllm_finds_it_beside_the_backend() -> None:
    """vLLM's processes load the entry points of the distributions on their path."""
    (path,) = BACKEND.glob("*.dist-info")
    (entry,) = PathDistribution(path).entry_points
    assert (entry.group, entry.module, entry.attr) == (
        "vllm.general_plugins",
        "grammar_watch",
        "install",
    )
    assert (BACKEND / f"{entry.module}.py").is_file()
