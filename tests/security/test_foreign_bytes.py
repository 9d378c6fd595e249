"""Any bytes for each parser of foreign bytes: a value, or its own error, and never another one.

`FUZZ=100` runs a hundred times as many examples. Further parsers have such tests beside their examples: forms
(`test_upload_form.py`), URLs (`test_url_guard.py`), tool calls, grammars, tables, machine-read templates.
"""

import asyncio
import functools
import json
from collections.abc import Callable
from typing import Any

import jwt
import orjson
import pytest
from hypothesis import given, strategies as st
from pydantic import BaseModel, SecretStr
from pydantic_core import PydanticCustomError

from app.api.dependencies import to_id
from app.api.json_codec import parse
from app.api.middleware.request_guard import RequestGuard
from app.api.openai.batches_schemas import BatchCreate
from app.api.openai.chat_schemas import ChatRequest
from app.api.openai.completions_schemas import CompletionRequest
from app.api.openai.responses_input import read_input
from app.api.openai.responses_schemas import ResponseCreate
from app.api.tenstorrent.schemas import parse_inference
from app.api.tgi.schemas import ChatTokenizeRequest, GenerateRequest
from app.auth.jwks import KeySetError, parse_key_set
from app.auth.jwt_verifier import decode_with_secret
from app.batches.lines import LineReader
from app.core.errors import ServiceError
from app.results.requests import ContextCreate, ResultCreate
from app.results.streams.result_reader import Position
from app.ui.history_filters import read_filters, to_chips, to_params
from app.ui.markdown import render_markdown
from tests.machines import machine_settings
from tests.unit.auth.test_jwt import sign

pytestmark = pytest.mark.soak
EXAMPLES = 50
MODELS: tuple[type[BaseModel], ...] = (
    ResultCreate, ContextCreate, ChatRequest, CompletionRequest, ResponseCreate, BatchCreate, GenerateRequest,
    ChatTokenizeRequest,
)  # fmt: skip
SECRET = SecretStr("0123456789abcdef0123456789abcdef")
fuzz = machine_settings(EXAMPLES, 1)

_scalars = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    | st.sampled_from(["\x00", "\ud800", "1e999", -(2**63) - 1, 2**64, 1e308, "9" * 5000])
)  # fmt: skip
values = st.recursive(
    _scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


def members_of(model: type[BaseModel]) -> st.SearchStrategy[dict[str, Any]]:
    """Objects with some of a schema's members, of any value."""
    names = sorted({field.alias or name for name, field in model.model_fields.items()})
    return st.dictionaries(st.sampled_from([*names, "unknown"]), values, max_size=8)


def bodies(members: st.SearchStrategy[Any]) -> st.SearchStrategy[bytes]:
    """JSON, JSON with bytes changed, deep nesting, and any bytes."""
    texts = members.map(lambda one: json.dumps(one).encode())
    deep = st.tuples(st.sampled_from([b"[", b'{"a":', b'{"messages":[']), st.integers(1, 3000))
    return (
        texts
        | st.tuples(texts, st.integers(0), st.binary(max_size=3)).map(_damage)
        | deep.map(lambda one: one[0] * one[1])
        | st.binary(max_size=60)
    )


def _damage(given: tuple[bytes, int, bytes]) -> bytes:
    text, place, other = given
    cut = place % (len(text) + 1)
    return text[:cut] + other + text[cut + 1 :]


def accepts(call: Callable[[], object], *refusals: type[Exception]) -> bool:
    """Return if the call returns; an error of another type is the test's failure."""
    refusal: Exception | None = None
    try:
        call()
    except refusals as error:
        refusal = error
    if isinstance(refusal, ServiceError):
        assert 400 <= refusal.status < 500
    return refusal is None


@pytest.mark.parametrize("model", MODELS, ids=lambda one: one.__name__)
def test_any_body_is_parsed_or_refused(model: type[BaseModel]) -> None:
    @fuzz
    @given(bodies(members_of(model)))
    def check(body: bytes) -> None:
        if accepts(lambda: parse(model, body), ServiceError):
            orjson.dumps(parse(model, body).model_dump(mode="json"))

    check()


@fuzz
@given(
    bodies(
        st.dictionaries(st.sampled_from(["text", "temperature", "top_p", "top_k", "max_tokens", "stop_sequence",
                                         "return_prompt", "rag_context"]), values, max_size=5)
    )
)  # fmt: skip
def test_any_inference_is_parsed_or_refused(body: bytes) -> None:
    accepts(lambda: parse_inference(body).to_sampling(5), ServiceError)


@fuzz
@given(values)
def test_any_input_of_a_response_is_read_or_refused(value: Any) -> None:
    accepts(lambda: read_input(value), PydanticCustomError)


@fuzz
@given(
    st.lists(
        bodies(
            st.fixed_dictionaries(
                {"custom_id": values, "method": st.just("POST") | values, "url": st.just("/v1/completions"),
                 "body": st.dictionaries(st.sampled_from(["model", "prompt", "stream"]), values)}
            )
        ),
        max_size=5,
    )
)  # fmt: skip
def test_any_batch_line_is_read_or_listed(lines: list[bytes]) -> None:
    reader = LineReader("/v1/completions", 3)
    read = [reader.read(number, line) for number, line in enumerate(lines, 1)]
    blank = sum(not line.strip() for line in lines)
    assert sum(one is not None for one in read) + len(reader.errors) >= len(lines) - blank
    orjson.dumps(reader.errors)


@fuzz
@given(
    st.text(max_size=40) | st.from_regex(r"\d*:\d*") | st.integers(0).map(lambda n: f"{n}:{n**40}")
)
def test_any_position_is_read_or_refused(text: str) -> None:
    accepts(lambda: Position.parse(text, "after"), ServiceError)


@fuzz
@given(st.text(max_size=50) | st.uuids().map(lambda one: f"{{{one}}}"))
def test_any_id_is_read_or_not_found(text: str) -> None:
    accepts(lambda: to_id(text, "result"), ServiceError)


@fuzz
@given(
    st.tuples(st.integers(0), st.binary(max_size=3)),
    st.binary(max_size=80) | st.just(b""),
)
def test_any_token_is_refused(damage: tuple[int, bytes], other: bytes) -> None:
    token = sign({"team_id": "red", "token_id": "r"}, SECRET.get_secret_value()).encode()
    for text in (_damage((token, *damage)), other, other + b"." + other + b".", token + other):
        forged = text.decode("latin-1")
        decode = functools.partial(decode_with_secret, forged, SECRET)
        if forged != token.decode() and accepts(decode, jwt.PyJWTError):
            # Base64 has several spellings of the same bytes, which are signed.
            assert jwt.decode(forged, options={"verify_signature": False})["team_id"] == "red"


@fuzz
@given(
    bodies(
        st.fixed_dictionaries(
            {"keys": st.lists(
                st.dictionaries(st.sampled_from(["kty", "crv", "n", "e", "x", "y", "kid", "use", "alg"]),
                                st.sampled_from(["RSA", "EC", "P-256", "AQAB", "sig", "RS256"]) | values),
                max_size=3)}
        )
    )
)  # fmt: skip
def test_any_key_set_is_read_or_refused(text: bytes) -> None:
    accepts(lambda: parse_key_set(text), KeySetError)


@fuzz
@given(
    st.lists(
        st.tuples(
            st.sampled_from([b"host", b"origin", b"x-forwarded-for", b"x-real-ip", b"forwarded", b"via",
                             b"content-type", b"content-length"]),
            st.binary(max_size=30) | st.sampled_from([b"localhost", b"[::1]:8887", b"http://[", b"127.0.0.1, ::ffff:1.2.3.4"]),
        ),
        max_size=5,
    ),
    st.sampled_from([None, ["localhost", "[::1]"], ["*"]]),
)  # fmt: skip
def test_any_head_is_passed_or_refused(
    headers: list[tuple[bytes, bytes]], allowed: list[str] | None
) -> None:
    statuses: list[int] = []

    async def app(_scope: Any, _receive: Any, _send: Any) -> None:
        statuses.append(200)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        if "status" in message:
            statuses.append(message["status"])

    guard = RequestGuard(app, allowed, 1000, local_clients=["127.0.0.0/8", "::1"])
    scope = {"type": "http", "method": "POST", "path": "/results/", "headers": headers}
    asyncio.run(guard(scope, receive, send))
    assert statuses in ([200], [400], [403], [411], [413], [415])


@fuzz
@given(
    st.dictionaries(
        st.sampled_from(["state", "q", "model", "from", "to", "after", "x"]), st.text(max_size=20)
    )
)
def test_any_filters_of_the_page_are_read(query: dict[str, str]) -> None:
    filters = read_filters(query)
    to_params(filters)
    to_chips(filters)


@fuzz
@given(
    st.lists(
        st.sampled_from(["<script>", "javascript:", "](", "[a", "<img src=x onerror=", "`", "```\n", "|", "$$", "<!--",
                         "&#x6a;", "\x00", "\u202e", "\n\n", "> ", "* ", "data:text/html,", "<svg/onload=", "\"'>"])
        | st.text(max_size=5),
        max_size=12,
    ).map("".join)
)  # fmt: skip
def test_any_text_becomes_html_without_scripts(text: str) -> None:
    html = str(render_markdown(text)).lower()
    for tag in ("<script", "<img", "<svg", "<iframe"):
        assert tag not in html
    assert 'href="javascript' not in html
    assert 'href="data:' not in html
