"""The steps of an operation: requests, reads and pauses, described without doing any of them.

An operation is a generator that yields steps and receives their outcomes. A driver performs the steps,
either in the calling thread or in an event loop, so that each operation is written once.
"""

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import msgspec

from llm_api_client.errors import ConnectionFailedError, LLMAPIError, error_of

T = TypeVar("T")
QueryValue = str | int | float | None
Decodable = TypeVar("Decodable")


@dataclass(frozen=True)
class Request:
    """A request to a path of the service."""

    method: str
    path: str
    query: Mapping[str, QueryValue] = field(default_factory=dict)
    json: object = None
    # JSON that is encoded already, instead of `json`.
    content: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    # Seconds of silence after which the connection counts as lost; None: the client's timeout.
    timeout: float | None = None
    # Whether the service does the same work once if the request arrives twice.
    is_repeatable: bool = True
    # Whether a refusal with 429 or 5xx is returned at once, because the caller has other work meanwhile.
    is_busy_final: bool = False

    @property
    def body(self) -> bytes | None:
        return self.content if self.json is None else msgspec.json.encode(self.json)

    @property
    def parameters(self) -> dict[str, str]:
        """The query as text; members that are None are left out."""
        return {name: _text(value) for name, value in self.query.items() if value is not None}


def _text(value: str | float) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True)
class Reply:
    """A response; `body` is empty while it is read part by part."""

    status: int
    headers: Mapping[str, str]
    body: bytes = b""


@dataclass(frozen=True)
class Lost:
    """No response: the connection could not be opened, broke, or was silent for too long."""

    error: Exception
    # False if the service cannot have received the request.
    may_have_arrived: bool = True


@dataclass(frozen=True)
class Exchange:
    """Send a request and read the whole response; the outcome is a Reply or Lost."""

    request: Request


@dataclass(frozen=True)
class Open:
    """Send a request and leave a successful response open for Read; the outcome is as of Exchange."""

    request: Request


@dataclass(frozen=True)
class Read:
    """Read more of the open response; the outcome is bytes, empty at the end, or Lost."""


@dataclass(frozen=True)
class Pause:
    """Wait for some seconds."""

    seconds: float


@dataclass(frozen=True)
class Again:
    """Wait before another try after an open response that was lost or refused.

    Raises the failure if another try cannot succeed, or if no item was emitted for too long.
    """

    outcome: Reply | Lost


@dataclass(frozen=True)
class Emit(Generic[T]):
    """Hand an item to the caller, who iterates over the operation."""

    item: T


Outcome = Reply | Lost | bytes | None
Step = Exchange | Open | Read | Pause | Again
# An operation with a result.
Call = Generator[Step, Outcome, T]
# An operation that the caller iterates over.
Feed = Generator[Step | Emit[T], Outcome, None]


def exchange(request: Request) -> Call[Reply]:
    """Return the successful response to a request.

    Raises:
        ConnectionFailedError: there was no response.
        APIStatusError: the service refused the request.
    """
    outcome = yield Exchange(request)
    if isinstance(outcome, Reply) and 200 <= outcome.status < 300:
        return outcome
    assert isinstance(outcome, (Reply, Lost))
    raise failure_of(outcome)


def failure_of(outcome: Reply | Lost) -> LLMAPIError:
    """The error of a request that was lost or refused."""
    if isinstance(outcome, Reply):
        return error_of(outcome.status, outcome.headers, outcome.body)
    error = ConnectionFailedError(
        f"The service did not respond ({type(outcome.error).__name__}: {outcome.error}). "
        "Check LLM_API_URL, and that the service runs."
    )
    error.__cause__ = outcome.error
    return error


def fetch(request: Request, kind: type[Decodable]) -> Call[Decodable]:
    """Return the JSON of a successful response as a `kind`."""
    reply = yield from exchange(request)
    return msgspec.json.decode(reply.body, type=kind)
