"""One attempt of one result against Triton: read the stream, keep the text, tell how it ended."""

import asyncio
from collections.abc import Callable
from enum import Enum, auto

from app.errors import CANCELLED, DEADLINE_EXCEEDED, Failure, FailureCode
from app.job_queue import AttemptEnd, Chunk, Claim, Outcome
from app.transcript import TokenLog, Transcript
from app.triton_client import (
    Delta,
    GenerationError,
    ModelDeadError,
    ModelFailedError,
    NotTakenError,
    RefusedError,
    TritonClient,
)

# Before a result goes back to the queue's front: time for Triton to come up again.
_NOT_TAKEN_PAUSE = 1.0  # seconds
_LOST_PAUSE = 0.5


class StopReason(Enum):
    """Why an attempt is stopped from outside."""

    CANCELLED = auto()  # the user asked, or deleted the result
    SHUTDOWN = auto()  # the worker stops: hand the result back
    MODEL_DIED = auto()  # Triton keeps the stream open, but nothing will come any more
    NOT_OURS = auto()  # another worker may own it: stop and write nothing


class Attempt:
    """One attempt in progress: what the model has said, and how to stop it.

    `on_text` is called with the attempt whenever its text has grown.
    """

    def __init__(
        self, claim: Claim, triton: TritonClient, on_text: Callable[["Attempt"], None]
    ) -> None:
        self.claim = claim
        self.text = Transcript()
        self.tokens = TokenLog()  # filled where log probabilities are asked for
        self.completion_tokens = 0
        self._triton = triton
        self._on_text = on_text
        self._kept = 0  # code points that were taken to be stored as chunks
        self._tokens_kept = 0
        self._prompt_tokens: int | None = None
        self._finish_reason: str | None = None
        self._model_version: int | None = None
        self._first_token_seconds: float | None = None
        self._task: asyncio.Task[object] | None = None
        self._stop_reason: StopReason | None = None
        self.is_over = False  # nothing more is heard; its end may not be committed yet
        self.model_is_dead = False  # Triton said so when it was asked to take this attempt
        self._asked_at = asyncio.get_running_loop().time()
        self.heard_at = self._asked_at  # of the last response, or the start
        self.has_answered = False

    def stop(self, reason: StopReason) -> None:
        """End the generation soon; without effect once it has ended by itself."""
        if self._stop_reason is None:
            self._stop_reason = reason
            if self._task is not None:
                self._task.cancel()

    async def run(self) -> AttemptEnd | None:
        """Generate to the end; None when the attempt is not ours to write any more."""
        if self._stop_reason is None:
            self._task = asyncio.current_task()
        try:
            outcome, failure = await self._generate()
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

    async def _generate(self) -> tuple[Outcome, Failure | None]:
        if self._stop_reason is not None:
            return self._stopped(self._stop_reason)
        claim = self.claim
        self._asked_at = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(max(0.0, claim.seconds_left)):
                await self._triton.run(claim.model_name, claim.prompt, claim.parameters, self._hear)
        except TimeoutError:
            return Outcome.FAILED, DEADLINE_EXCEEDED
        except GenerationError as error:
            return self._judge(error)
        if self._finish_reason is None:
            return Outcome.LOST, _triton_lost("the stream ended without a finish reason")
        return Outcome.COMPLETED, None

    def _hear(self, delta: Delta) -> None:
        self.heard_at = asyncio.get_running_loop().time()
        self.has_answered = True
        if self._first_token_seconds is None and delta.text:
            self._first_token_seconds = self.heard_at - self._asked_at
        self._add(delta)

    def _judge(self, error: GenerationError) -> tuple[Outcome, Failure | None]:
        """What an error of the stream means for the attempt."""
        if isinstance(error, RefusedError):
            return Outcome.FAILED, Failure(FailureCode.INVALID_REQUEST, str(error), False)
        if isinstance(error, ModelFailedError):
            return Outcome.FAILED, Failure(FailureCode.MODEL_ERROR, str(error), True)
        self.model_is_dead = isinstance(error, ModelDeadError)
        outcome = Outcome.RETURNED if isinstance(error, NotTakenError) else Outcome.LOST
        return outcome, _triton_lost(error)

    def _add(self, delta: Delta) -> None:
        if delta.text:
            self.text.append(delta.text)
        if delta.prompt_tokens:
            self._prompt_tokens = delta.prompt_tokens
        self.completion_tokens += delta.completion_tokens
        if delta.finish_reason is not None:
            self._finish_reason = delta.finish_reason
            self.is_over = True
        if delta.logprobs is not None:
            self.tokens.append(delta.logprobs)
        if delta.model_version is not None:
            self._model_version = delta.model_version
        if delta.text:
            self._on_text(self)

    def take_chunk(self) -> Chunk | None:
        """The text since the last call, to be kept in the database; none once it has ended."""
        if self.is_over or self._kept == len(self.text):
            return None
        chunk = Chunk(
            result_id=self.claim.id,
            attempt=self.claim.attempt,
            offset=self._kept,
            text=self.text.since(self._kept),
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self.completion_tokens,
            logprobs=self.tokens.to_json(self._tokens_kept),
        )
        self._kept, self._tokens_kept = len(self.text), len(self.tokens)
        return chunk

    def _stopped(self, reason: StopReason) -> tuple[Outcome, Failure | None]:
        if reason is StopReason.CANCELLED:
            return Outcome.FAILED, CANCELLED
        if reason is StopReason.MODEL_DIED:
            return Outcome.LOST, _triton_lost("the model's process died")
        return Outcome.RETURNED, None

    def _end(self, outcome: Outcome, failure: Failure | None) -> AttemptEnd:
        pauses = {Outcome.RETURNED: _NOT_TAKEN_PAUSE if failure else 0.0, Outcome.LOST: _LOST_PAUSE}
        return AttemptEnd(
            result_id=self.claim.id,
            attempt=self.claim.attempt,
            outcome=outcome,
            output=str(self.text),
            finish_reason=self._finish_reason,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self.completion_tokens,
            logprobs=self.tokens.to_json(),
            model_version=self._model_version,
            first_token_seconds=self._first_token_seconds,
            failure=failure,
            retry_after_seconds=pauses.get(outcome, 0.0),
        )


def _triton_lost(reason: object) -> Failure:
    return Failure(
        FailureCode.TRITON_LOST,
        f"Triton was lost in mid-request, in every attempt allowed ({reason}). Send again; if it "
        "recurs, look at Triton's log.",
        True,
    )
