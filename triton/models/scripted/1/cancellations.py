"""Cancellations that overtake their requests. Imports nothing of Triton or vLLM.

A request and its cancellation come by two calls, in any order. The scripted model has a copy of this file.
"""

import threading
import time
from collections.abc import Callable

# Clients give a model so long to end a request; then they cancel its call.
_KEPT_SECONDS = 30.0
_MAX_IDS = 10_000
_MAX_ID_LENGTH = 256


class Cancellations:
    """Ids of requests that were cancelled before they came.

    A cancellation may also come after the end of its request. Ids of ended requests are kept as long:
    the next request of a client that uses an id again is another one.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._lock = threading.Lock()
        self._early = _RecentIds(clock)
        self._ended = _RecentIds(clock)

    def remember(self, request_id: str) -> None:
        """Cancel a request that is not under way: the next with this id, unless one has ended."""
        with self._lock:
            if request_id not in self._ended:
                self._early.add(request_id)

    def take(self, request_id: str) -> bool:
        """Return whether a request that begins is cancelled already."""
        with self._lock:
            self._ended.discard(request_id)
            return self._early.discard(request_id)

    def end(self, request_id: str) -> None:
        with self._lock:
            self._ended.add(request_id)


class _RecentIds:
    """Ids that were added of late, the newest last. The empty one is the id of any request without one."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._added: dict[str, float] = {}

    def __contains__(self, one: str) -> bool:
        added = self._added.get(one)
        return added is not None and self._clock() - added < _KEPT_SECONDS

    def add(self, one: str) -> None:
        if not 0 < len(one) <= _MAX_ID_LENGTH:
            return
        self._added.pop(one, None)
        self._added[one] = self._clock()
        while len(self._added) > _MAX_IDS or next(iter(self._added)) not in self:
            del self._added[next(iter(self._added))]

    def discard(self, one: str) -> bool:
        """Forget an id; return whether it was known."""
        is_known = one in self
        self._added.pop(one, None)
        return is_known
