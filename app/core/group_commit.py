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

import asyncpg

from app.core import metrics
from app.core.database import Connection, Database, Retry, is_transient

T = TypeVar("T")
R = TypeVar("R")

# (connection, items, resent) -> one answer per item, in their order. `resent`: the statement may have
# been committed already, and its answer lost with the connection.
Statement = Callable[[Connection, Sequence[T], bool], Awaitable[Sequence[R]]]

# Text of one statement: 0.1 s of PostgreSQL's work, and some copies of it on both sides.
MAX_STATEMENT_BYTES = 8 * 2**20
# Bytes and items of a group in each lane but the last. In the first, a group is a fraction of a millisecond
# of PostgreSQL's work, in the second a few milliseconds.
_BOUNDS = ((4_096, 8), (65_536, 32))

_TIMEOUT_ERRORS = (TimeoutError, asyncpg.QueryCanceledError)
_MAX_TIMEOUTS = 2  # of a batch; then its groups are sent one by one
# A large group that times out alone so often fails, if PostgreSQL answers others. A small one waits
# for something else, such as a lock.
_MAX_LONE_TIMEOUTS = 3
_LARGE_BYTES = 2**20


class StatementTimeoutError(Exception):
    """PostgreSQL does not finish the statement of this group, although nothing else is in it."""


@dataclass(slots=True, eq=False)
class _Group(Generic[T, R]):
    items: Sequence[T]
    size: int
    retry: Retry | None = None  # of the batch that timed out: from then on it is sent alone
    timeouts: int = 0  # alone
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
    its data is split until only the group at fault gets the error. Groups of a statement that timed
    out twice are sent one by one; one that times out again lets the others go first.

    Groups have lanes by their size, each with a statement at a time: small ones do not wait for
    larger ones, however many there are.
    """

    def __init__(
        self,
        database: Database,
        statement: Statement[T, R],
        *,
        max_items: int,
        retry_seconds: float,
        size: Callable[[Sequence[T]], int] = lambda _: 0,
    ) -> None:
        """`size`: bytes of the items of one caller, which bound a statement beside `max_items`."""
        self._database = database
        self._statement = statement
        self._max_items = max_items
        self._retry_seconds = retry_seconds
        self._size = size
        self._sizes = metrics.BATCH_SIZE.of(statement.__name__.strip("_"))
        self._lanes = [_Lane(self) for _ in range(len(_BOUNDS) + 1)]

    async def submit(self, item: T) -> R:
        """Commit one item together with all that wait; return its answer."""
        return (await self.submit_all([item]))[0]

    async def submit_all(self, items: Sequence[T], *, in_line: bool = False) -> Sequence[R]:
        """Commit them in one statement. `in_line`: not beside another statement, however large."""
        group: _Group[T, R] = _Group(items, self._size(items))
        beyond = (group.size > size or len(items) > count for size, count in _BOUNDS)
        lane = self._lanes[0 if in_line else sum(beyond)]
        try:
            return await lane.submit(group)
        finally:
            del group  # the traceback of an error holds this frame: a cycle, with its texts

    async def close(self) -> None:
        """Stop: waiting items are dropped, a running statement may still be committed."""
        for lane in self._lanes:
            await lane.close()


class _Lane(Generic[T, R]):
    """Groups that wait, and the task that sends one statement after another."""

    def __init__(self, batcher: Batcher[T, R]) -> None:
        self._batcher = batcher
        self._waiting: deque[_Group[T, R]] = deque()
        self._runner: asyncio.Task[None] | None = None

    async def submit(self, group: _Group[T, R]) -> Sequence[R]:
        self._waiting.append(group)
        if self._runner is None:
            # In a context of its own: it works for all requests, not only for the first one.
            self._runner = asyncio.create_task(
                self._run(), name=f"lane {self._batcher._statement.__name__}", context=Context()
            )
        try:
            return await group.answer
        finally:
            del group

    async def close(self) -> None:
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
                if batch[0].retry is None:
                    await self._commit(batch, resent=False)
                else:
                    await self._commit_alone(batch[0], batch[0].retry)
            except BaseException as error:
                _fail(batch, error)
                if isinstance(error, asyncio.CancelledError):
                    self._runner = None
                    raise
        self._runner = None

    def _next_batch(self) -> list[_Group[T, R]]:
        batch = [self._waiting.popleft()]
        count, size = len(batch[0].items), batch[0].size
        while self._waiting and batch[0].retry is None and self._waiting[0].retry is None:
            count += len(self._waiting[0].items)
            size += self._waiting[0].size
            if count > self._batcher._max_items or size > MAX_STATEMENT_BYTES:
                break
            batch.append(self._waiting.popleft())
        return batch

    async def _commit(self, batch: list[_Group[T, R]], *, resent: bool) -> None:
        retry = Retry(self._batcher._retry_seconds)
        timeouts = 0
        while timeouts < _MAX_TIMEOUTS:
            try:
                return await self._send(batch, resent=resent)
            except Exception as error:
                if is_transient(error):
                    await retry.pause(error)
                    timeouts += isinstance(error, _TIMEOUT_ERRORS)
                    resent = True
                    continue
                if len(batch) == 1:
                    raise
            middle = len(batch) // 2
            for half in (batch[:middle], batch[middle:]):
                await _apart(half, self._commit(half, resent=resent))
            return None
        for group in batch:
            await _apart([group], self._commit_alone(group, retry))
        return None

    async def _commit_alone(self, group: _Group[T, R], retry: Retry) -> None:
        """Send a group alone, once; it waits behind all others if that times out again."""
        group.retry = retry
        try:
            await self._send([group], resent=True)
        except Exception as error:
            if not is_transient(error):
                raise
            await retry.pause(error)
            if group.size > _LARGE_BYTES and isinstance(error, _TIMEOUT_ERRORS):
                group.timeouts += await self._is_answered()
            if group.timeouts == _MAX_LONE_TIMEOUTS:
                message = (
                    f"a statement of {group.size} bytes timed out {group.timeouts} times alone"
                )
                raise StatementTimeoutError(message) from error
            self._waiting.append(group)

    async def _send(self, batch: list[_Group[T, R]], *, resent: bool) -> None:
        items = [item for group in batch for item in group.items]
        self._batcher._sizes.observe(len(items))
        async with self._batcher._database.connection() as connection:
            answers = await self._batcher._statement(connection, items, resent)
            _resolve(batch, answers)  # they need not wait for the connection's return

    async def _is_answered(self) -> bool:
        """Return whether PostgreSQL answers another statement."""
        try:
            async with self._batcher._database.connection() as connection:
                await connection.execute("SELECT 1")
        except Exception as error:
            if not is_transient(error):
                raise
            return False
        return True


async def _apart(batch: list[_Group[T, R]], committed: Awaitable[None]) -> None:
    try:
        await committed
    except Exception as error:  # noqa: BLE001 - the others must not see it
        _fail(batch, error)


def _fail(batch: list[_Group[T, R]], error: BaseException) -> None:
    """Give the groups the error, and empty the list: the error's traceback holds frames that have it."""
    for group in batch:
        group.fail(error)
    batch.clear()


def _resolve(batch: Sequence[_Group[T, R]], answers: Sequence[R]) -> None:
    start = 0
    for group in batch:
        end = start + len(group.items)
        group.resolve(answers[start:end])
        start = end
