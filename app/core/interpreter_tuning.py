"""Tuning of the Python interpreter for low latency."""

import gc
import sys

# A thread that works on a text keeps the interpreter's lock for so long while the event loop waits for it
# (5 ms by default), which it does after every system call.
_SWITCH_SECONDS = 0.0005
# New objects until a collection of the first generation, its collections until one of the second, and those of
# the second until a full one; by default 700, 10 and 10. The event loop is blocked while a collection visits all
# objects of its generation: ten thousand take 5 ms of a busy processor. Requests make no cycles, so
# reference counts free nearly everything.
_COLLECTIONS = (2_000, 5, 500)


def settle() -> None:
    """Tune a process; call it once, after start-up.

    Excludes all present objects from later collections: those that an API process loads at its start
    would take 35 to 50 ms of each. https://docs.python.org/3/library/gc.html#gc.freeze
    """
    sys.setswitchinterval(_SWITCH_SECONDS)
    gc.set_threshold(*_COLLECTIONS)
    gc.collect()
    gc.freeze()
