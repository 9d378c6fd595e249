"""Errors in OpenAI's shape: `{"error": {message, type, param, code}}`.

https://platform.openai.com/docs/guides/error-codes. OpenAI's client raises an exception by the status
and repeats a request after 408, 409, 429 or >= 500, after `Retry-After` if that is given;
`X-Should-Retry` overrides it.
"""

import re
from typing import Any

import orjson
from starlette.responses import Response

from app.core.errors import FailureCode, ServiceError

# OpenAI's codes by ours; other codes stay as they are.
_CODES = {
    "unknown_model": "model_not_found",
    "queue_full": "rate_limit_exceeded",
    "limit_reached": "rate_limit_exceeded",
    "unauthenticated": "invalid_api_key",
    "invalid_token": "invalid_api_key",
}
_MAX_FIELDS = 3
# First segments of further paths of vLLM's server, which has these errors for them.
SEGMENTS = ("rerank", "score", "v2")
# Errors that a retry repeats, although their status suggests one.
_FINAL = {
    "idempotency_conflict",
    "conflict",
    "budget_exhausted",
    FailureCode.CANCELLED,
    FailureCode.ENGINE_CRASHED,
    FailureCode.INVALID_OUTPUT,
}
_PLACE = re.compile(r"\.(\d+)(?=\.|$)")


def error_response(error: ServiceError) -> Response:
    status = 400 if error.status == 422 else error.status
    headers = dict(error.headers)
    if error.code in _FINAL:
        headers["X-Should-Retry"] = "false"
    return Response(orjson.dumps(error_body(error)), status, headers, "application/json")


def error_body(error: ServiceError) -> dict[str, Any]:
    """The body of an error response, also used in the last frame of a failed stream."""
    code = _CODES.get(error.code, error.code)
    if "max_model_len" in error.extra:
        code = "context_length_exceeded"
    return {
        "error": {
            "message": _message(error),
            "type": _type(error),
            "param": _param(error.errors[0].field) if error.errors else None,
            "code": code,
        }
    }


def _param(field: str) -> str:
    """The field in OpenAI's notation: `messages.0.content` becomes `messages[0].content`."""
    return _PLACE.sub(r"[\1]", field.removeprefix("body."))


def _message(error: ServiceError) -> str:
    """The detail, or the fields that it only counts."""
    if not error.errors or error.errors[0].message in error.detail:
        return error.detail
    return "; ".join(f"{one.field}: {one.message}" for one in error.errors[:_MAX_FIELDS])


def _type(error: ServiceError) -> str:
    if error.code == "budget_exhausted":
        return "insufficient_quota"
    if error.status == 429:  # what was used up
        return "tokens" if error.extra.get("limit") == "tokens_per_minute" else "requests"
    return "server_error" if error.status >= 500 else "invalid_request_error"
