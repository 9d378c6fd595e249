"""Waiting for results and reading them live: one LISTEN connection per process, any number of both.

Subscribe first, then read the table, then wait: no transition falls between. Results that run in
this very process are read from memory; the text of others is read from the table, by offset,
whenever a notification says that there is more.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Protocol
from uuid import UUID, uuid4

import asyncpg

from app.core.database import Database, is_transient
from app.core.errors import TooManyStreamsError, TooManyWaitersError
from app.core.listener import APPENDED, ENDED, WATCHED, Listener, split_ids
from app.core.settings import Settings
from app.core.waiting import is_set_by
from app.queue.claim import Claim
from app.results.store import ResultStore
from app.results.streams.interest import ANNOUNCE_SECONDS, announce, is_question
from app.results.streams.output_buffer import OutputBuffer, TokenLog

logger = logging.getLogger(__name__)


class RunningAttempt(Protocol):
    """An attempt that runs in this process: its readers take the text from memory."""

    claim: Claim
    text: OutputBuffer
    tokens: TokenLog
    completion_tokens: int
    is_over: bool


class ResultSignal(asyncio.Event):
    """Set when there is news of a result.

    `is_end` tells that it has ended, `row` is what a read would give, where that is at hand.
    """

    is_end = False
    row: asyncpg.Record | None = None


class _Subscribers:
    """Those who are to hear news, by result."""

    def __init__(self) -> None:
        self._events: dict[UUID, set[ResultSignal]] = {}
        self.count = 0

    def __contains__(self, result_id: UUID) -> bool:
        return result_id in self._events

    def __iter__(self) -> Iterator[UUID]:
        return iter(self._events)

    @contextlib.contextmanager
    def subscribed(self, result_id: UUID) -> Iterator[ResultSignal]:
        event = ResultSignal()
        self._events.setdefault(result_id, set()).add(event)
        self.count += 1
        try:
            yield event
        finally:
            self.count -= 1
            events = self._events[result_id]
            events.discard(event)
            if not events:
                del self._events[result_id]

    def wake(self, result_id: UUID) -> None:
        for event in self._events.get(result_id, ()):
            event.set()

    def tell_end(self, result_id: UUID, row: asyncpg.Record | None = None) -> None:
        for event in self._events.get(result_id, ()):
            event.is_end = True
            event.row = row or event.row
            event.set()

    def wake_all(self) -> None:
        for result_id in self:
            self.wake(result_id)


class StreamHub:
    """Wakes those who wait for a result's end or read its text, wherever it runs."""

    def __init__(self, database: Database, results: ResultStore, settings: Settings) -> None:
        self.id = uuid4()  # of this process among those that read
        self.is_closing = False
        self._database = database
        self._results = results
        self._settings = settings
        self._waiters = _Subscribers()
        self._readers = _Subscribers()
        self._running: dict[UUID, RunningAttempt] = {}  # in this process
        self._to_announce: set[UUID] = set()
        self._announce_now = asyncio.Event()

    def subscribe(self, listener: Listener) -> None:
        """Listen; before the listener runs. Only a process that has readers needs it."""
        listener.subscribe(ENDED, self._on_ended)
        listener.subscribe(APPENDED, self._on_appended)
        listener.subscribe(WATCHED, self._on_watched)

    async def run(self) -> None:
        """Announce which results are read here until cancelled; see `watched`."""
        loop = asyncio.get_running_loop()
        all_at = loop.time() + ANNOUNCE_SECONDS
        while True:
            await is_set_by(self._announce_now, all_at)
            if loop.time() >= all_at:
                all_at = loop.time() + ANNOUNCE_SECONDS
                self._announce_all()
            self._announce_now.clear()
            ids, self._to_announce = self._to_announce, set()
            try:
                if ids:
                    await announce(self._database, self.id, list(ids))
            except Exception as error:
                if not is_transient(error):
                    raise
                self._to_announce |= ids  # with the next
                logger.info("announcing waits: %s", error, extra={"action": "announce_failed"})

    def _announce_all(self) -> None:
        self._to_announce.update(one for one in self._readers if one not in self._running)
        self._announce_now.set()

    def close(self) -> None:
        """The process stops: readers and waiters leave with what there is."""
        self.is_closing = True
        self._waiters.wake_all()
        self._readers.wake_all()

    # --- waiting for the end --------------------------------------------------------------------

    @property
    def is_full(self) -> bool:
        """Whether a further waiter would be refused."""
        return self._waiters.count >= self._settings.max_waiters

    def expecting(self, result_id: UUID) -> contextlib.AbstractContextManager[ResultSignal]:
        """An event that is set when the result has ended. Raises TooManyWaitersError."""
        if self.is_full:
            raise TooManyWaitersError(
                f"{self._waiters.count} requests are waiting already (LLM_MAX_WAITERS). "
                "Poll instead.",
                headers={"Retry-After": "5"},
            )
        return self._waiters.subscribed(result_id)

    async def wait_terminal(
        self,
        team_id: str,
        result_id: UUID,
        seconds: float,
        woken: ResultSignal | None = None,
        *,
        is_new: bool = False,
        has_left: Callable[[], bool] = bool,
    ) -> asyncpg.Record:
        """The result once it is terminal, or as it stands after `seconds`.

        `woken` is the caller's own event of `expecting`. If it was had before the result was stored
        (`is_new`), the table is read only once there is news. Who sets it and has left gets the
        result as it stands. Raises NotFoundError, and TooManyWaitersError beyond the process's limit.
        """
        if seconds <= 0:
            return await self._results.get(team_id, result_id)
        ends = asyncio.get_running_loop().time() + seconds
        with self.expecting(result_id) if woken is None else contextlib.nullcontext(woken) as news:
            if is_new:
                await is_set_by(news, ends)
            while True:
                news.clear()
                row = news.row
                if row is None or row["team_id"] != team_id:
                    row = await self._results.get(team_id, result_id)
                is_over = asyncio.get_running_loop().time() >= ends or self.is_closing
                if row["state"] != "pending" or is_over or has_left():
                    return row
                await is_set_by(news, ends)

    # --- reading the text -----------------------------------------------------------------------

    def check_room(self) -> None:
        """Raises TooManyStreamsError when this process has no room for a further reader."""
        if self._readers.count >= self._settings.max_streams:
            raise TooManyStreamsError(
                f"{self._readers.count} streams are open already (LLM_MAX_STREAMS). Poll instead, "
                "or come back later.",
                headers={"Retry-After": "5"},
            )

    def reading(self, result_id: UUID) -> contextlib.AbstractContextManager[ResultSignal]:
        """An event that is set whenever the result may have more text, or has ended."""
        return self._readers.subscribed(result_id)

    def running(self, result_id: UUID) -> RunningAttempt | None:
        """The attempt of a result that runs in this process."""
        return self._running.get(result_id)

    def announce(self, result_id: UUID) -> None:
        """Have the worker that runs a result, now or later, tell this process of its text."""
        self._to_announce.add(result_id)
        self._announce_now.set()

    # --- the worker of this process -------------------------------------------------------------

    def attach(self, attempt: RunningAttempt) -> None:
        """An attempt begins in this process: it is read from memory."""
        self._running[attempt.claim.id] = attempt
        self._readers.wake(attempt.claim.id)

    def on_text(self, attempt: RunningAttempt) -> None:
        """An attempt of this process has more text."""
        self._readers.wake(attempt.claim.id)

    def awaits(self, result_id: UUID) -> bool:
        """Whether somebody waits for the result, or reads it, here."""
        return result_id in self._waiters or result_id in self._readers

    def deliver(self, row: asyncpg.Record) -> None:
        """A result has ended in this process: those who wait need not read it again."""
        self._waiters.tell_end(row["id"], row)
        self._readers.tell_end(row["id"], row)

    def detach(self, attempt: RunningAttempt) -> None:
        """The attempt is over, and its end committed unless it was decided elsewhere."""
        result_id = attempt.claim.id
        if self._running.get(result_id) is attempt:
            del self._running[result_id]
        self._waiters.wake(result_id)
        self._readers.wake(result_id)

    # --- notifications --------------------------------------------------------------------------

    def _on_ended(self, payload: str) -> None:
        if not payload:  # (re)connected: what happened meanwhile was told to nobody
            self._waiters.wake_all()
            return
        for result_id in split_ids(payload):
            attempt = self._running.get(result_id)
            # Else its end is on its way back to us, and will be handed on.
            if attempt is None or not attempt.is_over:
                self._waiters.tell_end(result_id)
                self._readers.tell_end(result_id)

    def _on_appended(self, payload: str) -> None:
        if not payload:
            self._readers.wake_all()
            return
        for result_id in split_ids(payload):
            self._readers.wake(result_id)

    def _on_watched(self, payload: str) -> None:
        if not payload or is_question(payload):
            self._announce_all()
