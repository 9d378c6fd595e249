"""Rows of `results` as their readers get them, and the errors of failed and erased ones."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import chain
from operator import itemgetter
from typing import Any, Literal, NamedTuple, Self
from uuid import UUID

import asyncpg
import orjson

from app.core.errors import ErasedError, FailureCode, ResultFailedError
from app.core.ids import unix_seconds
from app.core.json_lists import items_in_pieces
from app.queue.enqueue import Kind
from app.results.sizes import VECTOR_COPIES

State = Literal["pending", "completed", "failed"]
# Size of log probabilities as objects and in a dialect's JSON, beside those of other texts.
LOGPROBS_COPIES = 2


class ResultRow(NamedTuple):
    """A result as stored; JSON members are JSON text.

    A tuple, because each poll makes one: a frozen dataclass of this size takes ten times as long.
    """

    id: UUID
    team_id: str
    context_id: UUID
    model_name: str
    model_version: int | None
    state: State
    output: str | None
    error_code: str | None
    error_message: str | None
    error_retryable: bool | None
    finish_reason: str | None
    parameters: str
    prompt_tokens: int | None
    completion_tokens: int | None
    attempt: int
    cancel_requested_at: datetime | None
    started_at: datetime | None
    first_token_at: datetime | None
    finished_at: datetime | None
    metadata: str
    retry_of: UUID | None
    logprobs: str | None
    erased_at: datetime | None
    store: bool
    request: str | None
    kind: Kind
    source_id: UUID | None
    attribution: str | None
    text_attempt: int | None
    continuations: int
    prompt_logprobs: str | None
    vector: bytes | None
    reused_from: UUID | None = None

    @classmethod
    def of(cls, record: asyncpg.Record) -> Self:
        """The row of a record that has at least these columns, in any order."""
        return cls._make(_VALUES(record))

    @property
    def text(self) -> str:
        return self.output or ""

    @property
    def output_size(self) -> int:
        """The size of its output with log probabilities, or of its vector as JSON."""
        return len(self.text) + self.logprobs_size

    @property
    def logprobs_size(self) -> int:
        vector = VECTOR_COPIES * len(self.vector or b"")
        return len(self.logprobs or "") + len(self.prompt_logprobs or "") + vector

    def numbers(self) -> list[float]:
        """The vector of an embedding, or the scores of a query's documents."""
        return list(map(float, memoryview(self.vector or b"").cast("f")))

    def encoded_numbers(self) -> orjson.Fragment:
        """The same as JSON text: an answer of many vectors is not encoded in one call."""
        return orjson.Fragment(orjson.dumps(self.numbers()))

    def token_logprobs(self) -> list[Any]:
        """The log probabilities, an item per token; empty where they were not asked for."""
        return list(chain.from_iterable(self.logprob_pieces()))

    def logprob_pieces(self) -> Iterator[list[Any]]:
        """The same in short lists, each parsed when it is taken."""
        return items_in_pieces(self.logprobs) if self.logprobs else iter(())

    def prompt_token_logprobs(self) -> list[Any]:
        """Those of the prompt: null for its first token, each token's own entry first."""
        return list(chain.from_iterable(items_in_pieces(self.prompt_logprobs or "[]")))


_VALUES: Callable[[asyncpg.Record], tuple[Any, ...]] = itemgetter(*ResultRow._fields)


@dataclass(slots=True, frozen=True)
class ListedResult:
    """A result on a page; `prompt_start` is None where the page has none."""

    row: ResultRow
    prompt_start: str | None
    truncated: bool  # `row` does not have all of the output


@dataclass(slots=True, frozen=True)
class ExportedResult:
    """A result with its prompt: `content`, or `messages` as JSON text; neither once it is erased."""

    row: ResultRow
    content: str | None
    messages: str | None


@dataclass(slots=True, frozen=True)
class SubmittedRequest:
    """A result's request and state, to submit the same again or to attribute its text."""

    id: UUID
    state: State
    context_id: UUID
    model_name: str
    prompt: str | None
    parameters: str
    priority: int
    metadata: str
    deadline_seconds: float | None
    webhook_url: str | None
    store: bool
    erased_at: datetime | None
    kind: Kind
    source_id: UUID | None
    attribution: str | None
    output: str | None
    retain_seconds: float | None
    resumable: bool


@dataclass(slots=True, frozen=True)
class AttemptsRow:
    """The history of a result's attempts (JSON text), and its present or last one."""

    attempt_history: str
    attempt: int
    state: State
    worker_id: UUID | None
    started_at: datetime | None
    finished_at: datetime | None
    error_code: str | None
    error_message: str | None
    continued_from: int | None


@dataclass(slots=True, frozen=True)
class EndedResult:
    """A terminal result, for statistics."""

    id: UUID
    team_id: str
    model_name: str
    ended_as: str  # its error's code, or `completed`
    prompt_tokens: int | None
    completion_tokens: int | None
    started_at: datetime | None
    first_token_at: datetime | None
    finished_at: datetime
    max_tokens: float | None
    is_counted: bool  # in the totals of its minute, which are kept for some days
    is_recent: bool
    is_long: bool  # its words are still to be found
    kind: str
    is_chat: bool  # its prompt was rendered of messages

    # Unix times in seconds.

    @property
    def created(self) -> float:
        return unix_seconds(self.id)  # other ids have no date

    @property
    def started(self) -> float | None:
        return None if self.started_at is None else self.started_at.timestamp()

    @property
    def first_token(self) -> float | None:
        return None if self.first_token_at is None else self.first_token_at.timestamp()

    @property
    def ended(self) -> float:
        return self.finished_at.timestamp()

    @property
    def seconds_per_token(self) -> float | None:
        """Mean time from one token to the next; None before a second one."""
        tokens, first = self.completion_tokens or 0, self.first_token
        if self.started_at is None or first is None or tokens < 2:
            return None
        return max(0.0, self.ended - first) / (tokens - 1)


def erased(row: ResultRow | SubmittedRequest) -> ErasedError:
    return ErasedError(
        f"Result {row.id} was sent with `store` false: its texts were erased at "
        f"{row.erased_at:%Y-%m-%dT%H:%M:%SZ}."
    )


def failure_of(row: ResultRow) -> ResultFailedError:
    """The error of a failed result, for a dialect that has no results."""
    assert row.error_code is not None
    assert row.error_message is not None
    return ResultFailedError(
        FailureCode(row.error_code), row.error_message, {"result_id": str(row.id)}
    )
