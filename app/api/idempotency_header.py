"""The Idempotency-Key header."""

from pydantic import TypeAdapter
from starlette.requests import Request

from app.core.errors import invalid_field
from app.results.requests import Key

_KEY = TypeAdapter(Key)
_NAME = "Idempotency-Key"

REPLAYED_HEADER = "Idempotent-Replayed"

KEY_HEADER = {
    _NAME: {
        "schema": {"type": "string", "minLength": 1, "maxLength": 255},
        "description": "A repeated request with the same key returns the first result and the header "
        "`Idempotent-Replayed: true`; a different request returns 409.",
    }
}


def idempotency_key(request: Request, in_body: str | None = None) -> str | None:
    """The key of a request, from its header or its body.

    Raises InvalidRequestError for an invalid header, and for one that differs from the body's key.
    """
    given = {value for name, value in request.scope["headers"] if name == b"idempotency-key"}
    if not given:
        return in_body
    try:
        (key,) = (_KEY.validate_python(value.decode()) for value in given)
    except ValueError as error:
        message = "must be one key of 1 to 255 characters, none of them a control character"
        raise invalid_field(_NAME, message) from error
    if in_body not in (None, key):
        raise invalid_field(_NAME, "differs from the body's idempotency_key; send one of them")
    return key
