"""State machines of hypothesis against a real database: synchronous rules on one event loop.

`FUZZ=20` runs twenty times as many examples, from random seeds; otherwise all runs are alike.

A failure is reported within a minute: shrinking is bounded, and an example that does not end, because
it waits or spins, ends with a `StuckError` that names its place.
"""

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from types import FrameType
from typing import Any, ClassVar, TypeVar, cast

import pytest
from hypothesis import HealthCheck, settings as hypothesis_settings
from hypothesis.internal.conjecture import engine
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from app.core.database import Database
from app.core.settings import Settings
from tests.conftest import connect, make_settings
from tests.database_copies import DatabaseCopies
from tests.hangs import places_of
from tests.integration.queue.queue_bench import MAX_ATTEMPTS, Bench
from tests.postgres import PostgresServer

T = TypeVar("T")

_STUCK_SECONDS = 40.0  # for one example, of which the longest takes 2 s on a free core
_AGAIN_SECONDS = 5.0  # until the next interruption, of a teardown that does not end either
_SHRINK_SECONDS = 15.0
_FACTOR = int(os.environ.get("FUZZ", "1"))


class StuckError(BaseException):
    """An example that does not end.

    No `Exception` and no failure of pytest: hypothesis takes those for what the example has found, and
    looks for a smaller one among hundreds, each of which takes as long.
    """


class DatabaseMachine(RuleBasedStateMachine):
    """A machine on the bench of its test; each of its examples has rows of its own.

    Its rules have no preconditions: the order of concurrent requests may differ when hypothesis
    repeats an example, which must not change what it draws. A rule returns where it does not apply.
    """

    loop: ClassVar[asyncio.AbstractEventLoop]
    bench: ClassVar[Bench]

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)


@contextlib.contextmanager
def loop_and_bench(
    server: PostgresServer, copies: DatabaseCopies, *, max_attempts: int = MAX_ATTEMPTS
) -> Iterator[tuple[asyncio.AbstractEventLoop, Bench]]:
    """An event loop, and a bench on a database of its own."""
    with asyncio.Runner() as runner:
        stack = contextlib.AsyncExitStack()

        async def begin() -> Bench:
            name = await stack.enter_async_context(copies.one())
            settings: Settings = make_settings(server, name, max_attempts=max_attempts)
            database = await stack.enter_async_context(Database(settings, "test"))
            connection = await connect(settings)
            stack.push_async_callback(connection.close)
            return Bench(database, settings, connection)

        bench = runner.run(begin())
        try:
            yield runner.get_loop(), bench
        finally:
            runner.run(stack.aclose())


def check_machine(
    machine: Callable[[], RuleBasedStateMachine],
    *,
    examples: int,
    steps: int,
    stuck_seconds: float = _STUCK_SECONDS,
) -> None:
    """Run so many examples of at most so many steps. Raises StuckError."""

    def begin() -> RuleBasedStateMachine:
        watch.restart()
        return machine()

    # Hypothesis derives its examples from the source of this.
    begin.__wrapped__ = machine  # type: ignore[attr-defined]
    # It has no setting for the time of shrinking, and its 5 minutes are more than a test has.
    with pytest.MonkeyPatch.context() as patch, ExampleWatch(stuck_seconds) as watch:
        patch.setattr(engine, "MAX_SHRINKING_SECONDS", _SHRINK_SECONDS * _FACTOR)
        run_state_machine_as_test(
            cast(type[RuleBasedStateMachine], begin), settings=machine_settings(examples, steps)
        )


class ExampleWatch:
    """Raises StuckError in the main thread `seconds` after the last restart, and repeatedly after that.

    By a signal: it also ends a wait of the event loop, which an exception set by another thread does not.
    SIGALRM is pytest-timeout's.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._ends = 0.0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "ExampleWatch":
        self._before = signal.signal(signal.SIGUSR1, self._interrupt)
        self.restart()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()
        signal.signal(signal.SIGUSR1, self._before)

    def restart(self) -> None:
        self._ends = time.monotonic() + self._seconds

    def _watch(self) -> None:
        main = threading.main_thread().ident
        assert main is not None
        while not self._closed.wait(max(0.0, self._ends - time.monotonic())):
            if time.monotonic() >= self._ends:
                self._ends = time.monotonic() + _AGAIN_SECONDS
                signal.pthread_kill(main, signal.SIGUSR1)

    def _interrupt(self, _number: int, _frame: FrameType | None) -> None:
        if not self._closed.is_set():
            raise StuckError(f"an example has not ended after {self._seconds} s\n{_tasks()}")


def _tasks() -> str:
    """Return where the tasks of the running loop wait: the traceback shows only the loop."""
    try:
        return "\n".join(places_of(asyncio.all_tasks()))
    except RuntimeError:  # none runs
        return ""


def machine_settings(examples: int, steps: int) -> hypothesis_settings:
    """Settings for so many examples, times `FUZZ`."""
    return hypothesis_settings(
        max_examples=examples * _FACTOR,
        stateful_step_count=steps,
        derandomize=_FACTOR == 1,
        database=None,
        deadline=None,
        report_multiple_bugs=False,  # it would look for others for as long as it took to find one
        suppress_health_check=list(HealthCheck),
    )
