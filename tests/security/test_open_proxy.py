"""An API without authentication behind a reverse proxy that is open to other machines."""

from typing import Any

import pytest
import yaml
from starlette.types import Message, Receive, Scope, Send

from app.api.middleware.request_guard import RequestGuard
from app.api.startup_checks import check_startup
from app.core.settings.api import HttpSettings
from tests.conftest import ROOT
from tests.unit.api.test_startup_checks import OPEN, STRONG, settings

API = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]["api"]["environment"]
LOCAL = HttpSettings().local_clients


async def status_of(local: list[str] | None, headers: list[tuple[str, str]]) -> int:
    """The status of a request with this machine as its Host."""
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b""}

    async def send(message: Message) -> None:
        sent.append(message)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    raw = [(name.lower().encode(), value.encode()) for name, value in headers]
    scope: dict[str, Any] = {
        "type": "http",
        "method": "GET",
        "path": "/results/",
        "headers": [(b"host", b"localhost"), *raw],
    }
    await RequestGuard(app, ["localhost"], 100, local_clients=local)(scope, receive, send)
    return int(sent[0]["status"])


@pytest.mark.parametrize(
    "headers",
    [
        [("X-Forwarded-For", "203.0.113.7")],
        [("X-Forwarded-For", "192.168.1.7")],
        [("X-Forwarded-For", "2001:db8::1")],
        [("X-Forwarded-For", "127.0.0.1, 203.0.113.7")],
        [("X-Forwarded-For", "203.0.113.7, 127.0.0.1")],
        [("X-Forwarded-For", "127.0.0.1"), ("X-Forwarded-For", "203.0.113.7")],
        [("X-Forwarded-For", "::ffff:203.0.113.7")],
        [("X-Forwarded-For", "unknown")],
        [("X-Forwarded-For", "")],
        [("X-Real-IP", "203.0.113.7")],
        [("Forwarded", "for=127.0.0.1")],
        [("Via", "1.1 proxy")],
    ],
)
async def test_clients_of_other_machines_are_refused(headers: list[tuple[str, str]]) -> None:
    assert await status_of(LOCAL, headers) == 403
    assert await status_of(API["LLM_LOCAL_CLIENTS"].split(","), headers) == 403
    assert await status_of(None, headers) == 200  # authenticated


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "::1", "::ffff:127.0.0.1", "127.0.0.2, 127.0.0.1"]
)
async def test_clients_of_this_machine_are_served(address: str) -> None:
    assert await status_of(LOCAL, [("X-Forwarded-For", address)]) == 200
    assert await status_of(LOCAL, []) == 200


def test_compose_does_not_publish_an_open_api() -> None:
    """`PROXY_ADDRESS` alone publishes the proxy, with the API of .env.api.dev behind it."""
    assert API["LLM_PUBLISHED_ADDRESS"] == "${PROXY_ADDRESS:-127.0.0.1}"

    def check(published: str, **auth: str) -> str | None:
        values = {"LLM_HOST": OPEN, "LLM_ALLOW_UNAUTHENTICATED": "true"} | auth
        return check_startup(settings(**values, LLM_PUBLISHED_ADDRESS=published)).refusal

    assert "PROXY_ADDRESS" in (check(OPEN) or "")
    assert "PROXY_ADDRESS" in (check("192.168.1.7") or "")
    assert check("127.0.0.1") is None
    assert check("") is None
    assert check(OPEN, JWT_SECRET=STRONG) is None
