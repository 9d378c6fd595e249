"""Subscriptions of waiters and readers to results, and their places, divided by team."""

import contextlib
from collections import Counter
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from uuid import UUID

from app.core.waiting import Signal
from app.queue.live_text import LiveText
from app.results.rows import ResultRow

_MAX_CHARACTERS = 8192  # of notified text that a reader holds; it reads longer ones from the table


class ResultSignal(Signal):
    """Set when a result has more text or has ended."""

    is_end = False
    row: ResultRow | None = None  # of an ended result, if this process has it

    def __init__(self) -> None:
        super().__init__()
        self._texts: list[LiveText] = []
        self._characters = 0

    def add(self, text: LiveText) -> None:
        """Keep text of another process for the reader; drop all of it if the reader is late."""
        self._characters += len(text.text)
        if self._characters > _MAX_CHARACTERS:
            self.take()
        else:
            self._texts.append(text)
        self.set()

    def take(self) -> list[LiveText]:
        """Return the texts that came since the last call."""
        texts, self._texts, self._characters = self._texts, [], 0
        return texts


class Subscribers:
    """The signals of waiters or readers, by result, and their places, by team."""

    def __init__(self, places: int, *, is_shared: bool) -> None:
        self._signals: dict[UUID, set[ResultSignal]] = {}
        self._places = places
        self._is_shared = is_shared
        self._by_team: Counter[str] = Counter()
        self.count = 0

    def are_full_for(self, team_id: str) -> bool:
        """Return if no place is left for a team: it may have as many as it leaves free to others."""
        free = self._places - self.count
        return free <= 0 or (self._is_shared and self._by_team[team_id] >= free)

    def __contains__(self, result_id: UUID) -> bool:
        return result_id in self._signals

    def __iter__(self) -> Iterator[UUID]:
        return iter(self._signals)

    @contextlib.contextmanager
    def subscribed(self, team_id: str, result_id: UUID) -> Iterator[ResultSignal]:
        signal = ResultSignal()
        self._signals.setdefault(result_id, set()).add(signal)
        try:
            with self.placed(team_id):
                yield signal
        finally:
            signals = self._signals[result_id]
            signals.discard(signal)
            if not signals:
                del self._signals[result_id]

    @contextlib.contextmanager
    def placed(self, team_id: str) -> Iterator[None]:
        reserved = _RESERVED.get()
        if reserved is not None and reserved.is_free_in(self):
            reserved.is_used = True
            try:
                yield
            finally:
                reserved.is_used = False
            return
        self.count += 1
        self._by_team[team_id] += 1
        try:
            yield
        finally:
            self.count -= 1
            self._by_team[team_id] -= 1
            if not self._by_team[team_id]:
                del self._by_team[team_id]

    @contextlib.contextmanager
    def reserved(self, team_id: str) -> Iterator[None]:
        """Hold a place for the first subscription of the present request."""
        with self.placed(team_id):
            reservation = _Reservation(self)
            _RESERVED.set(reservation)
            try:
                yield
            finally:
                reservation.is_over = True

    def wake(self, result_id: UUID) -> None:
        for signal in self._signals.get(result_id, ()):
            signal.set()

    def add(self, text: LiveText) -> None:
        for signal in self._signals.get(text.result_id, ()):
            signal.add(text)

    def notify_end(self, result_id: UUID, row: ResultRow | None = None) -> None:
        for signal in self._signals.get(result_id, ()):
            signal.is_end = True
            signal.row = row or signal.row
            signal.set()

    def wake_all(self) -> None:
        for result_id in self:
            self.wake(result_id)


@dataclass(slots=True)
class _Reservation:
    """A place that a request has, from the check on: its stream begins some rounds later."""

    of: Subscribers
    is_used: bool = False  # by a reader of the request
    is_over: bool = False

    def is_free_in(self, subscribers: Subscribers) -> bool:
        return self.of is subscribers and not (self.is_used or self.is_over)


_RESERVED: ContextVar[_Reservation | None] = ContextVar("llm_stream_place", default=None)
