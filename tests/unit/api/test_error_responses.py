"""Refusals in the shape of the path's dialect."""

from typing import Any

import orjson
import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request

from app.api import json_codec
from app.api.errors import error_responses
from app.core.errors import ServiceError

REQUEST = Request({"type": "http", "path": "/results/"})


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (HTTPException(404), 404, "not_found"),
        (HTTPException(405, headers={"Allow": "GET"}), 405, "method_not_allowed"),
        (HTTPException(400, "bad escape"), 400, "bad_request"),
        (HTTPException(426, "upgrade"), 426, "bad_request"),
    ],
)
async def test_the_frameworks_refusals(error: HTTPException, status: int, code: str) -> None:
    response = await error_responses.on_http_error(REQUEST, error)
    body: dict[str, Any] = orjson.loads(response.body)
    assert (response.status_code, body["status"], body["code"]) == (status, status, code)
    assert response.headers.get("allow") == (error.headers or {}).get("Allow")


async def test_a_bug_is_reported_without_its_details() -> None:
    response = await error_responses.on_unexpected_error(REQUEST, RuntimeError("secret"))
    assert response.status_code == 500
    assert b"secret" not in response.body
    assert orjson.loads(response.body)["code"] == "internal_error"


async def test_service_errors_are_rendered_as_they_are() -> None:
    error = ServiceError("d")
    response = await error_responses.on_service_error(REQUEST, error)
    assert response.body == json_codec.problem_response(error).body
