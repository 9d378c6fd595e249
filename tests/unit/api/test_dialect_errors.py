"""Our errors as the clients of TGI and of Tenstorrent read them."""

from typing import Any

import orjson
import pytest

from app.api.errors import tenstorrent_errors, tgi_errors
from app.core.errors import (
    AttemptLostError,
    DatabaseUnavailableError,
    FailureCode,
    FieldError,
    InvalidRequestError,
    InvalidTokenError,
    LimitError,
    MediaTypeError,
    ModelNotReadyError,
    QueueFullError,
    ResultFailedError,
    ServiceError,
    TooManyStreamsError,
    TooManyWaitersError,
    UnauthenticatedError,
)


def failed(code: FailureCode) -> ResultFailedError:
    return ResultFailedError(code, "d", {})


FIELD = InvalidRequestError("x", [FieldError("a.b", "is wrong"), FieldError("c", "too")])


@pytest.mark.parametrize(
    ("error", "status", "kind", "text"),
    [
        (InvalidRequestError("d"), 422, "validation", "Input validation error: d"),
        (FIELD, 422, "validation", "Input validation error: `a.b` is wrong; `c` too"),
        (
            InvalidRequestError("d", [FieldError("messages", "x")]),
            422, "template_error", "Template error: d",
        ),
        (QueueFullError("d"), 429, "overloaded", "Model is overloaded"),
        (TooManyWaitersError("d"), 429, "overloaded", "Model is overloaded"),
        (TooManyStreamsError("d"), 429, "overloaded", "Model is overloaded"),
        (LimitError("d"), 429, "overloaded", "Model is overloaded: d"),
        (failed(FailureCode.MODEL_ERROR), 424, "generation", "Request failed during generation: d"),
        (failed(FailureCode.CANCELLED), 424, "generation", "Request failed during generation: d"),
        (failed(FailureCode.INVALID_REQUEST), 422, "validation", "Input validation error: d"),
        (AttemptLostError("d"), 500, "incomplete_generation_stream", "d"),
        (ModelNotReadyError("d"), 503, "model_not_ready", "d"),
        (DatabaseUnavailableError("d"), 503, "database_unavailable", "d"),
    ],
)  # fmt: skip
def test_tgi(error: ServiceError, status: int, kind: str, text: str) -> None:
    error.headers["Retry-After"] = "3"
    response = tgi_errors.respond(error)
    assert response.status_code == status
    assert response.headers["retry-after"] == "3"
    assert orjson.loads(response.body) == {"error": text, "error_type": kind}


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (InvalidRequestError("d"), 400, "d"),
        (FIELD, 400, "`a.b` is wrong; `c` too"),
        (QueueFullError("d"), 429, "Model is overloaded"),
        (LimitError("d"), 429, "Model is overloaded: d"),
        (failed(FailureCode.MODEL_ERROR), 500, "Request failed during generation: d"),
        (failed(FailureCode.INVALID_REQUEST), 400, "d"),
        (ModelNotReadyError("d"), 503, "d"),
        (MediaTypeError("d"), 415, "d"),
        (UnauthenticatedError("d"), 401, "d"),
    ],
)  # fmt: skip
def test_the_first_version_of_tgi(error: ServiceError, status: int, text: str) -> None:
    error.headers["Retry-After"] = "3"
    response = tgi_errors.respond_as_first(error)
    assert response.status_code == status
    assert response.headers["retry-after"] == "3"
    assert orjson.loads(response.body) == {"error": text}


@pytest.mark.parametrize("error", [UnauthenticatedError("d"), InvalidTokenError("d")])
def test_tgi_reveals_nothing_to_strangers(error: ServiceError) -> None:
    response = tgi_errors.respond(error)
    assert (response.status_code, response.body) == (401, b"")
    assert "Bearer" in response.headers["www-authenticate"]


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (UnauthenticatedError("d"), 401, "d"),
        (InvalidTokenError("d"), 400, "JWT payload decode error: d"),
        (InvalidTokenError("JWT payload decode error: d"), 400, "JWT payload decode error: d"),
        (MediaTypeError("d"), 400, "Request was not JSON"),
        (InvalidRequestError("d"), 400, "d"),
        (QueueFullError("d"), 503, "Service overloaded, try again later."),
        (LimitError("d"), 503, "Service overloaded, try again later."),
        (TooManyStreamsError("d"), 503, "Service overloaded, try again later."),
        (ModelNotReadyError("d"), 503, "d"),
        (failed(FailureCode.MODEL_ERROR), 502, "d"),
        (failed(FailureCode.INVALID_REQUEST), 400, "d"),
    ],
)
def test_tenstorrent(error: ServiceError, status: int, message: str) -> None:
    error.headers["Retry-After"] = "3"
    response = tenstorrent_errors.respond(error)
    body: dict[str, Any] = orjson.loads(response.body)
    assert response.status_code == status
    assert body == {"status_code": status, "message": message}
    assert response.headers["retry-after"] == "3"
