"""JSON codec: parses bodies into schemas, renders responses and problems."""

from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from starlette.responses import Response

from app.core.errors import FieldError, InvalidRequestError, ServiceError

Model = TypeVar("Model", bound=BaseModel)

JSON = "application/json"
PROBLEM_JSON = "application/problem+json"
_MAX_ERRORS = 20
_NUL_ESCAPE = b"\\u0000"


def json_response(
    content: object, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """Any JSON value as a response; datetimes become RFC 3339 with their zone."""
    return Response(orjson.dumps(content), status, headers, JSON)


def problem_response(error: ServiceError) -> Response:
    return Response(orjson.dumps(error.to_problem()), error.status, error.headers, PROBLEM_JSON)


def parse(model: type[Model], body: bytes, *, refuses_nul: bool = True) -> Model:
    """Parse a JSON body. Raises InvalidRequestError that names each wrong field.

    `refuses_nul`: False for a body whose parts are parsed again, as requests of their own.
    """
    try:
        value = model.model_validate_json(body)
    except ValidationError as error:
        raise InvalidRequestError(
            "The body is not valid; `errors` names each field.", to_field_errors(error.errors())
        ) from error
    if refuses_nul and may_have_nul(body):
        _refuse_nul(value, "body")
    return value


def may_have_nul(body: bytes) -> bool:
    """Return whether texts of a JSON body may contain NUL, which JSON has only as an escape."""
    return _NUL_ESCAPE in body


def validate(model: type[Model], value: object, *, has_nul: bool = True) -> Model:
    """Validate a part of a parsed body, which may contain NUL. Raises as `parse` does."""
    try:
        valid = model.model_validate(value)
    except ValidationError as error:
        raise InvalidRequestError(
            "The item is not valid; `errors` names each field.", to_field_errors(error.errors())
        ) from error
    if has_nul:
        _refuse_nul(valid, "item")
    return valid


def to_field_errors(errors: Any) -> list[FieldError]:
    return [
        FieldError(".".join(str(part) for part in error["loc"]) or "body", _message(error))
        for error in errors[:_MAX_ERRORS]
    ]


def _message(error: Any) -> str:
    if error["type"] == "extra_forbidden":
        return "unknown field"
    return str(error["msg"])


def _refuse_nul(value: object, path: str) -> None:
    """Reject NUL, which PostgreSQL's text cannot hold."""
    if isinstance(value, str):
        if "\x00" in value:
            raise InvalidRequestError(
                "Text must not contain the NUL character.", [FieldError(path, "contains NUL")]
            )
    elif isinstance(value, BaseModel):
        _refuse_nul(dict(value), path)
    elif isinstance(value, dict):
        for key, member in value.items():
            _refuse_nul(key, path)
            _refuse_nul(member, f"{path}.{key}")
    elif isinstance(value, list):
        for place, member in enumerate(value):
            _refuse_nul(member, f"{path}.{place}")
