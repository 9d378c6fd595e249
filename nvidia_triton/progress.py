"""Lines on standard error, which show progress; results are on standard output."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

REPEAT_SECONDS = 10


def say(text: str) -> None:
    """A line for people."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


@contextmanager
def heartbeat(what: str) -> Iterator[None]:
    """Report the current step, now and, where no terminal shows it, every ten seconds."""
    done, started = threading.Event(), time.monotonic()
    say(what)

    def beat() -> None:
        while not done.wait(REPEAT_SECONDS):
            say(f"{what}, {time.monotonic() - started:.0f} s")

    thread = threading.Thread(target=beat, daemon=True)
    if not sys.stderr.isatty():
        thread.start()
    try:
        yield
    finally:
        done.set()
        if thread.is_alive():
            thread.join()


class Wait:
    """A wait with a deadline that reports its reason: when that changes, and now and then."""

    def __init__(self, minutes: float, longest_pause: float = 5.0) -> None:
        """`longest_pause` is between two looks, in seconds; the first ones are shorter."""
        self._started = time.monotonic()
        self._deadline = self._started + 60 * minutes
        self._pause = 0.5
        self._longest_pause = longest_pause
        self._said = ("", 0.0)

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.monotonic() - self._started

    def goes_on(self, reason: str) -> bool:
        """Report the reason and pause; False when the time is up."""
        now = time.monotonic()
        if now >= self._deadline:
            return False
        if reason != self._said[0] or now - self._said[1] >= REPEAT_SECONDS:
            say(f"{reason}, {self.seconds:.0f} s")
            self._said = (reason, now)
        time.sleep(min(self._pause, self._deadline - now))
        self._pause = min(1.5 * self._pause, self._longest_pause)
        return True
