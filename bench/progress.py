"""Progress of a run, line by line on stderr: only its tables go to stdout."""

import sys
import time

_BEGAN = time.monotonic()


def show(what: str, turn: int | None = None, rounds: int = 0) -> None:
    """Print the step that begins now, `turn` of `rounds` (from 0; -1 warms up), and the elapsed time."""
    if turn is not None:
        what += ", warm-up" if turn < 0 else f", round {turn + 1} of {rounds}"
    print(f"{time.monotonic() - _BEGAN:6.0f} s  {what}", file=sys.stderr, flush=True)
