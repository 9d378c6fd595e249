"""Errors of Text Generation Inference: `{"error", "error_type"}`.

https://github.com/huggingface/text-generation-inference, router/src/server.rs and infer/mod.rs;
its Python client and huggingface_hub map `error_type` to exceptions. Errors without a type of TGI
carry the service's own code.
"""

from typing import Any

from starlette.responses import Response

from app.api.json_codec import json_response
from app.core.errors import AttemptLostError, FailureCode, ResultFailedError, ServiceError

# First segments of TGI's paths, "" is `POST /`, and of TEI's, whose errors are alike.
SEGMENTS = ("", "generate", "generate_stream", "tokenize", "chat_tokenize", "info", "ping", "embed")

# The first version of /generate: its errors have other statuses, and no type.
FIRST_SEGMENT = "tgi-v0"

# For the OpenAPI document.
SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["error", "error_type"],
    "properties": {
        "error": {"type": "string", "description": "For people: what to change."},
        "error_type": {
            "type": "string",
            "description": "For programs: `validation`, `generation`, `overloaded`, "
            "`incomplete_generation_stream`, `template_error`, or one of docs/errors.md.",
        },
    },
}

FIRST_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "string", "description": "For people: what to change."}},
}

# The body of a failed health check.
UNHEALTHY = {"error": "unhealthy", "error_type": "healthcheck"}

_AUTHENTICATION = {"unauthenticated", "invalid_token"}
_LASTING = {"too_many_failed_attempts", "budget_exhausted"}
_OVERLOADED = {"queue_full", "too_many_waiters", "too_many_streams", "memory_busy"}


def to_error(error: ServiceError) -> tuple[int, dict[str, str]]:
    """The status and the body, which is also the last event of a failed stream."""
    if isinstance(error, ResultFailedError) and error.code != FailureCode.INVALID_REQUEST:
        return _error(424, "generation", f"Request failed during generation: {error.detail}")
    if isinstance(error, AttemptLostError):
        return _error(500, "incomplete_generation_stream", error.detail)
    if error.code in _OVERLOADED:
        return _error(429, "overloaded", "Model is overloaded")
    if (
        error.status == 429 and error.code not in _LASTING
    ):  # a limit of the team: only it can wait for it
        return _error(429, "overloaded", f"Model is overloaded: {error.detail}")
    if error.status == 422:
        if [wrong.field for wrong in error.errors] == ["messages"]:
            return _error(422, "template_error", f"Template error: {error.detail}")
        return _error(422, "validation", f"Input validation error: {_reason(error)}")
    return _error(error.status, error.code, error.detail)


def respond(error: ServiceError) -> Response:
    """An error response; an authentication error has no body, as in TGI."""
    if error.status == 401 or error.code in _AUTHENTICATION:
        return Response(None, 401, error.headers)
    status, body = to_error(error)
    return json_response(body, status, error.headers)


def respond_as_first(error: ServiceError) -> Response:
    """An error response of the first version: 400 a wrong request, 500 a failed generation."""
    if error.status == 422 or error.code == FailureCode.INVALID_REQUEST:
        status, text = 400, _reason(error)
    else:
        status, body = to_error(error)
        status, text = (500 if status == 424 else status), body["error"]
    return json_response({"error": text}, status, error.headers)


def _error(status: int, kind: str, text: str) -> tuple[int, dict[str, str]]:
    return status, {"error": text, "error_type": kind}


def _reason(error: ServiceError) -> str:
    """TGI's message if the error has it; otherwise each wrong field with its message."""
    if not error.errors:
        return error.detail
    return "; ".join(f"`{wrong.field}` {wrong.message}" for wrong in error.errors)
