"""The door: Host, Origin, media type, size."""

from collections.abc import Callable
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from app.api.middleware.request_guard import RequestGuard
from app.core.byte_budget import ACCOUNT, Account, ByteBudget

HOSTS = ["localhost", "127.0.0.1", "[::1]", "My.Example"]


class Inner:
    """The application behind the door: remembers what reached it."""

    def __init__(self) -> None:
        self.bodies: list[Message] = []
        self.calls = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.calls += 1
        if scope["type"] == "http":
            self.bodies.append(await receive())


async def knock(
    *messages: Message,
    method: str = "POST",
    hosts: list[str] | None = HOSTS,
    kind: str = "http",
    most: int = 100,
    on_receive: Callable[[], object] = lambda: None,
    **headers: str,
) -> tuple[Inner, int | None]:
    """Send one request; the application and the status of a refusal, if it was one."""
    inner = Inner()
    sent: list[Message] = []
    waiting = list(messages) or [{"type": "http.request", "body": b""}]

    async def receive() -> Message:
        on_receive()
        return waiting.pop(0) if waiting else {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope: dict[str, Any] = {"type": kind, "method": method, "headers": raw, "path": "/"}
    await RequestGuard(inner, hosts, most)(scope, receive, send)
    return inner, sent[0]["status"] if sent else None


def body(*pieces: bytes) -> list[Message]:
    return [
        {"type": "http.request", "body": piece, "more_body": place < len(pieces) - 1}
        for place, piece in enumerate(pieces)
    ]


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST:8887",
        "127.0.0.1:1",
        "[::1]",
        "[::1]:8887",
        "my.example",
        "localhost:",
    ],
)
async def test_hosts_of_the_list_enter(host: str) -> None:
    inner, status = await knock(host=host, method="GET")
    assert (inner.calls, status) == (1, None)


@pytest.mark.parametrize(
    "host",
    ["evil.example", "localhost.evil.example", "evil.example:8887", "127.0.0.1.evil.example",
     "[::2]", "::1", "localhost@evil.example", "", "127.0.0.2", "xn--localhost", "local host"],
)  # fmt: skip
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
async def test_other_hosts_do_not(host: str, method: str) -> None:
    inner, status = await knock(host=host, method=method)
    assert (inner.calls, status) == (0, 403)


@pytest.mark.parametrize(
    ("origin", "enters"),
    [("http://localhost:3000", True), ("https://my.example", True), ("http://evil.example", False),
     ("null", False), ("http://[::1]:80", True), ("file://", False)],
)  # fmt: skip
async def test_origins(origin: str, enters: bool) -> None:
    inner, status = await knock(host="localhost", origin=origin)
    assert (inner.calls, status) == ((1, None) if enters else (0, 403))


async def test_a_star_lets_every_host_in() -> None:
    inner, _ = await knock(hosts=["*"], host="evil.example", origin="null")
    assert inner.calls == 1


@pytest.mark.parametrize(
    ("host", "origin", "enters"),
    [("any.example", None, True), ("any.example:1", "https://any.example", True),
     ("any.example", "https://ANY.example:8887", True), ("any.example", "https://evil.example", False),
     ("any.example", "null", False), ("any.example", "", False), (None, "https://evil.example", False),
     ("", "null", False), (None, None, True)],
)  # fmt: skip
async def test_without_a_list_the_only_origin_is_the_host(
    host: str | None, origin: str | None, enters: bool
) -> None:
    given = {
        name: value for name, value in (("host", host), ("origin", origin)) if value is not None
    }
    inner, status = await knock(hosts=None, **given)  # type: ignore[arg-type] # headers by name
    assert (inner.calls, status) == ((1, None) if enters else (0, 403))


@pytest.mark.parametrize(
    ("kind", "enters"),
    [("application/json", True), ("application/json; charset=utf-8", True),
     ("APPLICATION/JSON", True), ("application/merge-patch+json", True), ("text/plain", False),
     ("application/x-www-form-urlencoded", False), ("text/plain; application/json", False)],
)  # fmt: skip
async def test_media_types(kind: str, enters: bool) -> None:
    inner, status = await knock(*body(b"{}"), content_type=kind)
    assert (inner.calls, status) == ((1, None) if enters else (0, 415))


async def test_a_body_without_a_type_is_refused_and_no_body_is_fine() -> None:
    assert (await knock(*body(b"{}")))[1] == 415
    assert (await knock())[0].calls == 1


async def test_a_body_in_pieces_arrives_whole() -> None:
    inner, _ = await knock(*body(b'{"a"', b": ", b"1}"), content_type="application/json")
    assert inner.bodies == [{"type": "http.request", "body": b'{"a": 1}', "more_body": False}]


@pytest.mark.parametrize(
    "messages",
    [body(b"x" * 101), body(b"x" * 60, b"x" * 60), body(b"x" * 60, b"x" * 41, b"x" * 10**6)],
)
async def test_bodies_over_the_limit_reach_no_route(messages: list[Message]) -> None:
    inner, status = await knock(*messages, content_type="application/json")
    assert (inner.calls, status) == (0, 413)
    assert (await knock(*body(b"x" * 100), content_type="application/json"))[0].calls == 1


async def test_a_declared_length_over_the_limit_is_refused_before_it_is_read() -> None:
    _, status = await knock(content_length="101", expect="100-continue")
    assert status == 413


async def test_a_client_that_leaves_while_sending() -> None:
    inner, status = await knock(
        {"type": "http.request", "body": b"x" * 200, "more_body": True}, {"type": "http.disconnect"}
    )
    assert (inner.calls, status) == (0, 413)


@pytest.mark.parametrize(
    ("most", "headers", "charge"),
    [
        (100_000, {"content_length": "8192"}, 0),  # as texts that are not counted
        (100_000, {"content_length": "8193"}, 4 * 8_193),
        (100_000, {"content_length": "50000"}, 200_000),
        (100_000, {"transfer_encoding": "chunked"}, 400_000),  # it may be as long as is allowed
        (100_000, {"transfer_encoding": "chunked", "content_length": "x"}, 400_000),
        (8_192, {"transfer_encoding": "chunked"}, 0),
        (100_000, {}, 0),
    ],
)
async def test_a_body_is_charged_while_it_arrives_and_then_by_its_length(
    most: int, headers: dict[str, str], charge: int
) -> None:
    budget = ByteBudget(10_000_000)
    ACCOUNT.set(Account(budget, "team"))
    charges: list[int] = []

    inner, status = await knock(
        *body(b"x" * 500, b"x" * 500), most=most, on_receive=lambda: charges.append(budget.used),
        content_type="application/json", **headers,  # type: ignore[arg-type] # headers by name
    )  # fmt: skip
    assert (inner.calls, status) == (1, None)
    assert charges == [charge, charge]
    assert budget.used == min(charge, 4 * 1_000)


async def test_what_is_no_request_passes() -> None:
    inner, status = await knock(kind="lifespan", host="evil.example")
    assert (inner.calls, status) == (1, None)
