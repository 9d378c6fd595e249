"""State machines of hypothesis against a real database: synchronous rules on one event loop.

`FUZZ=20` runs twenty times as many examples, from random seeds; otherwise all runs are alike.
"""

import asyncio
import contextlib
import os
from collections.abc import Coroutine, Iterator
from typing import Any, ClassVar, TypeVar

from hypothesis import HealthCheck, settings as hypothesis_settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from app.core.database import Database
from app.core.settings import Settings
from tests.conftest import connect, make_settings, own_database
from tests.integration.queue.queue_bench import MAX_ATTEMPTS, Bench
from tests.postgres import PostgresServer

T = TypeVar("T")

_STUCK_SECONDS = 30.0  # for one rule


class DatabaseMachine(RuleBasedStateMachine):
    """A machine on the bench of its test; each of its examples has rows of its own.

    Its rules have no preconditions: the order of concurrent requests may differ when hypothesis
    repeats an example, which must not change what it draws. A rule returns where it does not apply.
    """

    loop: ClassVar[asyncio.AbstractEventLoop]
    bench: ClassVar[Bench]

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(asyncio.wait_for(work, _STUCK_SECONDS))


@contextlib.contextmanager
def loop_and_bench(
    server: PostgresServer, template: str, *, max_attempts: int = MAX_ATTEMPTS
) -> Iterator[tuple[asyncio.AbstractEventLoop, Bench]]:
    """An event loop, and a bench on a database of its own."""
    with asyncio.Runner() as runner:
        stack = contextlib.AsyncExitStack()

        async def begin() -> Bench:
            name = await stack.enter_async_context(own_database(server, template))
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


def check_machine(machine: type[DatabaseMachine], *, examples: int, steps: int) -> None:
    """Run so many examples of at most so many steps; `machine` has its loop and bench."""
    run_state_machine_as_test(machine, settings=machine_settings(examples, steps))


def machine_settings(examples: int, steps: int) -> hypothesis_settings:
    """Settings for so many examples, times `FUZZ`."""
    factor = int(os.environ.get("FUZZ", "1"))
    return hypothesis_settings(
        max_examples=examples * factor,
        stateful_step_count=steps,
        derandomize=factor == 1,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
