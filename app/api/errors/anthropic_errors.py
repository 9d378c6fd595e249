"""Errors in Anthropic's shape: `{"type": "error", "error": {type, message, details}, "request_id"}`.

https://docs.anthropic.com/en/api/errors. Its client raises an exception by the status and repeats a
request after 408, 409, 429 or >= 500, after `Retry-After` if that is given; `X-Should-Retry`
overrides it. `details.error_code` is the service's own code.
"""

from typing import Any

from starlette.responses import Response
from starlette.types import Scope

from app.api.json_codec import json_response
from app.core.errors import FailureCode, ServiceError
from app.core.log_context import CURRENT

PATH = "/v1/messages"
MODELS = "/v1/models"  # OpenAI's path too
VERSION_HEADER = "anthropic-version"
_OVERLOADED = 529

# For the OpenAPI document.
SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["type", "error", "request_id"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message", "details"],
            "properties": {
                "type": {"type": "string", "description": "Anthropic's type of the error."},
                "message": {"type": "string", "description": "For people: what to change."},
                "details": {
                    "type": "object",
                    "required": ["error_code"],
                    "properties": {
                        "error_code": {
                            "type": "string",
                            "description": "For programs: one of docs/errors.md.",
                        }
                    },
                },
            },
        },
        "request_id": {"type": ["string", "null"]},
    },
}

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    _OVERLOADED: "overloaded_error",
}
_STATUSES = {422: 400, 503: _OVERLOADED}
_FIRST_OF_SERVER = 500
_MAX_FIELDS = 3
# Errors that a retry repeats, although their status suggests one.
_FINAL = {
    "idempotency_conflict",
    "conflict",
    "budget_exhausted",
    FailureCode.CANCELLED,
    FailureCode.ENGINE_CRASHED,
    FailureCode.INVALID_OUTPUT,
}


def is_path(path: str) -> bool:
    return path == PATH or path.startswith(f"{PATH}/")


def is_of_models(path: str) -> bool:
    return path == MODELS or path.startswith(f"{MODELS}/")


def is_request(scope: Scope) -> bool:
    """Return whether a request is Anthropic's: by its path, or by its header where two dialects have one path."""
    path = scope["path"]
    if is_of_models(path):
        return any(name == VERSION_HEADER.encode() for name, _ in scope["headers"])
    return is_path(path)


def respond(error: ServiceError) -> Response:
    headers = dict(error.headers)
    if error.code in _FINAL:
        headers["X-Should-Retry"] = "false"
    return json_response(error_body(error), _status(error), headers)


def error_body(error: ServiceError) -> dict[str, Any]:
    """The body of an error response, also the last event of a failed stream."""
    scope = CURRENT.get()
    return {
        "type": "error",
        "error": {
            "type": _type(_status(error)),
            "message": _message(error),
            "details": {"error_code": error.code},
        },
        "request_id": scope.get("request_id") if scope is not None else None,
    }


def _status(error: ServiceError) -> int:
    return _STATUSES.get(error.status, error.status)


def _type(status: int) -> str:
    other = "api_error" if status >= _FIRST_OF_SERVER else "invalid_request_error"
    return _TYPES.get(status, other)


def _message(error: ServiceError) -> str:
    """The wrong members with their messages; otherwise the detail."""
    if not error.errors:
        return error.detail
    fields = error.errors[:_MAX_FIELDS]
    return "; ".join(f"{one.field.removeprefix('body.')}: {one.message}" for one in fields)
