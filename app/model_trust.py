"""Which models may be given results, and where: readiness does not see a dead engine, streams do."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from app.errors import FailureCode
from app.job_queue import AttemptEnd, Outcome
from app.runner import Attempt, Place

# After a lost stream, before one more result is risked in its place. Where its model is ready
# elsewhere, too, each loss in a row doubles it.
_DOUBT_SECONDS = 1.0
_LONGEST_DOUBT_SECONDS = 30.0
_ANSWERS = (FailureCode.INVALID_REQUEST, FailureCode.MODEL_ERROR)


@dataclass(slots=True)
class _Doubt:
    since: float  # loop time of the last lost stream
    seconds: float


class ModelTrust:
    """Doubts a place whose stream was lost, until it has answered again: a circuit breaker.

    Without this, results would burn their attempts on a dead engine that Triton still calls
    ready. A doubtful place is given one result at a time.
    """

    def __init__(self) -> None:
        self._doubts: dict[Place, _Doubt] = {}

    def judge(self, place: Place, end: AttemptEnd, *, is_only: bool = True) -> None:
        """Learn from the end of an attempt; one stopped by its user or deadline teaches nothing."""
        if end.outcome in (Outcome.LOST, Outcome.RETURNED):
            self.doubt(place, is_only=is_only)
        elif end.failure is None or end.failure.code in _ANSWERS:
            self._doubts.pop(place, None)

    def doubt(self, place: Place, *, is_only: bool = True) -> None:
        """A result was lost there, or not taken. `is_only`: its model is ready nowhere else."""
        now = asyncio.get_running_loop().time()
        known, seconds = self._doubts.get(place), _DOUBT_SECONDS
        if known is not None and not is_only:
            # Those that were lost together are one loss.
            is_next = now >= known.since + known.seconds
            seconds = min(2 * known.seconds, _LONGEST_DOUBT_SECONDS) if is_next else known.seconds
        self._doubts[place] = _Doubt(now, seconds)

    def learn(self, attempts: Iterable[Attempt]) -> None:
        """What has answered since it was doubted is trusted again."""
        if not self._doubts:
            return
        for attempt in attempts:
            doubt = self._doubts.get(attempt.place)
            if doubt is not None and attempt.has_answered and attempt.heard_at > doubt.since:
                del self._doubts[attempt.place]

    def limit(self, place: Place, slots: int, *, is_busy: bool) -> int:
        """How many of these slots may be filled now; `is_busy`: something runs there."""
        doubt = self._doubts.get(place)
        if doubt is None:
            return slots
        is_over = asyncio.get_running_loop().time() >= doubt.since + doubt.seconds
        return min(slots, int(is_over and not is_busy))


def silent_places(attempts: Iterable[Attempt], seconds: float) -> list[Place]:
    """The places all of whose streams have said nothing for so long."""
    heard: dict[Place, float] = {}
    for attempt in attempts:
        heard[attempt.place] = max(heard.get(attempt.place, 0.0), attempt.heard_at)
    now = asyncio.get_running_loop().time()
    return [place for place, at in heard.items() if now - at > seconds]
