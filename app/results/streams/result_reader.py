"""Live reading of one result: its text from a position on, until it is terminal.

Independent of any dialect: the packages of `api` encode these events.
"""

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import chain, zip_longest
from typing import Any
from uuid import UUID

from app.core.byte_budget import charge, release
from app.core.errors import (
    DatabaseUnavailableError,
    FieldError,
    InvalidRequestError,
    MemoryBusyError,
    NotFoundError,
)
from app.core.json_lists import behind, items_in_pieces
from app.core.waiting import SilenceTimer
from app.queue.live_text import LiveText
from app.results.rows import LOGPROBS_COPIES, ResultRow
from app.results.store import ResultStore
from app.results.streams.hub import StreamHub
from app.results.streams.subscribers import ResultSignal

# The text of one event: a slow reader gets and holds its text in pieces.
_MAX_CHARACTERS = 8192
_MAX_LISTS = 16  # of log probabilities that one event has, as they came from the engine
_POSITION = re.compile(r"([0-9]{1,9}):([0-9]{1,12})")


@dataclass(slots=True, frozen=True)
class Position:
    """An attempt, and the number of known code points of its text; the end is one further."""

    attempt: int = 0
    offset: int = 0

    def __str__(self) -> str:
        return f"{self.attempt}:{self.offset}"

    @classmethod
    def parse(cls, text: str, field: str) -> "Position":
        """Read `attempt:offset`. Raises InvalidRequestError."""
        match = _POSITION.fullmatch(text)
        if match is None:
            message = "must be `attempt:offset`, as the events' ids are"
            raise InvalidRequestError(f"{field}: {message}.", [FieldError(field, message)])
        return cls(int(match[1]), int(match[2]))

    @classmethod
    def of_end(cls, row: ResultRow) -> "Position":
        return cls(row.attempt, len(row.text) + 1)


@dataclass(slots=True, frozen=True)
class AttemptStarted:
    """Start of another text, which has the first `continued_from` code points of the last."""

    position: Position
    continued_from: int | None = None


@dataclass(slots=True, frozen=True)
class TextDelta:
    """More text; `position` is behind it.

    `tokens` are the log probabilities of further tokens, for a reader of tokens. They need not be
    the tokens of this text: a token may be half a character, or the beginning of a stop text.
    `completion_tokens` counts those of the attempt so far, where the engine reports it and this
    text is all there is at the moment.
    """

    position: Position
    text: str
    tokens: Sequence[Any] = ()
    completion_tokens: int | None = None


@dataclass(slots=True, frozen=True)
class Ended:
    """The result is terminal; nothing follows."""

    position: Position
    row: ResultRow


@dataclass(slots=True, frozen=True)
class KeepAlive:
    """No event for a while."""


Event = AttemptStarted | TextDelta | Ended | KeepAlive


@dataclass(slots=True, frozen=True)
class _Part:
    """The text behind a position, from one source."""

    attempt: int
    begins: int  # offset of the text in that attempt
    text: str
    has_more: bool = False  # that can be read at once
    ended: ResultRow | None = None
    tokens: Iterable[Sequence[Any]] = ()  # in short lists, each parsed when its event is made
    completion_tokens: int | None = None  # up to the end of all that can be read at once
    charge: int = 0  # of an ended result's texts


@dataclass(slots=True)
class ResultReader:
    """Reads one result from a position on. The caller has checked that it belongs to the team.

    With tokens, it reads from the beginning: positions do not count them. `continues`: an attempt
    that continues an earlier one begins where the reader is, instead of at its start.
    """

    hub: StreamHub
    results: ResultStore
    team_id: str
    result_id: UUID
    position: Position
    silence_seconds: float
    _: KW_ONLY
    with_tokens: bool = False
    continues: bool = False
    _is_announced: bool = field(default=False, init=False)
    _tokens: int = field(default=0, init=False)  # how many of the position's attempt are known

    async def events(self) -> AsyncGenerator[Event, None]:
        """Yield until the result is terminal or deleted, or the process stops; wait in outages.

        A keep-alive follows each silence, measured between events: neither reads nor notifications
        that yield none put it off.
        """
        with (
            self.hub.reading(self.team_id, self.result_id) as signal,
            contextlib.closing(SilenceTimer(signal, self.silence_seconds)) as silence,
        ):
            silence.restart()
            while not self.hub.is_closing:
                signal.clear()
                has_more = False
                try:
                    part = await self._read(signal)
                except NotFoundError:  # deleted
                    return
                except (DatabaseUnavailableError, MemoryBusyError):
                    pass
                else:
                    has_more = part.has_more
                    async for event in _in_rounds(self._advance(part)):
                        yield event
                        silence.restart()
                    if part.ended is not None:
                        yield Ended(Position.of_end(part.ended), part.ended)
                        release(part.charge)
                        return
                if has_more:
                    await asyncio.sleep(0)
                    continue
                if not silence.has_expired:  # during the read
                    await signal.wait()
                if silence.has_expired:
                    yield KeepAlive()
                    silence.restart()

    async def _read(self, signal: ResultSignal) -> _Part:
        """The text behind the position, from the first source that has it.

        In this order: the row of an end in this process, the memory of an attempt that runs here,
        the notifications of one that runs elsewhere, its stored chunks, the stored row.
        """
        if (row := signal.row) is not None:  # one row for all its readers, each with its events
            return await self._from_row(row, await charge(row.output_size))
        part = self._from_memory()
        if part is None and not signal.is_end:
            part = self._from_notifications(signal.take()) or await self._from_chunks()
        if part is None:
            part = await self._from_row(
                *await self.results.get_charged(self.team_id, self.result_id)
            )
        return part

    def _from_memory(self) -> _Part | None:
        attempt = self.hub.running(self.result_id)
        # This process has lost an attempt that is older than the reader's, and has not noticed yet.
        if attempt is None or attempt.claim.attempt < self.position.attempt:
            return None
        self._is_announced = False  # it may run elsewhere later
        number, resume = attempt.claim.attempt, attempt.claim.resume
        offset = self._offset_in(number)
        if number != self.position.attempt and self.continues and resume is not None:
            offset = resume.kept_of(self.position.attempt, self.position.offset)
        text, known = attempt.text.since(offset, _MAX_CHARACTERS), self._tokens_in(number)
        tokens = attempt.tokens.since(known, _MAX_LISTS) if self.with_tokens else ()
        has_tokens = bool(tokens) and known + len(tokens) < len(attempt.tokens)
        return _Part(
            number,
            offset,
            text,
            has_more=has_tokens or offset + len(text) < len(attempt.text),
            tokens=(tokens,) if tokens else (),
            completion_tokens=attempt.completion_tokens or None,
        )

    def _from_notifications(self, texts: Sequence[LiveText]) -> _Part | None:
        """The text that came in notifications, if it continues the reader's without a gap."""
        if not texts or self.with_tokens:
            return None
        attempt, begins, text = self.position.attempt, self.position.offset, ""
        for one in texts:
            if one.attempt > attempt and one.offset == 0 and not text:
                attempt, begins = one.attempt, 0
            known = begins + len(text)
            if one.attempt > attempt or (one.attempt == attempt and one.offset > known):
                return None
            if one.attempt == attempt:
                text += one.text[known - one.offset :]
        return _Part(attempt, begins, text, completion_tokens=texts[-1].completion_tokens)

    async def _from_chunks(self) -> _Part | None:
        position = self.position
        stored = await self.results.text_since(
            self.result_id, position.attempt, position.offset, continues=self.continues
        )
        if not stored.is_pending:
            return None
        if not self._is_announced:
            self._is_announced = True  # and the hub announces it from time to time
            self.hub.announce(self.result_id)
        lists = stored.logprobs if self.with_tokens else ()
        return _Part(
            stored.attempt,
            stored.begins,
            stored.text,
            has_more=stored.has_more,
            tokens=chain.from_iterable(map(items_in_pieces, lists)),
            completion_tokens=stored.completion_tokens,
        )

    async def _from_row(self, row: ResultRow, amount: int) -> _Part:
        position, since = self.position, row.text_attempt
        offset = self._offset_in(row.attempt)
        if self.continues and since is not None and since <= position.attempt < row.attempt:
            kept = await self.results.continued_from(self.result_id, position.attempt)
            offset = min(position.offset, kept, len(row.text))
        tokens: Iterable[Sequence[Any]] = ()
        if self.with_tokens and row.logprobs is not None:
            try:
                amount += await charge(LOGPROBS_COPIES * len(row.logprobs))
            except MemoryBusyError:
                release(amount)
                raise
            tokens = behind(row.logprob_pieces(), self._tokens_in(row.attempt))
        return _Part(
            row.attempt,
            offset,
            row.text[offset:],
            ended=row,
            tokens=tokens,
            completion_tokens=row.completion_tokens,
            charge=amount,
        )

    def _offset_in(self, attempt: int) -> int:
        return self.position.offset if attempt == self.position.attempt else 0

    def _tokens_in(self, attempt: int) -> int:
        return self._tokens if attempt == self.position.attempt else 0

    def _advance(self, part: _Part) -> Iterator[Event]:
        if part.attempt > self.position.attempt:
            self.position, self._tokens = Position(part.attempt, part.begins), 0
            yield AttemptStarted(self.position, part.begins or None)
        begins = range(0, len(part.text), _MAX_CHARACTERS)
        texts = (part.text[start : start + _MAX_CHARACTERS] for start in begins)
        left = len(part.text)
        for text, tokens in zip_longest(texts, part.tokens):
            left -= len(text or "")
            self.position = Position(part.attempt, self.position.offset + len(text or ""))
            self._tokens += len(tokens or ())
            count = None if left or part.has_more else part.completion_tokens
            yield TextDelta(self.position, text or "", tokens or (), count)


async def _in_rounds(events: Iterable[Event]) -> AsyncGenerator[Event, None]:
    """The events; other tasks run between two of them."""
    for number, event in enumerate(events):
        if number:
            await asyncio.sleep(0)
        yield event
