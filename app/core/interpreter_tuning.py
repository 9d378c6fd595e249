"""Tuning of the Python interpreter for low latency."""

import gc
import sys

# A thread that works on a text keeps the interpreter's lock for so long while the event loop waits for it
# (5 ms by default), which it does after every system call.
_SWITCH_SECONDS = 0.0005
# New objects until a collection of each generation; by default 700, 7,000 and 70,000. A full one visits all
# objects while the event loop is blocked: 100 ms beside a thousand streams. Requests make no cycles, so
# reference counts free nearly everything.
_COLLECTIONS = (10_000, 10, 25)


def settle() -> None:
    """Tune a process; call it once, after start-up.

    Excludes all present objects from later collections: those that an API process loads at its start
    would take 35 to 50 ms of each. https://docs.python.org/3/library/gc.html#gc.freeze
    """
    sys.setswitchinterval(_SWITCH_SECONDS)
    gc.set_threshold(*_COLLECTIONS)
    gc.collect()
    gc.freeze()
