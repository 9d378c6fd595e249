"""Errors of the client. Each error of the service has a stable code and an advice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from llm_api_client.advice import ADVICE

if TYPE_CHECKING:
    from llm_api_client.schemas import Result

_SHOWN_CHARACTERS = 500


class LLMAPIError(Exception):
    """Base class of all errors of this package."""


class ConfigurationError(LLMAPIError):
    """The URL or the API key cannot be used."""


class ConnectionFailedError(LLMAPIError):
    """The service did not respond within the client's `patience`."""


class WaitTimeoutError(LLMAPIError):
    """A result or a job did not end in the given time. It continues; wait for it again."""

    def __init__(self, result_id: str, seconds: float, kind: str = "Result") -> None:
        super().__init__(f"{kind} {result_id} did not end within {seconds:g} seconds.")
        self.result_id = result_id


class ResultFailedError(LLMAPIError):
    """A result failed or was cancelled; `result` has its error and its text so far."""

    def __init__(self, result: Result) -> None:
        error = result.error
        super().__init__(str(error) if error else f"Result {result.id} failed.")
        self.result = result
        self.code = error.code if error else ""
        self.advice = ADVICE.get(self.code, "")


class WebhookSignatureError(LLMAPIError):
    """A message to a webhook was not signed by the service, or long ago."""


class FieldProblem(msgspec.Struct, frozen=True):
    """One wrong field of a request."""

    field: str
    message: str


class APIStatusError(LLMAPIError):
    """The service refused a request.

    Attributes:
        status: HTTP status.
        code: stable name of the error, for programs (docs/errors.md of the service).
        detail: the service's message, for people.
        advice: one sentence on how to proceed.
        fields: the wrong fields of the request.
        retry_after: seconds until another try may succeed, if the service named them.
        result_id: the result that already has the Idempotency-Key, for `idempotency_conflict`.
    """

    def __init__(
        self,
        status: int,
        code: str,
        detail: str,
        fields: tuple[FieldProblem, ...] = (),
        retry_after: float | None = None,
        result_id: str | None = None,
    ) -> None:
        self.status, self.code, self.detail = status, code, detail
        self.advice = ADVICE.get(code, "")
        self.fields, self.retry_after, self.result_id = fields, retry_after, result_id
        named = "; ".join(f"{one.field}: {one.message}" for one in fields) + "." * bool(fields)
        parts = [f"{code} ({status}): {detail}", named, self.advice]
        super().__init__(" ".join(part for part in parts if part))

    def __reduce__(self) -> tuple[Any, ...]:
        members = (self.status, self.code, self.detail, self.fields, self.retry_after)
        return type(self), (*members, self.result_id)


class InvalidRequestError(APIStatusError):
    """The request must be changed (400, 405, 413, 415, 422)."""


class AuthenticationError(APIStatusError):
    """The API key is missing, unknown, expired or revoked (401)."""


class PermissionDeniedError(APIStatusError):
    """The API key lacks a scope, or the address is not the service's (403)."""


class NotFoundError(APIStatusError):
    """The row, the model or the index does not exist for this team (404), or was erased (410)."""


class ConflictError(APIStatusError):
    """The row's state does not permit the request, or its key has another request (409)."""


class LimitReachedError(APIStatusError):
    """A limit of the team or of the queue is reached (429)."""


class ServiceUnavailableError(APIStatusError):
    """The service or a part of it cannot respond now (5xx)."""


_CLASSES: dict[int, type[APIStatusError]] = {
    401: AuthenticationError,
    403: PermissionDeniedError,
    404: NotFoundError,
    409: ConflictError,
    410: NotFoundError,
    429: LimitReachedError,
}


class _Problem(msgspec.Struct):
    """An RFC 9457 problem."""

    code: str
    detail: str = ""
    title: str = ""
    status: int = 0
    errors: list[FieldProblem] = []
    result_id: str | None = None


def error_of(status: int, headers: Mapping[str, str], body: bytes) -> APIStatusError:
    """The error of a response, also of a proxy in front of the service."""
    try:
        problem = msgspec.json.decode(body, type=_Problem)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        text = body[:_SHOWN_CHARACTERS].decode(errors="replace").strip()
        problem = _Problem(f"http_{status}", text or f"HTTP status {status}.")
    return _error(status, problem, retry_after_of(headers))


def problem_of(item: bytes) -> APIStatusError:
    """The error of one item of a list."""
    problem = msgspec.json.decode(item, type=_Problem)
    return _error(problem.status, problem, None)


def _error(status: int, problem: _Problem, retry_after: float | None) -> APIStatusError:
    default = ServiceUnavailableError if status >= 500 else InvalidRequestError
    return _CLASSES.get(status, default)(
        status,
        problem.code,
        problem.detail or problem.title,
        tuple(problem.errors),
        retry_after,
        problem.result_id,
    )


def retry_after_of(headers: Mapping[str, str]) -> float | None:
    """The seconds in `Retry-After`; None if there are none."""
    value = headers.get("retry-after", "").strip()
    return float(value) if value.isascii() and value.isdigit() else None
