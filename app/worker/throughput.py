"""Results that a worker finishes per second, by model: the base of the estimate of a wait."""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable

# Seconds after which a beat counts for a third: a model that takes a minute per result finishes
# none in most beats, and one that slows down is noticed within a minute.
_MEMORY_SECONDS = 30.0


class Throughput:
    """A mean over the last beats in which a model had work; newer ones count more."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._beat_at = clock()
        self._finished: Counter[str] = Counter()  # since the last beat
        self._results: dict[str, float] = {}
        self._seconds: dict[str, float] = {}

    def count(self, model: str) -> None:
        self._finished[model] += 1

    def beat(self, busy: Iterable[str]) -> dict[str, float]:
        """Results per second of each model that ever had work; `busy` had some since the last call."""
        finished, self._finished = self._finished, Counter()
        now = self._clock()
        seconds = max(now - self._beat_at, 0.001)
        self._beat_at = now
        kept = math.exp(-seconds / _MEMORY_SECONDS)
        for model in set(busy) | finished.keys():
            self._results[model] = self._results.get(model, 0.0) * kept + finished[model]
            self._seconds[model] = self._seconds.get(model, 0.0) * kept + seconds
        return {model: self._results[model] / self._seconds[model] for model in self._results}
