"""Errors of Tenstorrent's inference API: `{"status_code", "message"}`.

Its server's code (tt-studio, models/*/src/inference_api_server.py) uses 400, 401, 500 and 503 and
sends the message alone; the description names both fields.
"""

from typing import Any

from starlette.responses import Response

from app.api.json_codec import json_response
from app.core.errors import ServiceError

SEGMENT = "inference"
# For the OpenAPI document.
SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["status_code", "message"],
    "properties": {
        "status_code": {"type": "integer"},
        "message": {"type": "string", "description": "For people: what to change."},
    },
}
NOT_JSON = "Request was not JSON"

_OVERLOADED = {"queue_full", "too_many_waiters", "too_many_streams", "memory_busy"}
_DECODE_ERROR = "JWT payload decode error: "


def respond(error: ServiceError) -> Response:
    status, message = _to_error(error)
    return json_response({"status_code": status, "message": message}, status, error.headers)


def _to_error(error: ServiceError) -> tuple[int, str]:
    if error.code in ("too_many_failed_attempts", "budget_exhausted"):
        return error.status, error.detail
    if error.status == 429 or error.code in _OVERLOADED:
        return 503, "Service overloaded, try again later."
    if error.code == "invalid_token":  # a bearer token was given, but no valid one
        return 400, _DECODE_ERROR + error.detail.removeprefix(_DECODE_ERROR)
    if error.code == "unsupported_media_type":
        return 400, NOT_JSON
    if error.status == 422:
        return 400, error.detail
    return error.status, error.detail
