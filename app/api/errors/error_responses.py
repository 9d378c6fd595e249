"""Error responses, in the shape of each dialect.

The path's first segment selects the dialect, and below `/v1` Anthropic's path; other paths are native:
RFC 9457 problems. `/v1/models` is Anthropic's with its header `anthropic-version`.
"""

from collections.abc import Callable
from http import HTTPStatus

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from app.api.errors import anthropic_errors, openai_errors, tenstorrent_errors, tgi_errors
from app.api.json_codec import problem_response, to_field_errors
from app.core import metrics
from app.core.errors import (
    HttpError,
    InternalError,
    InvalidRequestError,
    MethodError,
    NotFoundError,
    ServiceError,
)

Shape = Callable[[ServiceError], Response]

_SHAPES: dict[str, Shape] = {
    **dict.fromkeys(("v1", *openai_errors.SEGMENTS), openai_errors.error_response),
    anthropic_errors.PATH: anthropic_errors.respond,
    **dict.fromkeys(tgi_errors.SEGMENTS, tgi_errors.respond),
    tgi_errors.FIRST_SEGMENT: tgi_errors.respond_as_first,
    tenstorrent_errors.SEGMENT: tenstorrent_errors.respond,
}


def refusal(path: str, error: ServiceError) -> Response:
    """An error in the dialect of this path."""
    metrics.REFUSALS.of(error.code).inc()
    return _SHAPES.get(dialect_of(path), problem_response)(error)


def refusal_of(scope: Scope, error: ServiceError) -> Response:
    """An error in the dialect of this request."""
    is_anthropic = anthropic_errors.is_request(scope)
    return refusal(anthropic_errors.PATH if is_anthropic else scope["path"], error)


def dialect_of(path: str) -> str:
    if anthropic_errors.is_path(path):
        return anthropic_errors.PATH
    return path.split("/", 2)[1] if path.startswith("/") else path


async def on_service_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServiceError)
    return refusal_of(request.scope, error)


async def on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return refusal_of(
        request.scope,
        InvalidRequestError(
            "The request is not valid; `errors` names each field.", to_field_errors(error.errors())
        ),
    )


async def on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    answer: ServiceError
    if error.status_code == HTTPStatus.NOT_FOUND:
        answer = NotFoundError("There is no such path. The API's paths are listed at /docs.")
    elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        answer = MethodError("This path does not take this method. See /docs.")
    else:
        answer = HttpError(str(error.detail))
        answer.status = error.status_code
    answer.headers.update(error.headers or {})
    return refusal_of(request.scope, answer)


async def on_unexpected_error(request: Request, _error: Exception) -> Response:
    """Respond to a bug without its details; the server logs the traceback."""
    answer = refusal_of(
        request.scope,
        InternalError("Something unexpected happened; the service's log has the details."),
    )
    answer.headers["X-Request-Id"] = request.scope.get("request_id", "")  # to find them by
    return answer
