"""Waiting for results and reading them live: one LISTEN connection per process for all of them.

Subscribe first, then read the table, then wait: then no transition is missed. Text of results that
run in this process is read from memory. Text of others comes in notifications; a reader that lacks
some of it reads the table, by offset.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Protocol
from uuid import UUID, uuid4

import asyncpg

from app.core.byte_budget import ACCOUNT, charge
from app.core.database import Database, is_transient
from app.core.errors import TooManyStreamsError, TooManyWaitersError
from app.core.listener import APPENDED, ENDED, WATCHED, Listener, split_ids
from app.core.settings import Settings
from app.core.waiting import is_set_by
from app.inference.triton_session import LiveSwitch
from app.queue.claim import Claim
from app.queue.live_text import channel_of, from_payload
from app.results.rows import ResultRow
from app.results.store import ResultStore
from app.results.streams.interest import ANNOUNCE_SECONDS, announce, is_question
from app.results.streams.output_buffer import OutputBuffer, TokenLog
from app.results.streams.subscribers import ResultSignal, Subscribers

logger = logging.getLogger(__name__)


class RunningAttempt(Protocol):
    """An attempt that runs in this process: its readers take the text from memory."""

    claim: Claim
    text: OutputBuffer
    tokens: TokenLog
    completion_tokens: int
    is_over: bool
    live: LiveSwitch


class StreamHub:
    """Notifies waiters and readers of results, wherever those run."""

    def __init__(self, database: Database, results: ResultStore, settings: Settings) -> None:
        self.id = uuid4()  # of this process, in its announcements
        self.is_closing = False
        self._database = database
        self._results = results
        is_shared = settings.is_authenticated
        self._waiters = Subscribers(settings.max_waiters, is_shared=is_shared)
        self._readers = Subscribers(settings.max_streams, is_shared=is_shared)
        self._running: dict[UUID, RunningAttempt] = {}  # in this process
        self._to_announce: set[UUID] = set()
        self._announce_now = asyncio.Event()

    def subscribe(self, listener: Listener) -> None:
        listener.subscribe(ENDED, self._on_ended)
        listener.subscribe(APPENDED, self._on_appended)
        listener.subscribe(channel_of(self.id.hex), self._on_live_text)
        listener.subscribe(WATCHED, self._on_watched)

    async def run(self) -> None:
        """Announce the results that are read here until cancelled; see `interest`."""
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
        self.is_closing = True
        self._waiters.wake_all()
        self._readers.wake_all()

    # --- waiting for the end --------------------------------------------------------------------

    def is_full_for(self, team_id: str) -> bool:
        return self._waiters.are_full_for(team_id)

    def expecting(
        self, team_id: str, result_id: UUID
    ) -> contextlib.AbstractContextManager[ResultSignal]:
        """A signal of the result's end. Raises TooManyWaitersError."""
        if self.is_full_for(team_id):
            raise TooManyWaitersError(
                f"{self._waiters.count} requests are waiting already (LLM_MAX_WAITERS). "
                "Poll instead.",
                headers={"Retry-After": "5"},
            )
        return self._waiters.subscribed(team_id, result_id)

    async def wait_terminal(
        self,
        team_id: str,
        result_id: UUID,
        seconds: float,
        signal: ResultSignal | None = None,
        *,
        is_new: bool = False,
        is_disconnected: Callable[[], bool] = bool,
    ) -> ResultRow:
        """The result once it is terminal, or its present state after `seconds` or a disconnection.

        `signal` is the caller's own, from `expecting`. If the caller has it since before the result
        was stored (`is_new`), the table is not read before the first signal. Raises NotFoundError,
        TooManyWaitersError, MemoryBusyError.
        """
        if seconds <= 0:
            return await self._results.get(team_id, result_id)
        ends = asyncio.get_running_loop().time() + seconds
        with (
            self.expecting(team_id, result_id) if signal is None else contextlib.nullcontext(signal)
        ) as own:
            if is_new and not self.is_closing:  # closed before `own`: nothing would set it
                await is_set_by(own, ends)
            while True:
                own.clear()
                row = own.row
                if row is None or row.team_id != team_id:
                    row = await self._results.get(team_id, result_id)
                else:  # one row for all that wait for it, each of whom makes a response of it
                    await charge(row.output_size)
                is_over = asyncio.get_running_loop().time() >= ends or self.is_closing
                if row.state != "pending" or is_over or is_disconnected():
                    return row
                await is_set_by(own, ends)

    # --- reading the text -----------------------------------------------------------------------

    def reserve_place(self, team_id: str) -> None:
        """Reserve a place for the first reader or download of the present request.

        Raises TooManyStreamsError if the team has no room here for it.
        """
        if self._readers.are_full_for(team_id):
            raise TooManyStreamsError(
                f"{self._readers.count} streams are open already (LLM_MAX_STREAMS). Poll instead, "
                "or come back later.",
                headers={"Retry-After": "5"},
            )
        if (account := ACCOUNT.get()) is not None and not account.is_closed:
            account.at_end.enter_context(self._readers.reserved(team_id))

    def reading(
        self, team_id: str, result_id: UUID
    ) -> contextlib.AbstractContextManager[ResultSignal]:
        if (attempt := self._running.get(result_id)) is not None:
            attempt.live.set(True)
        return self._readers.subscribed(team_id, result_id)

    def is_read(self, result_id: UUID) -> bool:
        """Return if a stream of this process reads the result's text."""
        return result_id in self._readers

    def downloading(self, team_id: str) -> contextlib.AbstractContextManager[None]:
        """Count an export or a download among the streams."""
        return self._readers.placed(team_id)

    def running(self, result_id: UUID) -> RunningAttempt | None:
        return self._running.get(result_id)

    def announce(self, result_id: UUID) -> None:
        """Have the worker that runs a result, now or later, notify this process of its text."""
        self._to_announce.add(result_id)
        self._announce_now.set()

    # --- the worker of this process -------------------------------------------------------------

    def attach(self, attempt: RunningAttempt) -> None:
        self._running[attempt.claim.id] = attempt
        if attempt.claim.id in self._readers:  # since its attempt was made
            attempt.live.set(True)
        self._readers.wake(attempt.claim.id)

    def on_text(self, attempt: RunningAttempt) -> None:
        self._readers.wake(attempt.claim.id)

    def awaits(self, result_id: UUID) -> bool:
        return result_id in self._waiters or result_id in self._readers

    def deliver(self, record: asyncpg.Record) -> None:
        row = ResultRow.of(record)
        self._waiters.notify_end(row.id, row)
        self._readers.notify_end(row.id, row)

    def detach(self, attempt: RunningAttempt) -> None:
        """Forget an attempt whose end is committed, here or by another process."""
        result_id = attempt.claim.id
        if self._running.get(result_id) is attempt:
            del self._running[result_id]
        self._waiters.wake(result_id)
        self._readers.wake(result_id)

    # --- notifications --------------------------------------------------------------------------

    def _on_ended(self, payload: str) -> None:
        if not payload:  # (re)connected: earlier notifications are lost
            self._waiters.wake_all()
            return
        for result_id in split_ids(payload):
            attempt = self._running.get(result_id)
            # Otherwise the statement that ends it is about to return its row, for `deliver`.
            if attempt is None or not attempt.is_over:
                self._waiters.notify_end(result_id)
                self._readers.notify_end(result_id)

    def _on_appended(self, payload: str) -> None:
        if not payload:
            self._readers.wake_all()
            return
        for result_id in split_ids(payload):
            self._readers.wake(result_id)

    def _on_live_text(self, payload: str) -> None:
        if payload:  # otherwise APPENDED wakes all readers
            for text in from_payload(payload):
                self._readers.add(text)

    def _on_watched(self, payload: str) -> None:
        if not payload or is_question(payload):
            self._announce_all()
