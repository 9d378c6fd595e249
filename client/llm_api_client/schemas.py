"""Records of the service: results, prompts, models, servers. Members that a version lacks are None."""

import html
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any, Literal

import msgspec

from llm_api_client import notebook
from llm_api_client.errors import ResultFailedError

State = Literal["pending", "completed", "failed"]


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A record; unknown members of newer services are ignored."""

    def to_dict(self) -> dict[str, Any]:
        """All members as JSON has them."""
        members: dict[str, Any] = msgspec.to_builtins(self)
        return members


class ResultError(Record, frozen=True):
    """The reason of a failed result; `code` is stable (docs/errors.md of the service)."""

    code: str
    message: str
    retryable: bool = False

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


class Usage(Record, frozen=True):
    """Tokens, counted by the engine; None if it did not count them."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class Following(Record, frozen=True):
    """The attribution that was requested with a result; `id` once its text is completed."""

    index: str
    id: str | None = None


class Result(Record, frozen=True):
    """A result: `pending`, then `completed` or `failed`, and immutable from then on."""

    id: str
    state: State
    model_name: str
    kind: str = "generation"
    context_id: str | None = None
    model_version: int | None = None
    model_ready: bool | None = None
    # The generated text without the prompt; an object for other kinds: {"embedding": [...]}, {"score": ...},
    # {"scores": [...]}, or the whole attribution.
    result: str | dict[str, Any] | None = None
    error: ResultError | None = None
    finish_reason: str | None = None
    parameters: dict[str, Any] = {}
    usage: Usage | None = None
    attempt: int = 0
    continued: int = 0
    cancel_requested_at: datetime | None = None
    created_at: datetime | None = None
    updated_at: datetime | None = None
    started_at: datetime | None = None
    first_token_at: datetime | None = None
    finished_at: datetime | None = None
    metadata: dict[str, Any] = {}
    retry_of: str | None = None
    source_id: str | None = None
    attribution: Following | None = None
    # While pending: 1 runs next, 0 is running.
    queue_position: int | str | None = None
    estimated_wait_seconds: float | None = None
    logprobs: list[Any] | None = None
    prompt_logprobs: list[Any] | None = None
    erased_at: datetime | None = None
    # The result of an equal request that answered this one; it may be deleted since.
    reused: bool = False
    reused_from: str | None = None
    # In lists without `full=True`: `result` is only the beginning of the text.
    truncated: bool = False
    # The prompt: in lists with `prompts=True` its beginning, in exports the whole of it.
    prompt_start: str | None = None
    content: str | None = None
    messages: list[dict[str, Any]] | None = None

    @property
    def text(self) -> str:
        """The generated text so far; empty for other kinds of results."""
        return self.result if isinstance(self.result, str) else ""

    @property
    def vector(self) -> list[float] | None:
        """The vector of an embedding; None until it is completed, and for other kinds of results."""
        if self.kind != "embedding" or not isinstance(self.result, dict):
            return None
        return self.result.get("embedding")

    @property
    def scores(self) -> list[float] | None:
        """The scores of the documents in their order; None until it is completed, and for other kinds."""
        if self.kind != "score" or not isinstance(self.result, dict):
            return None
        return self.result.get("scores") or [self.result["score"]]

    @property
    def has_ended(self) -> bool:
        return self.state != "pending"

    @property
    def seconds(self) -> float | None:
        """Seconds that the model worked on it; None until it has ended, or if it never ran."""
        if self.started_at is None or self.finished_at is None:
            return None
        return (self.finished_at - self.started_at).total_seconds()

    def _repr_html_(self) -> str:
        tokens = self.usage.completion_tokens if self.usage else None
        return notebook.table(
            [
                ("id", html.escape(self.id)),
                ("model", html.escape(self.model_name)),
                ("state", notebook.state(self.state)),
                ("error", self.error and html.escape(str(self.error))),
                ("tokens", tokens),
                ("text", notebook.text(self.text)),
            ]
        )

    def checked(self) -> "Result":
        """This result if it is completed.

        Raises:
            ResultFailedError: it failed or was cancelled.
        """
        if self.state == "failed":
            raise ResultFailedError(self)
        return self


class Comparison(Record, frozen=True):
    """Results of one prompt, one for each model, in the order of the models."""

    results: list[Result]

    def __iter__(self) -> Iterator[Result]:
        return iter(self.results)

    def __len__(self) -> int:
        return len(self.results)

    def _repr_html_(self) -> str:
        def cells(shown: Callable[[Result], object]) -> list[object]:
            return [shown(result) for result in self.results]

        return notebook.columns(
            [
                ("model", cells(lambda one: html.escape(one.model_name))),
                ("state", cells(lambda one: notebook.state(one.state))),
                ("error", cells(lambda one: one.error and html.escape(str(one.error)))),
                ("tokens", cells(lambda one: one.usage and one.usage.completion_tokens)),
                ("time", cells(lambda one: one.seconds and f"{one.seconds:.2f} s")),
                ("text", cells(lambda one: notebook.text(one.text))),
            ]
        )


class Attempt(Record, frozen=True):
    """One run of a result by a worker."""

    attempt: int
    worker_id: str | None = None
    started_at: datetime | None = None
    ended_at: datetime | None = None
    counted: bool = True
    continued_from: int | None = None
    error: dict[str, str] | None = None


class Context(Record, frozen=True):
    """A stored prompt: a text, or the messages of a chat."""

    id: str
    content: str | None = None
    messages: list[dict[str, Any]] | None = None
    metadata: dict[str, Any] = {}
    created_at: datetime | None = None
    erased_at: datetime | None = None


class Model(Record, frozen=True):
    """A model that the service serves, or served before; `max_model_len` is in tokens."""

    name: str
    ready: bool
    version: int | None = None
    reason: str | None = None
    chat: bool = False
    max_model_len: int | None = None
    queued: int = 0
    running: int = 0
    tokens_per_second: float = 0.0


class Caller(Record, frozen=True):
    """The owner and the rights of an API key."""

    team_id: str
    scopes: list[str]
    max_priority: int = 0
    token_id: str | None = None
    is_authenticated: bool = True


class Span(Record, frozen=True, rename="camel"):
    """Tokens [left, right) of a text, which the corpus contains `count` times."""

    left: int
    right: int
    length: int
    count: int
    text: str
    unigram_logprob_sum: float = 0.0
    documents: list[dict[str, Any]] = []


class Attribution(Record, frozen=True, rename="camel"):
    """The parts of a text that a corpus contains, and the documents that contain them."""

    index: str
    input_tokens: list[str] = []
    spans: list[Span] = []


class Server(Record, frozen=True):
    """A Triton server, as the process that responded sees it."""

    name: str
    grpc: str
    healthy: bool
    state: str = "active"
    http: str | None = None
    metrics: str | None = None
    slots: int | None = None
    registered: bool = True
    error: str | None = None
    running: int = 0
    models: list[dict[str, Any]] = []


class Launch(Record, frozen=True):
    """A Triton server that the service started, and its job."""

    id: str
    name: str
    state: str
    model: str
    provider: str = ""
    profile: str = ""
    served_name: str = ""
    reason: str = ""
    job_id: str | None = None
    node: str | None = None
    server: dict[str, Any] | None = None
    exit_code: int | None = None
    created_at: datetime | None = None
    healthy_at: datetime | None = None
    ended_at: datetime | None = None
    spec: dict[str, Any] = {}


class Delivery(Record, frozen=True):
    """The delivery of one ended result to its webhook."""

    id: str
    result_id: str
    url: str
    state: str
    attempts: int = 0
    next_attempt_at: datetime | None = None
    created_at: datetime | None = None
    finished_at: datetime | None = None
    log: list[dict[str, Any]] = []
