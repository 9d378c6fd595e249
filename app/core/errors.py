"""Errors as data: status, stable code, and a message that names the remedy.

`ServiceError` is a response (RFC 9457), `Failure` is stored with a failed result. No other code builds error bodies.
"""

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


class FailureCode(StrEnum):
    """Stable `error.code` of a failed result."""

    status: int  # of the response to a synchronous client

    def __new__(cls, code: str, status: int = 500) -> "FailureCode":
        member = str.__new__(cls, code)
        member._value_, member.status = code, status
        return member

    CANCELLED = "cancelled", 409
    DEADLINE_EXCEEDED = "deadline_exceeded", 504
    INVALID_REQUEST = "invalid_request", 422
    INVALID_OUTPUT = "invalid_output", 502
    MODEL_ERROR = "model_error", 502
    GRAMMAR_TOO_SLOW = "grammar_too_slow", 422
    ENGINE_CRASHED = "engine_crashed", 502
    WORKER_LOST = "worker_lost", 503
    TRITON_LOST = "triton_lost", 503
    ENGINE_LOST = "engine_lost", 503
    NOT_CONTINUED = "not_continued"  # only attempts end with it, never results
    INFINI_GRAM_ERROR = "infini_gram_error"
    INTERNAL_ERROR = "internal_error"


@dataclass(frozen=True, slots=True)
class Failure:
    code: FailureCode
    message: str
    retryable: bool


CANCELLED = Failure(
    FailureCode.CANCELLED, "Cancelled on request. The text so far is kept in `result`.", False
)
DEADLINE_EXCEEDED = Failure(
    FailureCode.DEADLINE_EXCEEDED,
    "The deadline passed before the model finished. Send again with a larger `deadline_seconds`.",
    True,
)
GRAMMAR_TOO_SLOW = Failure(
    FailureCode.GRAMMAR_TOO_SLOW,
    "The constraint took too much of the engine's time, which all requests of the model share. Send a "
    "simpler `structured_outputs`: fewer ways to read the same text, fewer alternatives.",
    False,
)
WORKER_LOST = Failure(
    FailureCode.WORKER_LOST,
    "The worker running this result disappeared, and no further attempt is allowed. Send again; if "
    "it recurs, look at the worker's log and memory.",
    True,
)
ENGINE_CRASHED = Failure(
    FailureCode.ENGINE_CRASHED,
    "The engine died each time it ran this request, the last time without other requests. The "
    "request itself seems to crash it: change the prompt or the parameters.",
    False,
)
NOT_TRIED = Failure(
    FailureCode.ENGINE_CRASHED,
    "The engine or its worker died twice while it ran this request and others. It was not tried alone: look for "
    "requests of this team that failed with engine_crashed or worker_lost, then send it again.",
    True,
)
INTERNAL_ERROR = Failure(
    FailureCode.INTERNAL_ERROR,
    "A bug in the service ended this result; its worker's log has the details. Send again once.",
    True,
)


@dataclass(frozen=True, slots=True)
class FieldError:
    field: str
    message: str


@dataclass(eq=False)
class ServiceError(Exception):
    """Error response. Subclasses fix `status`, `code` and `title`.

    `detail` names the remedy. `extra` becomes members of the problem. `uri` is the problem's `type`;
    by default a fragment of docs/errors.
    """

    detail: str
    errors: list[FieldError] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    status = 500
    code = "internal_error"
    title = "Internal error"
    uri = ""

    def __str__(self) -> str:
        return self.detail

    def to_problem(self) -> dict[str, Any]:
        problem: dict[str, Any] = {
            "type": self.uri or f"/docs/errors#{self.code}",
            "title": self.title,
            "status": self.status,
            "detail": self.detail,
            "code": self.code,
        }
        if self.errors:
            problem["errors"] = [asdict(error) for error in self.errors]
        return problem | self.extra


class InvalidRequestError(ServiceError):
    status, code, title = 422, "invalid_request", "The request is not valid"


def invalid_field(field: str, message: str, **extra: object) -> InvalidRequestError:
    return InvalidRequestError(f"{field}: {message}.", [FieldError(field, message)], extra=extra)


class SearchTooSlowError(ServiceError):
    status, code, title = 422, "search_too_slow", "The search takes too long"


class SearchOffError(ServiceError):
    status, code, title = 422, "search_off", "The search is off"


class MethodError(ServiceError):
    status, code, title = 405, "method_not_allowed", "This route has no such method"


class HttpError(ServiceError):
    """Request that the HTTP framework refused; `status` is the framework's."""

    status, code, title = 400, "bad_request", "The request could not be read"


class InternalError(ServiceError):
    status, code, title = 500, "internal_error", "Internal error"


class NotFoundError(ServiceError):
    status, code, title = 404, "not_found", "Not found"


class UnknownModelError(ServiceError):
    status, code, title = 404, "unknown_model", "Unknown model"


class UnknownIndexError(ServiceError):
    status, code, title = 404, "unknown_index", "Unknown index"


class ConflictError(ServiceError):
    status, code, title = 409, "conflict", "Conflict with the present state"


class IdempotencyConflictError(ServiceError):
    status, code, title = 409, "idempotency_conflict", "The key is another request's"


class JobClosedError(ServiceError):
    status, code, title = 409, "job_closed", "The job takes no further rows"


class ErasedError(ServiceError):
    status, code, title = 410, "erased", "The texts are erased"


class ResultDeletedError(ServiceError):
    """Row of a job whose result has been deleted; its key is still taken."""

    status, code, title = 410, "result_deleted", "The result has been deleted"


class BodyTooLargeError(ServiceError):
    status, code, title = 413, "body_too_large", "The body is too large"


class MediaTypeError(ServiceError):
    status, code, title = 415, "unsupported_media_type", "The body must be JSON"


class ForbiddenOriginError(ServiceError):
    status, code, title = 403, "forbidden_origin", "This origin or host may not call the service"


class QueueFullError(ServiceError):
    status, code, title = 429, "queue_full", "The queue is full"


class LimitError(ServiceError):
    """`extra` holds the limit's name and value, and the position in the queue if there is one."""

    status, code, title = 429, "limit_reached", "A limit of the team is reached"


class BudgetExhaustedError(ServiceError):
    """`extra` holds the bound's name and value, the use, and the end of the month."""

    status, code, title = 429, "budget_exhausted", "The monthly budget is used up"


class StorageFullError(ServiceError):
    """Status 400 as in OpenAI's API: its client would send the whole file again after a 429."""

    status, code, title = 400, "storage_full", "The team's files have no more room"


class TritonError(ServiceError):
    status, code, title = 502, "triton_error", "Triton refused the call"


class DatabaseUnavailableError(ServiceError):
    status, code, title = 503, "database_unavailable", "Database unavailable"


class DatabaseFullError(DatabaseUnavailableError):
    """Full disk: writes are refused, reads continue."""

    code, title = "database_full", "The database's disk is full"


class SchemaMismatchError(ServiceError):
    status, code, title = 503, "schema_mismatch", "The database's schema does not fit"


class TritonUnavailableError(ServiceError):
    status, code, title = 503, "triton_unavailable", "Triton unavailable"


class ModelNotReadyError(ServiceError):
    """Only for requests that cannot wait; others are queued until the model is ready."""

    status, code, title = 503, "model_not_ready", "The model is not ready"


class StoppingError(ServiceError):
    status, code, title = 503, "stopping", "This process is stopping"


class ResultFailedError(ServiceError):
    """Failure of a result whose synchronous client waits for its text; has the result's code."""

    title = "The result failed"

    def __init__(self, code: FailureCode, message: str, extra: dict[str, Any]) -> None:
        super().__init__(message, extra=extra)
        self.code = code
        self.status = code.status


class AttemptLostError(ServiceError):
    """Lost attempt whose text the client has already received."""

    status, code, title = 503, "attempt_lost", "The attempt was lost in mid-stream"


class EngineError(ServiceError):
    """Error of infini-gram's engine, with its message."""

    status, code, title = 500, "infini_gram_error", "infini-gram error"


class EngineInputError(EngineError):
    """Value that would crash the engine or give a wrong result."""

    status, code, title = 422, "invalid_query", "The query is not valid"


class IndexUnavailableError(ServiceError):
    """Declared index that is not open; `detail` is the reason."""

    status, code, title = 503, "index_unavailable", "The index cannot be used"


class IndexBusyError(ServiceError):
    """Has the problem type of infini-gram API."""

    status, code, title = 503, "index_busy", "Server overloaded"
    uri = "server-overloaded"


class OverloadedError(ServiceError):
    """Attribution that took too long; has the problem type of infini-gram API."""

    status, code, title = 503, "server_overloaded", "Server overloaded"
    uri = "server-overloaded"


class TemplatesBusyError(ServiceError):
    status, code, title = 503, "templates_busy", "The chat templates are busy"


class MemoryBusyError(ServiceError):
    status, code, title = 503, "memory_busy", "Too many large requests"


class TooManyWaitersError(ServiceError):
    status, code, title = 503, "too_many_waiters", "Too many requests are waiting"


class TooManyStreamsError(ServiceError):
    status, code, title = 503, "too_many_streams", "Too many streams are open"


class BadTicketError(ServiceError):
    status, code, title = 403, "bad_ticket", "This ticket is not valid"


class UnauthenticatedError(ServiceError):
    """Request without credentials; `detail` states how to send them."""

    status, code, title = 401, "unauthenticated", "Authentication required"

    def __init__(self, detail: str) -> None:
        super().__init__(detail, headers={"WWW-Authenticate": "Bearer"})


class InvalidTokenError(ServiceError):
    """Invalid bearer token; `detail` is the reason and holds no part of the token."""

    status, code, title = 401, "invalid_token", "The token or key is not valid"

    def __init__(self, detail: str) -> None:
        super().__init__(detail, headers={"WWW-Authenticate": 'Bearer error="invalid_token"'})


class TooManyFailedAttemptsError(ServiceError):
    """Wrong token from an address that has sent many; `detail` does not state why it is wrong."""

    status, code, title = 429, "too_many_failed_attempts", "Too many wrong tokens"


class ForbiddenError(ServiceError):
    status, code, title = 403, "forbidden", "The token may not do this"


class SigningKeysUnavailableError(ServiceError):
    status, code, title = 503, "signing_keys_unavailable", "The issuer's keys are unavailable"
