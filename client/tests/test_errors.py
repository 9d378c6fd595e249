"""Errors: classes by status, problems, pages of proxies."""

import pickle

import pytest

from llm_api_client import errors
from llm_api_client.errors import APIStatusError, FieldProblem, error_of, problem_of

PROBLEM = (
    b'{"type": "/docs/errors#invalid_request", "title": "t", "status": 422, "detail": "d",'
    b' "code": "invalid_request", "errors": [{"field": "model", "message": "is missing"}]}'
)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "InvalidRequestError"), (401, "AuthenticationError"), (403, "PermissionDeniedError"),
        (404, "NotFoundError"), (409, "ConflictError"), (410, "NotFoundError"),
        (413, "InvalidRequestError"), (422, "InvalidRequestError"), (429, "LimitReachedError"),
        (500, "ServiceUnavailableError"), (503, "ServiceUnavailableError"),
    ],
)  # fmt: skip
def test_a_class_for_each_status(status: int, kind: str) -> None:
    assert type(error_of(status, {}, PROBLEM)) is getattr(errors, kind)


def test_a_problem_has_code_fields_and_advice() -> None:
    error = error_of(422, {"retry-after": "3"}, PROBLEM)
    assert (error.status, error.code, error.detail) == (422, "invalid_request", "d")
    assert error.fields == (FieldProblem("model", "is missing"),)
    assert error.retry_after == 3
    assert error.advice
    for part in ("invalid_request", "422", "d", "model: is missing", error.advice):
        assert part in str(error)


@pytest.mark.parametrize("body", [b"<html>bad gateway</html>", b"\xff\xfe", b"", b'["x"]', b"{}"])
def test_a_page_of_a_proxy_is_an_error_too(body: bytes) -> None:
    error = error_of(502, {"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}, body)
    assert (error.code, error.retry_after) == ("http_502", None)
    assert error.detail


def test_an_item_of_a_list() -> None:
    assert isinstance(problem_of(PROBLEM), errors.InvalidRequestError)


def test_errors_travel_between_processes() -> None:
    error = pickle.loads(pickle.dumps(error_of(422, {}, PROBLEM)))  # noqa: S301 - our own
    assert isinstance(error, APIStatusError)
    assert (error.code, error.fields) == ("invalid_request", (FieldProblem("model", "is missing"),))
