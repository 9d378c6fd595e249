"""Bodies in, problems out."""

import json
from datetime import UTC, datetime
from uuid import uuid4

import orjson
import pytest
from pydantic import BaseModel, JsonValue

from app.api import json_codec
from app.core.errors import FieldError, InvalidRequestError, NotFoundError, UnknownModelError


class Body(BaseModel):
    text: str
    members: dict[str, JsonValue] = {}
    inner: list["Body"] = []


def test_a_body_is_read() -> None:
    assert json_codec.parse(Body, b'{"text": "a\\u00e9"}').text == "aé"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b'{"text": "\\u0000"}', "body.text"),
        (b'{"text": "", "members": {"a": ["x", {"b": "\\u0000"}]}}', "body.members.a.1.b"),
        (b'{"text": "", "members": {"\\u0000": 1}}', "body.members"),
        (b'{"text": "", "inner": [{"text": "a\\u0000"}]}', "body.inner.0.text"),
    ],
)
def test_nul_is_refused_where_it_stands(body: bytes, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        json_codec.parse(Body, body)
    assert [error.field for error in caught.value.errors] == [field]


def test_an_escaped_backslash_before_u0000_is_no_nul() -> None:
    assert json_codec.parse(Body, b'{"text": "\\\\u0000"}').text == "\\u0000"


@pytest.mark.parametrize("body", [b"", b"{", b'{"text": "\\ud800"}', b'{"text": "\xff"}', b"nul"])
def test_what_is_no_json_is_the_bodys_fault(body: bytes) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        json_codec.parse(Body, body)
    assert [error.field for error in caught.value.errors] == ["body"]


def test_errors_name_the_field_and_never_repeat_the_text() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        json_codec.parse(Body, b'{"text": 5, "inner": [{"text": ["secret prompt"]}]}')
    assert [error.field for error in caught.value.errors] == ["text", "inner.0.text"]
    assert "secret" not in str(caught.value.to_problem())


def test_the_number_of_errors_is_bounded() -> None:
    body = json.dumps({"text": "", "inner": [{}] * 500}).encode()
    with pytest.raises(InvalidRequestError) as caught:
        json_codec.parse(Body, body)
    assert len(caught.value.errors) == 20


def test_problems_have_the_members_of_rfc_9457() -> None:
    error = UnknownModelError("no x", extra={"known_models": ["y"]}, headers={"Retry-After": "1"})
    response = json_codec.problem_response(error)
    assert response.status_code == 404
    assert response.headers["content-type"] == "application/problem+json"
    assert response.headers["retry-after"] == "1"
    assert orjson.loads(response.body) == {
        "type": "/docs/errors#unknown_model",
        "title": "Unknown model",
        "status": 404,
        "detail": "no x",
        "code": "unknown_model",
        "known_models": ["y"],
    }
    assert str(error) == "no x"


def test_field_errors_are_reported() -> None:
    problem = InvalidRequestError("d", [FieldError("a.b", "wrong")]).to_problem()
    assert problem["errors"] == [{"field": "a.b", "message": "wrong"}]
    assert "errors" not in NotFoundError("d").to_problem()


def test_json_of_our_values() -> None:
    identifier, moment = uuid4(), datetime(2026, 1, 1, tzinfo=UTC)
    response = json_codec.json_response({"id": identifier, "at": moment}, 201, {"x": "y"})
    assert orjson.loads(response.body) == {
        "id": str(identifier),
        "at": "2026-01-01T00:00:00+00:00",
    }
    assert (response.status_code, response.headers["x"]) == (201, "y")
