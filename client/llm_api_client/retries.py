"""Repetition of requests that were lost, or that the service refused for the moment."""

import random
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import TypeVar

from llm_api_client.errors import error_of, retry_after_of
from llm_api_client.steps import Again, Emit, Exchange, Lost, Outcome, Pause, Reply, failure_of

Y = TypeVar("Y")
R = TypeVar("R")

_FIRST_PAUSE_SECONDS = 0.25
_MAX_PAUSE_SECONDS = 8.0
# The service, or a proxy in front of it, could not take the request now.
TRANSIENT = frozenset({429, 502, 503, 504})
_BUSY = 429
# With these the service stores nothing, except where the database was lost during the request.
_NOTHING_STORED = frozenset({429, 503})


@dataclass
class Patience:
    """Pauses between the tries of one request, until its time is over.

    A pause doubles with each try up to 8 s, is never shorter than `Retry-After`, and is longer by a
    random part, so that many clients do not return at the same moment.
    """

    seconds: float
    clock: Callable[[], float] = time.monotonic
    chance: Callable[[], float] = random.random
    _tries: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Begin again after progress."""
        self._tries, self._began = 0, self.clock()

    def next_pause(self, retry_after: float | None = None) -> float | None:
        """Seconds to wait before the next try; None if the time would be over by then."""
        backoff = min(_MAX_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2.0 ** min(self._tries, 10))
        pause = max(retry_after or 0.0, backoff / 2) + self.chance() * backoff / 2
        self._tries += 1
        return pause if self.clock() - self._began + pause <= self.seconds else None


def with_retries(
    operation: Generator[Y, Outcome, R], patience_seconds: float
) -> Generator[Y | Exchange | Pause, Outcome, R]:
    """The same operation, with each of its exchanges repeated until it succeeds or its time is over."""
    patience = Patience(patience_seconds)  # of the operation's open responses
    outcome: Outcome = None
    while True:
        try:
            step = operation.send(outcome)
        except StopIteration as end:
            result: R = end.value
            return result
        if isinstance(step, Exchange):
            outcome = yield from _repeat(step, Patience(patience_seconds))
        elif isinstance(step, Again):
            pause = _pause_after(step.outcome, patience, is_repeatable=True)
            if pause is None:
                raise failure_of(step.outcome)
            outcome = yield Pause(pause)
        else:
            if isinstance(step, Emit):
                patience.renew()
            outcome = yield step


def _repeat(step: Exchange, patience: Patience) -> Generator[Exchange | Pause, Outcome, Outcome]:
    while True:
        outcome = yield step
        assert isinstance(outcome, (Reply, Lost))
        pause = _pause_after(outcome, patience, is_repeatable=step.request.is_repeatable)
        is_final = step.request.is_busy_final and _is_busy(outcome)
        if pause is None or is_final:
            return outcome
        yield Pause(pause)


def _is_busy(outcome: Reply | Lost) -> bool:
    return isinstance(outcome, Reply) and (outcome.status == _BUSY or outcome.status >= 500)


def _pause_after(outcome: Reply | Lost, patience: Patience, *, is_repeatable: bool) -> float | None:
    """Seconds before the next try; None if none may follow."""
    if not may_be_repeated(outcome, is_repeatable=is_repeatable):
        return None
    retry_after = retry_after_of(outcome.headers) if isinstance(outcome, Reply) else None
    return patience.next_pause(retry_after)


def may_be_repeated(outcome: Reply | Lost, *, is_repeatable: bool) -> bool:
    """True if another try may succeed, and cannot do the work of the request twice."""
    if isinstance(outcome, Lost):
        return is_repeatable or not outcome.may_have_arrived
    if outcome.status not in TRANSIENT:
        return False
    if is_repeatable:
        return True
    code = error_of(outcome.status, outcome.headers, outcome.body).code
    return outcome.status in _NOTHING_STORED and code != "database_unavailable"
