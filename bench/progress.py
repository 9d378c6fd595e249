"""What a run is doing, line by line on stderr: its tables alone go to stdout."""

import sys
import time

_BEGAN = time.monotonic()


def tell(what: str, turn: int | None = None, rounds: int = 0) -> None:
    """Say what begins now, `turn` of so many rounds (from 0; -1 warms up), after how many seconds."""
    if turn is not None:
        what += ", warm-up" if turn < 0 else f", round {turn + 1} of {rounds}"
    print(f"{time.monotonic() - _BEGAN:6.0f} s  {what}", file=sys.stderr, flush=True)
