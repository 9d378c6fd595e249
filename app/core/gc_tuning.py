"""Keeping the garbage collector out of the way of those who wait."""

import gc


def settle() -> None:
    """What lives now lives as long as the process: leave it out of all later collections.

    A full collection walks every object while the event loop stands still: 35 to 50 ms for what an API
    process has loaded at its start. Call it once, when everything is open.
    https://docs.python.org/3/library/gc.html#gc.freeze
    """
    gc.collect()
    gc.freeze()
