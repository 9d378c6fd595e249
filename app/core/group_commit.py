"""Group commit: concurrent callers share one statement, one round trip and one fsync.

A batcher runs one statement at a time. The next batch holds all items that arrived during the last
one: there is no timer, so a single caller does not wait. Batchers also group reads by id.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from app.core import metrics
from app.core.database import Connection, Database, Retry, is_transient

T = TypeVar("T")
R = TypeVar("R")

# (connection, items, resent) -> one answer per item, in their order. `resent`: the statement may have
# been committed already, and its answer lost with the connection.
Statement = Callable[[Connection, Sequence[T], bool], Awaitable[Sequence[R]]]


@dataclass(slots=True)
class _Group(Generic[T, R]):
    items: Sequence[T]
    answer: asyncio.Future[Sequence[R]] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def resolve(self, answers: Sequence[R]) -> None:
        if not self.answer.done():  # the caller may have left; its items are committed all the same
            self.answer.set_result(answers)

    def fail(self, error: BaseException) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


class Batcher(Generic[T, R]):
    """Combines the items of concurrent callers into one statement after another.

    `retry_seconds` bounds the retries while the database is unavailable. A statement that fails for
    its data is split until only the group at fault gets the error.
    """

    def __init__(
        self,
        database: Database,
        statement: Statement[T, R],
        *,
        max_items: int,
        retry_seconds: float,
    ) -> None:
        self._database = database
        self._statement = statement
        self._max_items = max_items
        self._retry_seconds = retry_seconds
        self._waiting: deque[_Group[T, R]] = deque()
        self._runner: asyncio.Task[None] | None = None
        self._sizes = metrics.BATCH_SIZE.of(statement.__name__.strip("_"))

    async def submit(self, item: T) -> R:
        """Commit one item together with all that wait; return its answer."""
        return (await self.submit_all([item]))[0]

    async def submit_all(self, items: Sequence[T]) -> Sequence[R]:
        group: _Group[T, R] = _Group(items)
        self._waiting.append(group)
        if self._runner is None:
            # In a context of its own: it works for all requests, not only for the first one.
            self._runner = asyncio.create_task(
                self._run(), name=f"lane {self._statement.__name__}", context=Context()
            )
        return await group.answer

    async def close(self) -> None:
        """Stop: waiting items are dropped, a running statement may still be committed."""
        self._waiting.clear()
        if self._runner is not None:
            self._runner.cancel()
            await asyncio.gather(self._runner, return_exceptions=True)

    async def _run(self) -> None:
        # The test for emptiness and the mark "idle" are in one step of the event loop: a group that
        # arrives later finds the batcher idle and starts it.
        while self._waiting:
            batch = self._next_batch()
            try:
                await self._commit(batch, resent=False)
            except BaseException as error:
                for group in batch:
                    group.fail(error)
                if isinstance(error, asyncio.CancelledError):
                    self._runner = None
                    raise
        self._runner = None

    def _next_batch(self) -> list[_Group[T, R]]:
        batch = [self._waiting.popleft()]
        size = len(batch[0].items)
        while self._waiting and size + len(self._waiting[0].items) <= self._max_items:
            batch.append(self._waiting.popleft())
            size += len(batch[-1].items)
        return batch

    async def _commit(self, batch: list[_Group[T, R]], *, resent: bool) -> None:
        items = [item for group in batch for item in group.items]
        self._sizes.observe(len(items))
        retry = Retry(self._retry_seconds)
        while True:
            try:
                async with self._database.connection() as connection:
                    answers = await self._statement(connection, items, resent)
                    _resolve(batch, answers)  # they need not wait for the connection's return
            except Exception as error:
                if is_transient(error):
                    await retry.pause(error)
                    resent = True
                    continue
                if len(batch) == 1:
                    raise
                middle = len(batch) // 2
                await self._commit_apart(batch[:middle], resent=resent)
                await self._commit_apart(batch[middle:], resent=resent)
            return

    async def _commit_apart(self, batch: list[_Group[T, R]], *, resent: bool) -> None:
        try:
            await self._commit(batch, resent=resent)
        except Exception as error:  # noqa: BLE001 - the other half must not see it
            for group in batch:
                group.fail(error)


def _resolve(batch: Sequence[_Group[T, R]], answers: Sequence[R]) -> None:
    start = 0
    for group in batch:
        end = start + len(group.items)
        group.resolve(answers[start:end])
        start = end
