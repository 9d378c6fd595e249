"""Results, their history and text, and workers in the queue's model."""

from dataclasses import dataclass, field
from uuid import UUID

from app.queue.continuation import Resume
from app.queue.enqueue import NewResult
from app.queue.progress import Chunk
from app.queue.suspects import OWN_PAUSES

SUSPECT = 2
PAUSE_SECONDS = 150.0  # of suspects, after one was released: its own time depends on the machine's
_MAX_FRUITLESS = 2
ANY_FAULT = "the text cannot be continued"


@dataclass(slots=True)
class Entry:
    """One attempt in the history of a result."""

    attempt: int
    worker: UUID | None
    counted: bool
    continued_from: int | None
    error: str | None


@dataclass(slots=True)
class Answer:
    """The output of an attempt, and its error."""

    text: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    finish_reason: str | None = None
    error: str | None = None
    keeps_text: bool = False
    continued: bool = False
    continued_from: int | None = None
    pause: float = 0.0


@dataclass(slots=True)
class Modelled:
    """A result as its row and its chunks should be."""

    sent: NewResult
    deadline: float
    fair_key: float
    state: str = "pending"
    worker: UUID | None = None
    attempt: int = 0
    lost_attempts: int = 0
    engine_deaths: int = 0
    text_attempt: int | None = None
    continuations: int = 0
    not_before: float | None = None
    is_cancelled: bool = False
    history: list[Entry] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    answer: Answer = field(default_factory=Answer)
    ends: int = 0

    @property
    def is_queued(self) -> bool:
        return self.state == "pending" and self.worker is None

    @property
    def is_running(self) -> bool:
        return self.state == "pending" and self.worker is not None

    @property
    def is_suspect(self) -> bool:
        return self.state == "pending" and self.engine_deaths >= SUSPECT

    def pause_if_suspect(self, team: str, now: float) -> None:
        """Wait: a suspect of the team ran, and others wait for its model."""
        if self.is_suspect:
            seconds = PAUSE_SECONDS * (OWN_PAUSES if self.sent.team_id == team else 1)
            self.not_before = max(self.not_before or 0.0, now + seconds)

    @property
    def place(self) -> tuple[int, float, UUID]:
        """Its place in the order of claims."""
        return -self.sent.priority, self.fair_key, self.sent.id

    def kept(self) -> list[Chunk]:
        """The chunks of its present text, in order."""
        first = self.attempt if self.text_attempt is None else self.text_attempt
        found = [one for one in self.chunks if one.attempt >= first]
        return sorted(found, key=lambda one: (one.offset, one.attempt))

    def kept_answer(self) -> Answer:
        chunks = self.kept()
        return Answer(
            text="".join(one.text for one in chunks),
            prompt_tokens=max((one.prompt_tokens or 0 for one in chunks), default=None),
            completion_tokens=max((one.completion_tokens or 0 for one in chunks), default=None),
        )

    def resume(self, *, continues: bool) -> Resume | None:
        """Return the text that its present attempt is to continue."""
        if self.text_attempt is None:
            return None
        chunks = [chunk for chunk in self.kept() if chunk.attempt < self.attempt]
        fruitless = sum(
            entry.attempt > chunks[-1].attempt and entry.counted for entry in self.history
        )
        if not continues or fruitless >= _MAX_FRUITLESS:
            return Resume(fault=ANY_FAULT)
        ids, tokens = b"".join(one.token_ids or b"" for one in chunks), self.kept_answer()
        begins = {chunk.attempt: chunk.offset for chunk in reversed(chunks)}
        return Resume(
            text="".join(chunk.text for chunk in chunks),
            token_ids=ids if len(ids) == 4 * (tokens.completion_tokens or 0) else None,
            prompt_tokens=tokens.prompt_tokens,
            completion_tokens=tokens.completion_tokens or 0,
            begins=tuple(sorted(begins.items())),
        )


@dataclass(slots=True)
class ModelledWorker:
    lease_ends: float
    dead_at: float | None = None
