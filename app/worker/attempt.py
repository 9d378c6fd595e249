"""One attempt of one result: its text so far, its stop, its end.

A backend does the work: Triton (`triton_backend`), or an index (`attribution_backend`).
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from app.core.errors import CANCELLED, DEADLINE_EXCEEDED, Failure
from app.inference.server_pool import DeadEngine
from app.inference.triton_session import LiveSwitch
from app.queue.claim import Claim
from app.queue.finish import AttemptEnd, AttemptOutcome
from app.queue.live_text import LiveText, fits
from app.queue.progress import Chunk
from app.results.streams.output_buffer import OutputBuffer, TokenLog

# Before a result goes back to the queue's front: time for its backend to come up again.
_NOT_TAKEN_PAUSE_SECONDS = 1.0  # seconds
_LOST_PAUSE_SECONDS = 0.5

OnText = Callable[["Attempt"], None]
# Where an attempt runs, and what dies there together: a server and a model, or a queue.
Target = tuple[str, ...]


class StopReason(Enum):
    """Why an attempt is stopped from outside."""

    CANCELLED = auto()  # the user asked, or deleted the result
    SHUTDOWN = auto()  # the worker stops: hand the result back
    MODEL_DIED = auto()  # Triton keeps the stream open, but nothing will come any more
    NOT_OURS = auto()  # another worker may own it: stop and write nothing


@dataclass(slots=True)
class Flushes:
    """The writes of an attempt's text while it ran: times in seconds since 1970."""

    first: float
    last: float
    count: int = 0
    slowest: float = 0.0  # seconds

    def add(self, began: float, ended: float) -> None:
        self.count += 1
        self.last = ended
        self.slowest = max(self.slowest, ended - began)


class Attempt(ABC):
    """One attempt in progress; `on_text` is called with it whenever its text has grown."""

    def __init__(self, claim: Claim, on_text: OnText) -> None:
        self.claim = claim
        self.target: Target = (claim.model_name,)
        self.text = OutputBuffer()
        self.tokens = TokenLog()  # filled where log probabilities are asked for
        self.prompt_logprobs: str | None = None  # as JSON
        self.vector: bytes | None = None  # of a pooling model, little-endian FP32
        self.completion_tokens = 0  # of the whole text
        self.prompt_tokens: int | None = None
        self.finish_reason: str | None = None
        self.model_version: int | None = None
        self.first_token_seconds: float | None = None
        self.is_over = False  # nothing more is received; its end may not be committed yet
        self.model_is_dead = False  # its backend reported so when this attempt was sent
        self.asked_at = asyncio.get_running_loop().time()
        self.heard_at = self.asked_at  # of the last response, or the start
        self.has_answered = False
        self.starts_over = False  # the text cannot be continued: the next attempt begins again
        self.flushes: Flushes | None = None  # counted where it is traced
        self.live = LiveSwitch()  # on while its text is read as it is made
        self.readers: Sequence[str] = ()  # ids of the other processes that read its text
        self._on_text = on_text
        self._kept = 0  # code points that were taken to be stored as chunks
        self._sent = 0  # code points that readers in other processes were sent, or find stored
        self._tokens_kept = 0
        self.keeps_text_without_ids = False  # the next attempt may continue it by its text
        self._lacks_ids = False  # some tokens came without their ids
        self._ids = bytearray()  # of the tokens that are not stored, as little-endian INT32
        if claim.resume is not None:
            self.text.append(claim.resume.text)
            self.completion_tokens = claim.resume.completion_tokens
            self.prompt_tokens = claim.resume.prompt_tokens
            self._kept = self._sent = len(self.text)
            self._lacks_ids = claim.resume.token_ids is None
        self._task: asyncio.Task[object] | None = None
        self._stop_reason: StopReason | None = None

    def stop(self, reason: StopReason) -> None:
        """End the work soon; without effect once it has ended by itself."""
        if self._stop_reason is None:
            self._stop_reason = reason
            if self._task is not None:
                self._task.cancel()

    async def run(self) -> AttemptEnd | None:
        """Work to the end; None when the attempt is not ours to write any more."""
        if self._stop_reason is None:
            self._task = asyncio.current_task()
        try:
            outcome, failure = await self._work_in_time()
        except asyncio.CancelledError:
            if self._stop_reason is None:
                raise
            outcome, failure = self._stopped(self._stop_reason)
        finally:
            self._task = None
            self.is_over = True
        if self._stop_reason is StopReason.NOT_OURS:
            return None
        return self._end(outcome, failure)

    async def _work_in_time(self) -> tuple[AttemptOutcome, Failure | None]:
        if self._stop_reason is not None:
            return self._stopped(self._stop_reason)
        self.asked_at = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(max(0.0, self.claim.seconds_left)):
                return await self._work()
        except TimeoutError:
            return AttemptOutcome.FAILED, DEADLINE_EXCEEDED

    @abstractmethod
    async def _work(self) -> tuple[AttemptOutcome, Failure | None]:
        """Do the work and emit its text; how it ended. Cancelled when the attempt is stopped."""

    @abstractmethod
    def _lost(self) -> Failure:
        """The failure of a result whose last attempt the backend's death ended."""

    @property
    def generated_tokens(self) -> int:
        """Tokens of this attempt alone."""
        resume = self.claim.resume
        return self.completion_tokens - (resume.completion_tokens if resume else 0)

    @property
    def has_chunks(self) -> bool:
        """Return whether text of this attempt or an earlier one may be stored, or is about to be."""
        return self._kept > 0 or self.claim.attempt > 1

    def take_live(self) -> LiveText | None:
        """The text since the last call, or since `take_chunk` for readers; None if it is to be stored.

        Log probabilities are stored, and a text that is too long for a notification.
        """
        offset, self._sent = self._sent, len(self.text)
        text = LiveText(
            *(self.claim.id, self.claim.attempt, offset, self.completion_tokens),
            self.text.since(offset),
        )
        return text if len(self.tokens) == 0 and fits(text) else None

    def take_chunk(self, *, is_last: bool = False) -> Chunk | None:
        """The text since the last call; once it has ended only if `is_last`."""
        if (self.is_over and not is_last) or self._kept == len(self.text):
            return None
        chunk = Chunk(
            result_id=self.claim.id,
            attempt=self.claim.attempt,
            offset=self._kept,
            text=self.text.since(self._kept),
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            logprobs=self.tokens.parts(self._tokens_kept),
            token_ids=bytes(self._ids) or None,
        )
        self._kept, self._tokens_kept = len(self.text), len(self.tokens)
        self._ids.clear()
        return chunk

    def _emit(self, text: str) -> None:
        self.text.append(text)
        self._on_text(self)

    def _stopped(self, reason: StopReason) -> tuple[AttemptOutcome, Failure | None]:
        if reason is StopReason.CANCELLED:
            return AttemptOutcome.FAILED, CANCELLED
        if reason is StopReason.MODEL_DIED:
            return AttemptOutcome.LOST, self._lost()
        return AttemptOutcome.RETURNED, None

    def _end(self, outcome: AttemptOutcome, failure: Failure | None) -> AttemptEnd:
        pauses = {
            AttemptOutcome.RETURNED: _NOT_TAKEN_PAUSE_SECONDS if failure else 0.0,
            AttemptOutcome.LOST: _LOST_PAUSE_SECONDS,
        }
        if self.starts_over:
            pauses = {}
        is_requeued = outcome in (AttemptOutcome.LOST, AttemptOutcome.RETURNED)
        is_usable = self.keeps_text_without_ids or not self._lacks_ids
        keeps_text = is_requeued and self.claim.resumable and is_usable and not self.starts_over
        resume = None if self.starts_over else self.claim.resume
        return AttemptEnd(
            result_id=self.claim.id,
            attempt=self.claim.attempt,
            outcome=outcome,
            output=str(self.text),
            finish_reason=self.finish_reason,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            logprobs=self.tokens.parts(),
            prompt_logprobs=self.prompt_logprobs,
            vector=self.vector,
            model_version=self.model_version,
            first_token_seconds=self.first_token_seconds,
            failure=failure,
            retry_after_seconds=pauses.get(outcome, 0.0),
            has_attribution=self.claim.has_attribution,
            has_webhook=self.claim.has_webhook,
            has_chunks=self.has_chunks,
            keeps_text=keeps_text and len(self.text) > 0,
            continued_from=len(resume.text) if resume else None,
            continued=resume is not None and self.has_answered,
        )


class Backend(Protocol):
    """The servers or engines that run the claims of a worker.

    The defaults are those of engines that this process starts: it sees their death at once.
    """

    def ready(self) -> list[str]:
        """Return the queues that may be claimed from now."""

    def free(self, attempts: Collection[Attempt], exclude: Collection[str] = ()) -> dict[str, int]:
        """Return how many more results of each queue may be claimed; `exclude` are empty queues."""

    def on_change(self, handler: Callable[[], None]) -> None: ...

    def attempt(self, claim: Claim, on_text: OnText) -> Attempt: ...

    def record_outcome(self, target: Target, end: AttemptEnd) -> None:
        """Learn from the end of an attempt there whether its engine works."""

    def servers(self, _attempts: Collection[Attempt]) -> Mapping[str, int]:
        """Return the number of these attempts on each Triton server."""
        return {}

    def silent_targets(self, _attempts: Collection[Attempt]) -> list[Target]:
        """Return the targets of these attempts that answered nothing for long."""
        return []

    async def is_dead(self, _target: Target) -> bool:
        """Return whether the engine of a silent target is dead."""
        return False

    def dead_engines(self) -> Mapping[str, Mapping[str, DeadEngine]]:
        """Return the dead engines by model, then by server."""
        return {}

    async def close(self) -> None:
        """End the background tasks."""
