"""CPU time as a function of the input's size: proof that work grows linearly."""

import gc
import time
from collections.abc import Callable

_ENOUGH_SECONDS = 0.015  # of CPU: less is too little to be compared
_MAX_SIZE = 100_000
# Linear work takes 4 times as long for 4 times the input, quadratic work 16 times.
_MAX_RATIO = 8.0


def assert_linear(work: Callable[[int], object], size: int = 1_000) -> None:
    """Run `work` with growing sizes: the CPU time of 4 times the size is below 8 times as long."""
    while size < _MAX_SIZE and _seconds(work, size) < _ENOUGH_SECONDS:
        size *= 2
    small = min(_seconds(work, size) for _ in range(3))
    if small < _ENOUGH_SECONDS:
        return
    ratio = 0.0
    for _ in range(3):  # the least disturbed of three counts
        ratio = _seconds(work, 4 * size) / small
        if ratio < _MAX_RATIO:
            return
    raise AssertionError(f"{ratio:.0f} times as long for 4 times {size} characters")


def _seconds(work: Callable[[int], object], size: int) -> float:
    gc.disable()  # a collection looks at all objects of the process
    try:
        began = time.thread_time()
        work(size)
        return time.thread_time() - began
    finally:
        gc.enable()
