"""Bad input of every kind is a clear problem, never a 500, and nothing of it is written."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings as hypothesis_settings, strategies as st

from app.cli.up.triton import EmbeddedTriton
from app.inference.sampling import SamplingParameters
from tests.conftest import Service
from tests.integration.support import (
    CHAT_TEMPLATE,
    UNKNOWN_ID,
    assert_problem,
    connect,
    count_rows,
    fresh_database,
    serve,
    until,
    write_model,
)
from tests.postgres import PostgresServer

pytestmark = pytest.mark.asyncio(loop_scope="module")

JSON = {"content-type": "application/json"}
OK = {"model": "scripted", "content": "hi"}
MAX_MODEL_LEN = 32


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(
    postgres_server: PostgresServer,
    template: str,
    triton: EmbeddedTriton,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Service]:
    """An API behind a real socket, with a model whose length is short and known."""
    repository: Path = tmp_path_factory.mktemp("repository")
    write_model(repository, "scripted", max_model_len=MAX_MODEL_LEN, template=CHAT_TEMPLATE)
    async with (
        fresh_database(postgres_server, template, triton, model_repository=repository) as settings,
        serve(settings) as service,
    ):
        yield service


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rows(served: Service) -> AsyncIterator[asyncpg.Connection]:
    """A connection that counts what was written."""
    connection = await connect(served.services.settings)
    yield connection
    await connection.close()


@dataclass(frozen=True)
class Case:
    """One bad request and the problem it must be answered with."""

    name: str
    method: str
    path: str
    status: int
    code: str
    named: str | None = None
    request: dict[str, Any] = field(default_factory=dict)


def _body(name: str, body: object, named: str | None = None, path: str = "/results/") -> Case:
    """A body that is refused as invalid; text and bytes are sent as they are."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Case(
        name, "POST", path, 422, "invalid_request", named, {"content": raw, "headers": JSON}
    )


def _parameter(name: str, value: object, raw: str | None = None) -> Case:
    text = json.dumps(value) if raw is None else raw
    body = f'{{"model": "scripted", "content": "hi", "parameters": {{"{name}": {text}}}}}'
    return _body(f"parameter {name}={text[:40]}", body.encode(), f"parameters.{name}")


def _get(name: str, path: str, named: str | None = None) -> Case:
    return Case(name, "GET", path, 422, "invalid_request", named)


def _missing(method: str, path: str, code: str = "not_found") -> Case:
    return Case(f"missing {method} {path}", method, path, 404, code)


IDS = (UNKNOWN_ID, "1", "abc", "..%2f..", "%00", "%F0%9F%99%82", "-1", "9" * 300, "%ED%A0%80")
ID_ROUTES = (
    ("GET", "/contexts/{}"),
    ("DELETE", "/contexts/{}"),
    ("GET", "/results/{}"),
    ("GET", "/results/{}?wait=1"),
    ("GET", "/results/{}/attempts"),
    ("POST", "/results/{}/cancel"),
    ("POST", "/results/{}/retry"),
    ("DELETE", "/results/{}"),
    ("DELETE", "/results/{}?force=true"),
    ("POST", "/models/send/scripted/{}"),
)
MODEL_ROUTES = (
    ("GET", "/models/{}"),
    ("POST", "/models/{}/load"),
    ("POST", "/models/{}/unload"),
    ("POST", "/models/send/{}/" + UNKNOWN_ID),
)
DEEP = b"[" * 100_000 + b"]" * 100_000
NO_OBJECTS: list[object] = [[], "x", 1, None, True]
HUGE_INT = "1" + "0" * 400

ODD_KEYS: list[object] = ["", "x" * 256, "a\0b", "a\nb", 1, ["a"], {}, True]

CASES = [
    *(_missing(method, path.format(bad)) for method, path in ID_ROUTES for bad in IDS),
    *(
        _missing(method, path.format(bad), "unknown_model")
        for method, path in MODEL_ROUTES
        for bad in ("nobody", "%F0%9F%99%82", "9" * 300, "%ED%A0%80")
    ),
    # No path at all: see `auth`.
    *(
        _missing(method, path.format(bad))
        for method, path in MODEL_ROUTES
        for bad in ("%00", "a%0A")
    ),
    # --- paths, methods ---
    _missing("GET", "/nowhere"),
    _missing("GET", "/%00"),
    _missing("POST", "/results/x/y/z"),
    Case("method of list", "PUT", "/results/", 405, "method_not_allowed"),
    Case("method of result", "PATCH", f"/results/{UNKNOWN_ID}", 405, "method_not_allowed"),
    Case("method of send", "GET", f"/models/send/scripted/{UNKNOWN_ID}", 405, "method_not_allowed"),
    Case("method of health", "POST", "/health", 405, "method_not_allowed"),
    # --- JSON itself ---
    _body("no body", b"", path="/contexts/"),
    _body("no body for results", b""),
    *(
        _body(f"not JSON {raw[:20]!r}", raw, "body", path=path)
        for path in ("/contexts/", "/results/", f"/models/send/scripted/{UNKNOWN_ID}")
        for raw in (b"{", b"{]", b"\xff\xfe", b'{"content": "\xed\xa0\x80"}', b"nul", b"{} {}")
    ),
    *(
        _body(f"deep JSON {opening!r}", opening * 100_000, path=path)
        for path in ("/contexts/", "/results/", f"/models/send/scripted/{UNKNOWN_ID}")
        for opening in (b"[", b'{"a":')
    ),
    _body("deep closed list", DEEP),
    _body(
        "deep metadata", b'{"content": "x", "metadata": {"a": ' + DEEP + b"}}", path="/contexts/"
    ),
    *(
        _body(f"{type(value).__name__} for an object", value, path=path)
        for path in ("/contexts/", f"/models/send/scripted/{UNKNOWN_ID}")
        for value in NO_OBJECTS
    ),
    *(_body(f"{value!r} for a result", value) for value in ("x", 1, None, True)),
    # --- text that PostgreSQL cannot hold ---
    *(
        _body(f"{what} in {place}", body, path=path)
        for what, bad in (("NUL", "\\u0000"), ("surrogate", "\\ud800"), ("low", "\\udc00x"))
        for place, path, body in (
            ("content", "/contexts/", f'{{"content": "a{bad}"}}'.encode()),
            (
                "role",
                "/contexts/",
                f'{{"messages": [{{"role": "{bad}", "content": ""}}]}}'.encode(),
            ),
            (
                "message",
                "/contexts/",
                f'{{"messages": [{{"role": "user", "content": "{bad}"}}]}}'.encode(),
            ),
            (
                "metadata",
                "/contexts/",
                f'{{"content": "a", "metadata": {{"k": "{bad}"}}}}'.encode(),
            ),
            ("key", "/contexts/", f'{{"content": "a", "metadata": {{"{bad}": 1}}}}'.encode()),
            (
                "nested",
                "/contexts/",
                f'{{"content": "a", "metadata": {{"k": [{{"l": ["{bad}"]}}]}}}}'.encode(),
            ),
            ("model", "/results/", f'{{"model": "{bad}", "content": "a"}}'.encode()),
            ("result", "/results/", f'{{"model": "scripted", "content": "{bad}"}}'.encode()),
            (
                "stop",
                "/results/",
                '{"model": "scripted", "content": "a", "parameters": '
                f'{{"stop": ["{bad}"]}}}}'.encode(),
            ),
            (
                "options",
                f"/models/send/scripted/{UNKNOWN_ID}",
                f'{{"metadata": {{"k": "{bad}"}}}}'.encode(),
            ),
        )
    ),
    # --- shapes ---
    _body("neither form", {}, "body", "/contexts/"),
    _body(
        "both forms",
        {"content": "a", "messages": [{"role": "user", "content": "b"}]},
        "body",
        "/contexts/",
    ),
    _body("empty content", {"content": ""}, "content", "/contexts/"),
    _body("no messages", {"messages": []}, "messages", "/contexts/"),
    _body("content number", {"content": 1}, "content", "/contexts/"),
    _body("content list", {"content": ["a"]}, "content", "/contexts/"),
    _body(
        "message without role", {"messages": [{"content": "b"}]}, "messages.0.role", "/contexts/"
    ),
    _body(
        "message unknown field",
        {"messages": [{"role": "a", "content": "b", "x": 1}]},
        "messages.0.x",
        "/contexts/",
    ),
    _body("unknown field", {"content": "a", "contnet": "b"}, "contnet", "/contexts/"),
    _body("metadata list", {"content": "a", "metadata": []}, "metadata", "/contexts/"),
    _body(
        "metadata too large", {"content": "a", "metadata": {"k": "x" * 20_000}}, None, "/contexts/"
    ),
    _body(
        "metadata too wide",
        {"content": "a", "metadata": {str(i): 1 for i in range(65)}},
        "metadata",
        "/contexts/",
    ),
    _body(
        "metadata huge integer",
        f'{{"content": "a", "metadata": {{"k": {HUGE_INT}}}}}'.encode(),
        None,
        "/contexts/",
    ),
    *(
        _body(
            f"metadata {word}",
            f'{{"content": "a", "metadata": {{"k": {word}}}}}'.encode(),
            None,
            "/contexts/",
        )
        for word in ("NaN", "Infinity", "-Infinity", "1e400")
    ),
    _body("no model", {"content": "a"}, "model"),
    _body("empty model", {"model": "", "content": "a"}, "model"),
    _body("no source", {"model": "scripted"}, "body"),
    _body("two sources", OK | {"context_id": UNKNOWN_ID}, "body"),
    _body("context id no UUID", {"model": "scripted", "context_id": "1"}, "context_id"),
    _body("context id number", {"model": "scripted", "context_id": 1}, "context_id"),
    _body("unknown member", OK | {"temperature": 1}, "temperature"),
    _body("parameters list", OK | {"parameters": []}, "parameters"),
    _body("empty list", []),
    # --- options ---
    *(
        _body(f"priority {value!r}", OK | {"priority": value}, "priority")
        for value in (1, -101, 2**70, 0.5, "0", True, None)
    ),
    *(
        _body(f"deadline {value!r}", OK | {"deadline_seconds": value}, "deadline_seconds")
        for value in (0, -1, 604_801, 1e308, 2**200, "60", True)
    ),
    *(
        _body(
            f"deadline {word}",
            f'{{"model": "scripted", "content": "a", "deadline_seconds": {word}}}'.encode(),
            "deadline_seconds",
        )
        for word in ("NaN", "Infinity", "1e999")
    ),
    # --- sampling parameters, each by its name ---
    *(
        _parameter(name, value)
        for name, values in {
            "max_tokens": (0, -1, 1_000_001, 1.5, "5", True, 2**64),
            "min_tokens": (-1, 1_000_001, "1"),
            "temperature": (-0.1, 100.1, "1", [], True),
            "top_p": (0, -1, 1.1, "1"),
            "top_k": (-2, 1_000_001, 0.5),
            "min_p": (-0.1, 1.1),
            "presence_penalty": (-2.1, 2.1),
            "frequency_penalty": (-2.1, 2.1),
            "repetition_penalty": (0, -1, 101),
            "seed": (-(2**63) - 1, 2**63, 1.5, "1"),
            "n": (0, 2, -1, "1"),
            "logprobs": (-1, 21, True),
            "stop_token_ids": ([-1], [2**31], ["a"], 1, [0] * 257),
            "bad_words": ([""], [1], "a"),
            "allowed_token_ids": ([], [-1], [0.5], 1, [1] * 4097),
            "dry_multiplier": (0.8,),
            "xtc_probability": (0.5,),
            "ignore_eos": ("true", 1, 0),
            "skip_special_tokens": ("no",),
            "stop": ("", [""], ["a"] * 17, 1, {"a": 1}, "x" * 257),
            "logit_bias": ([], {"a": 1}, {"1": 101}, {"-1": 1}, {"1": "a"}),
            "best_of": (1,),
            "Temperature": (1,),
            "stream": (True,),
            "max_new_tokens": (1,),
            "guided_json": ({},),
        }.items()
        for value in values
    ),
    *(
        _parameter(name, None, raw)
        for name in ("temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty")
        for raw in ("NaN", "Infinity", "-Infinity", "1e400")
    ),
    *(_parameter(name, None, HUGE_INT) for name in ("max_tokens", "seed", "top_k")),
    _body("min above max", OK | {"parameters": {"min_tokens": 5, "max_tokens": 4}}),
    _body(
        "min above the default max",
        OK | {"parameters": {"min_tokens": 700}},
        "parameters.min_tokens",
    ),
    # --- the model's length ---
    _body("prompt too long", OK | {"content": "word " * 40}, "content"),
    _body(
        "prompt and max_tokens too long",
        OK | {"content": "word " * 20, "parameters": {"max_tokens": 13}},
        "parameters.max_tokens",
    ),
    _body(
        "messages too long",
        {"model": "scripted", "messages": [{"role": "user", "content": "word " * 40}]},
    ),
    _body(
        "messages the template refuses",
        {"model": "scripted", "messages": [{"role": "robot", "content": "a"}]},
        "messages",
    ),
    # --- queries ---
    *(
        _get(f"limit {value}", f"{path}?limit={value}", "query.limit")
        for path in ("/results/", "/contexts/")
        for value in ("0", "-1", "1001", "1.5", "x", "", "9" * 30, "NaN")
    ),
    *(
        _get(f"after {value}", f"{path}?after={value}", "query.after")
        for path in ("/results/", "/contexts/")
        for value in ("1", "x", "%00", "")
    ),
    *(
        _get(f"wait {value}", f"/results/{UNKNOWN_ID}?wait={value}", "wait")
        for value in ("-1", "61", "x", "", "nan", "inf", "1e9", "%00")
    ),
    *(
        _get(f"{name} {value}", f"/results/?{name}={value}", f"query.{name}")
        for name, values in {
            "state": ("x", "%00", "PENDING", ""),
            "context_id": ("1", "%00"),
            "retryable": ("x",),
            "full": ("2",),
            "error_code": ("a%00",),
            "model_name": ("%00",),
            "created_after": ("x", "10000-01-01", "%00"),
            "created_before": ("2026-13-01",),
        }.items()
        for value in values
    ),
    Case("cancel all", "POST", "/results/cancel", 422, "invalid_request"),
    Case("cancel by NUL", "POST", "/results/cancel?model_name=%00", 422, "invalid_request"),
    Case("cancel by no UUID", "POST", "/results/cancel?context_id=1", 422, "invalid_request"),
    Case("force", "DELETE", f"/results/{UNKNOWN_ID}?force=x", 422, "invalid_request"),
    # --- media types and callers ---
    *(
        Case(
            f"media type {kind}",
            "POST",
            "/contexts/",
            415,
            "unsupported_media_type",
            None,
            {"content": b'{"content": "a"}', "headers": {"content-type": kind} if kind else {}},
        )
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "")
    ),
    *(
        Case(
            f"{name} {value}",
            "GET",
            "/results/",
            403,
            "forbidden_origin",
            None,
            {"headers": {name: value}},
        )
        for name, value in (
            ("host", "evil.example"),
            ("host", "evil.example:8887"),
            ("host", "127.0.0.1.evil.example"),
            ("host", "localhost@evil.example"),
            ("host", "[::2]:80"),
            ("host", ""),
            ("origin", "http://evil.example"),
            ("origin", "null"),
            ("origin", "https://evil.example:1"),
        )
    ),
    *(
        Case(
            f"key in the header of {path}",
            "POST",
            path,
            422,
            "invalid_request",
            "Idempotency-Key",
            {"json": body, "headers": {"idempotency-key": key}},
        )
        for path, body, key in (
            ("/results/", OK, "x" * 256),
            ("/results/", OK | {"idempotency_key": "a"}, "b"),
            ("/results/", [OK], "a"),
            (f"/models/send/scripted/{UNKNOWN_ID}", {}, ""),
            (f"/results/{UNKNOWN_ID}/retry", None, "x" * 256),
        )
    ),
    *(
        _body(f"key {key!r:.40}", OK | {"idempotency_key": key}, "idempotency_key")
        for key in ODD_KEYS
    ),
    Case(
        "cross-site cancel",
        "POST",
        f"/results/{UNKNOWN_ID}/cancel",
        403,
        "forbidden_origin",
        None,
        {"headers": {"origin": "http://evil.example"}},
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name[:60].replace("\x00", "0"))
async def test_bad_request(served: Service, rows: asyncpg.Connection, case: Case) -> None:
    before = await count_rows(rows)
    response = await served.client.request(case.method, case.path, **case.request)
    assert_problem(response, case.status, case.code, case.named)
    assert await count_rows(rows) == before


@pytest.mark.parametrize(
    "query",
    [
        "created_after=0001-01-01T00:00:00",
        "created_after=0001-01-01T00:00:00%2B14:00",
        "created_before=9999-12-31T23:59:59.999999",
        "created_before=9999-12-31T23:59:59-14:00",
        "created_after=10000000000",
        "created_after=-1",
        "created_after=2026-01-01&created_before=2020-01-01",
        "after=ffffffff-ffff-ffff-ffff-ffffffffffff",
        "after=00000000-0000-0000-0000-000000000000",
        "state=completed&error_code=x&retryable=true&full=1",
        "unknown=1",
    ],
)
async def test_odd_but_valid_lists(served: Service, query: str) -> None:
    response = await served.client.get(f"/results/?{query}")
    assert response.status_code == 200, response.text


async def test_unknown_model_is_told_the_known_ones(served: Service) -> None:
    for method, path in MODEL_ROUTES:
        response = await served.client.request(method, path.format("nobody"))
        problem = assert_problem(response, 404, "unknown_model")
        assert problem["known_models"] == ["scripted"]
        assert "scripted" in problem["detail"]


async def test_wrong_items_of_a_list_leave_the_others(
    served: Service, rows: asyncpg.Connection
) -> None:
    before = await count_rows(rows)
    wrong: list[object] = [
        None, 1, "x", [], {}, OK | {"x": 1}, OK | {"content": ""}, OK | {"model": "nobody"},
        {"model": "scripted", "context_id": UNKNOWN_ID}, OK | {"content": "a\0"},
        OK | {"priority": 1}, OK | {"deadline_seconds": 1e300}, OK | {"content": "word " * 40},
        OK | {"parameters": {"seed": 2**63}},
        {"model": "scripted", "messages": [{"role": "robot", "content": ""}]},
    ]  # fmt: skip
    response = await served.client.post("/results/", json=[OK, *wrong, OK])
    assert response.status_code == 202
    first, *problems, last = response.json()
    assert first["state"] == last["state"] == "pending"
    assert len(problems) == len(wrong)
    assert [(problem["status"], problem["code"]) for problem in problems] == [
        *[(422, "invalid_request")] * 7, (404, "unknown_model"), (404, "not_found"),
        *[(422, "invalid_request")] * 6,
    ]  # fmt: skip
    for problem in problems:
        assert {"type", "title", "detail"} <= problem.keys()
    contexts, results, chunks = before
    assert await count_rows(rows) == (contexts + 2, results + 2, chunks)


async def test_numbers_of_a_list_are_read_as_they_are_written(served: Service) -> None:
    """Neither an infinity nor an integer that only a float would hold refuses the other items."""
    items = [
        b'{"model": "scripted", "content": "a"}',
        b'{"model": "scripted", "content": "a", "parameters": {"temperature": 1e400}}',
        b'{"model": "scripted", "content": "a", "parameters": {"seed": 9223372036854775807}}',
        b'{"model": "scripted", "content": "a", "parameters": {"seed": 18446744073709551617}}',
    ]
    body = b"[" + b",".join(items) + b"]"
    answers = (await served.client.post("/results/", content=body, headers=JSON)).json()
    assert [answer.get("status", 202) for answer in answers] == [202, 422, 202, 422]
    assert answers[2]["parameters"]["seed"] == 2**63 - 1


@pytest.mark.parametrize(
    "body",
    [b"[", b"[1,]", b"[NaN]", b"[1e999]", b"[" + HUGE_INT.encode() + b"]", b'["\\ud800"]', DEEP],
    ids=lambda body: body[:12].decode(),
)
async def test_lists_that_are_no_json(
    served: Service, rows: asyncpg.Connection, body: bytes
) -> None:
    before = await count_rows(rows)
    response = await served.client.post("/results/", content=body, headers=JSON)
    if response.status_code == 202:  # a valid list of a wrong item
        assert [item["status"] for item in response.json()] == [422]
    else:
        assert_problem(response, 422, "invalid_request", "body")
    assert await count_rows(rows) == before


async def test_more_items_than_allowed(served: Service, rows: asyncpg.Connection) -> None:
    before = await count_rows(rows)
    response = await served.client.post("/results/", json=[OK] * 1001)
    assert_problem(response, 413, "body_too_large")
    assert await count_rows(rows) == before


@pytest.mark.parametrize("path", ["/contexts/", "/results/", f"/results/{UNKNOWN_ID}/cancel"])
@pytest.mark.parametrize("size", [2_000_001, 10_000_000])
@pytest.mark.parametrize("is_chunked", [False, True])
async def test_nothing_is_stored_of_bodies_over_the_limit(
    served: Service, rows: asyncpg.Connection, path: str, size: int, is_chunked: bool
) -> None:
    before = await count_rows(rows)
    body = b'{"content": "' + b"x" * (size - 15) + b'"}'

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 65_536):
            yield body[start : start + 65_536]

    response = await served.client.post(
        path, content=pieces() if is_chunked else body, headers=JSON
    )
    problem = assert_problem(response, 413, "body_too_large")
    assert "LLM_MAX_BODY_BYTES" in problem["detail"]
    assert await count_rows(rows) == before


async def test_a_body_of_the_limit_is_taken(served: Service) -> None:
    body = b'{"content": "' + b"x" * (2_000_000 - 15) + b'"}'
    assert len(body) == 2_000_000
    response = await served.client.post("/contexts/", content=body, headers=JSON)
    assert response.status_code == 201
    deleted = await served.client.delete(f"/contexts/{response.json()['id']}")
    assert deleted.status_code == 204


@pytest.mark.parametrize(
    "head",
    [
        b"POST /contexts/ HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"POST /contexts/ HTTP/1.1\r\nHost: localhost\r\nContent-Length: x\r\n\r\n",
        b"GET /results/\xff\xfe HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /results/?state=\xff HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /results/?state=%FF%00%ED%A0%80 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /results/%zz HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET //evil.example/.. HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: \xff\r\n\r\n",
        b"NONSENSE\r\n\r\n",
    ],
    ids=range(9),
)
async def test_odd_bytes_on_the_wire(served: Service, head: bytes) -> None:
    port = served.client.base_url.port
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head)
    status = await asyncio.wait_for(reader.readline(), 30)
    writer.close()
    await writer.wait_closed()
    assert status.split()[1][:1] == b"4", status
    alive = await served.client.get("/health")
    assert alive.status_code == 200


def under_way() -> int:
    """The number of requests that the API works on."""
    return sum("run_asgi" in repr(task.get_coro()) for task in asyncio.all_tasks())


async def test_a_request_whose_body_never_came_is_not_obeyed(
    served: Service, rows: asyncpg.Connection
) -> None:
    """A body may be left out of these: one that was cut off must not pass for none."""
    saved = await served.client.post("/contexts/", json={"content": "cut off"})
    before = await rows.fetchval("SELECT count(*) FROM results")
    for path in (f"/models/send/scripted/{saved.json()['id']}", "/results/"):
        for part in (b"", b'{"parameters": {'):
            _, writer = await asyncio.open_connection("127.0.0.1", served.client.base_url.port)
            head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 40\r\n"
            writer.write(head.encode() + b"Content-Type: application/json\r\n\r\n" + part)
            await writer.drain()
            await until(lambda: asyncio.sleep(0, under_way() == 1))
            writer.close()
            await writer.wait_closed()
            await until(lambda: asyncio.sleep(0, under_way() == 0))
    assert await rows.fetchval("SELECT count(*) FROM results") == before
    sent = await served.client.post("/results/", json=OK)
    await served.client.get(f"/results/{sent.json()['id']}")
    assert await rows.fetchval("SELECT count(*) FROM results") == before + 1


# --- any sampling parameters ------------------------------------------------------------------------

_numbers = st.one_of(
    st.integers(), st.floats(), st.booleans(), st.none(), st.text(max_size=3),
    st.sampled_from([0, -1, 1, 0.0, -0.0, 5e-324, 1e308, 2**31, 2**63, 2**64, -(2**63)]),
    st.lists(st.one_of(st.integers(), st.text(max_size=3)), max_size=3),
    st.dictionaries(st.text(max_size=3), st.floats(), max_size=2),
)  # fmt: skip
_names = st.sampled_from([*SamplingParameters.model_fields, "other"])


@given(parameters=st.dictionaries(_names, _numbers, max_size=4))
@hypothesis_settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
async def test_any_sampling_parameters(served: Service, parameters: dict[str, Any]) -> None:
    body = json.dumps(OK | {"parameters": parameters}).encode()
    response: httpx.Response = await served.client.post("/results/", content=body, headers=JSON)
    if response.status_code != 202:
        problem = assert_problem(response, 422, "invalid_request")
        for error in problem["errors"]:
            name = error["field"].removeprefix("parameters.").split(".")[0]
            assert name in parameters or name in ("parameters", "body"), problem
    else:
        given = {name for name, value in parameters.items() if value is not None}
        assert response.json()["parameters"].keys() == given | {"max_tokens"}
