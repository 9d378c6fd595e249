"""Workers as the queue's model sees them: they generate, store and end text as `app/worker` does."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from uuid import UUID

from app.core.errors import Failure, FailureCode
from app.queue.claim import Claim
from app.queue.finish import AttemptEnd, AttemptOutcome
from app.queue.progress import Chunk
from tests.integration.queue.queue_tables import HALF_UNIT

PAUSE_SECONDS = float(HALF_UNIT)
_ERRORS = {
    AttemptOutcome.FAILED: Failure(FailureCode.INVALID_REQUEST, "No.", False),
    AttemptOutcome.LOST: Failure(FailureCode.TRITON_LOST, "Lost.", True),
}
_STARTS_OVER = Failure(FailureCode.NOT_CONTINUED, "The next attempt starts over.", True)


@dataclass(slots=True)
class Attempt:
    """An attempt as its worker sees it."""

    claim: Claim
    worker: UUID
    text: str = ""
    tokens: int = 0
    stored: int = 0  # code points
    ids: bytes = b""  # of tokens that are not stored
    lacks_ids: bool = False
    has_answered: bool = False

    def __post_init__(self) -> None:
        if (resume := self.claim.resume) is not None:
            self.text, self.tokens = resume.text, resume.completion_tokens
            self.stored, self.lacks_ids = len(self.text), resume.token_ids is None

    def must_start_over(self, *, by_text: bool) -> bool:
        """Return whether it cannot continue the text that it was to continue."""
        resume = self.claim.resume
        return resume is not None and (
            resume.fault is not None or (resume.token_ids is None and not by_text)
        )

    def generate(self, tokens: int, *, with_id: bool, by_text: bool) -> None:
        """Generate tokens of two code points each, other letters in each attempt."""
        if tokens and not self.must_start_over(by_text=by_text):
            self.text += tokens * (chr(ord("a") + self.claim.attempt % 26) + "é")
            self.tokens, self.has_answered = self.tokens + tokens, True
            self.ids += tokens * bytes(4) * with_id
            self.lacks_ids |= not with_id

    def take_chunks(self) -> list[Chunk]:
        offset, self.stored = self.stored, len(self.text)
        ids, self.ids = self.ids, b""
        if offset == self.stored:
            return []
        return [
            Chunk(
                self.claim.id, self.claim.attempt, offset, self.text[offset:], 7, self.tokens,
                token_ids=ids or None,
            )
        ]  # fmt: skip

    def end(self, outcome: AttemptOutcome, *, by_text: bool, starts_over: bool) -> AttemptEnd:
        """Return its end; one that cannot continue its text is returned to start over."""
        resume = self.claim.resume
        can_start_over = resume is not None and not self.has_answered
        starts_over = (starts_over and can_start_over) or self.must_start_over(by_text=by_text)
        if starts_over:
            outcome, resume = AttemptOutcome.RETURNED, None
        is_requeued = outcome in (AttemptOutcome.LOST, AttemptOutcome.RETURNED)
        is_usable = by_text or not self.lacks_ids
        return AttemptEnd(
            self.claim.id,
            self.claim.attempt,
            outcome,
            output=self.text,
            finish_reason="stop" if outcome is AttemptOutcome.COMPLETED else None,
            prompt_tokens=7 if self.has_answered else None,
            completion_tokens=self.tokens,
            failure=_STARTS_OVER if starts_over else _ERRORS.get(outcome),
            retry_after_seconds=0.0 if starts_over or not is_requeued else PAUSE_SECONDS,
            keeps_text=is_requeued and self.claim.resumable and is_usable and not starts_over
            and self.text != "",
            continued_from=len(resume.text) if resume else None,
            continued=resume is not None and self.has_answered,
        )  # fmt: skip


@dataclass(slots=True)
class Dispatcher:
    """The worker of the process that enqueues, with some free slots."""

    worker_id: UUID
    room: int
    begun: list[UUID] = field(default_factory=list)
    started: list[Claim] = field(default_factory=list)

    def reserve(self, results: Sequence[tuple[str, int]]) -> list[bool]:
        return [place < self.room for place in range(len(results))]

    def begin(self, claims: Sequence[Claim]) -> None:
        self.begun += [claim.id for claim in claims]

    def confirm(self, worker_id: UUID, claims: Sequence[Claim]) -> None:
        assert worker_id == self.worker_id
        self.begun.clear()
        self.started += claims

    def abort(self, worker_id: UUID) -> None:
        assert worker_id == self.worker_id
        self.begun.clear()
