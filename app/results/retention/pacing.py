"""Rests of retention: short ones behind a backlog, long ones beside other work.

A pass usually uses a fifth of one connection. A pass that lasts longer than some seconds has a backlog,
and uses four fifths, unless the server is busy: then a row takes longer than it took at best.
"""

import time

SHARE = 0.2  # of one connection's time
_SHARE_BEHIND = 0.8
_BEHIND_SECONDS = 5.0  # of a pass
_BUSY = 2.0  # times the least time of a row
_FEW_ROWS = 50  # mostly the time of the statements
_FORGETTING = 1.01  # the least time grows by this with each step, as tables do


class Pacing:
    """Times of one process's passes; seconds, by a monotonic clock."""

    def __init__(self, share: float = SHARE) -> None:
        """`share`: the usual fraction of the time to work in."""
        self._rest = 1 / share - 1
        self._rest_behind = 1 / max(share, _SHARE_BEHIND) - 1
        self._began = time.monotonic()
        self._least = float("inf")  # seconds of a row

    def begin(self) -> None:
        """A pass begins."""
        self._began = time.monotonic()

    def rest(self, took: float, rows: int) -> float:
        """Seconds to rest after a step that deleted `rows` results (0: other work)."""
        is_busy = True
        if rows >= _FEW_ROWS:
            self._least = min(self._least * _FORGETTING, took / rows)
            is_busy = took / rows > _BUSY * self._least
        is_behind = time.monotonic() - self._began > _BEHIND_SECONDS
        return took * (self._rest_behind if is_behind and not is_busy else self._rest)
