"""Ends a generation whose constraint takes too much of the engine's time.

Each step of the engine computes the next tokens of all generations. Before it, vLLM asks the grammar of
each structured output which tokens it allows. No engine of grammars bounds that time for every grammar, and
all generations wait for it.
"""

import time
from collections.abc import Callable, Iterable
from typing import Any

# CPU time of one generation's grammar, beyond which it ends: once, and for each of its tokens.
ALLOWED_SECONDS = 1.0
ALLOWED_SECONDS_PER_TOKEN = 0.005
TOO_SLOW = "grammar_too_slow"

Fill = Callable[[Any, Iterable[tuple[Any, int, bool]]], None]
Accept = Callable[[Any, Any, list[int]], bool]


def install() -> None:
    """vLLM calls it in each of its processes (entry_points.txt): the scheduler's has the grammars."""
    from vllm.v1.structured_output import StructuredOutputManager as Manager

    if not hasattr(Manager, "is_watched"):
        Manager.is_watched = True
        Manager._fill_bitmasks = timed_fill(Manager._fill_bitmasks)
        Manager.accept_tokens = timed_accept(Manager.accept_tokens)


def timed_fill(fill: Fill) -> Fill:
    def fill_and_count(manager: Any, batch: Iterable[tuple[Any, int, bool]]) -> None:
        for one in batch:
            began = time.thread_time()
            fill(manager, (one,))
            add_time(one[0], time.thread_time() - began)

    return fill_and_count


def timed_accept(accept: Accept) -> Accept:
    def accept_or_end(manager: Any, request: Any, token_ids: list[int]) -> bool:
        if not request.use_structured_output:
            return accept(manager, request, token_ids)
        began = time.thread_time()
        is_accepted = accept(manager, request, token_ids)
        spent = add_time(request.structured_output_request.grammar, time.thread_time() - began)
        if spent <= ALLOWED_SECONDS + ALLOWED_SECONDS_PER_TOKEN * request.num_output_tokens:
            return is_accepted
        # vLLM ends the generation with "error", and delivers this with it.
        request.stop_reason = TOO_SLOW
        return False

    return accept_or_end


def add_time(grammar: Any, seconds: float) -> float:
    """Keep the time with the grammar, which one generation has; the sum."""
    grammar.seconds_spent = getattr(grammar, "seconds_spent", 0.0) + seconds
    return float(grammar.seconds_spent)


def reason_of(part: Any) -> str | None:
    """The finish reason of an output of vLLM, or TOO_SLOW."""
    if part.finish_reason == "error" and part.stop_reason == TOO_SLOW:
        return TOO_SLOW
    reason: str | None = part.finish_reason
    return reason
