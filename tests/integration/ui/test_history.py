"""The history without a browser: what a browser's tests cannot reach, or would take long for."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import httpx
import pytest
from starlette.applications import Starlette
from starlette.types import Message

from app.core.settings import Settings
from app.ui import bounded
from app.ui.main import create_ui
from app.ui.settings import UiSettings
from tests.conftest import Service
from tests.integration.support import finish, serve, until

DIRECTIVES = ("{{chunks=2}}", "{{refuse}}", "{{chunks=0}}")


@contextlib.asynccontextmanager
async def visit(settings: Settings) -> AsyncIterator[tuple[Service, httpx.AsyncClient]]:
    """A service, and a visitor of its web page whose browser has no scripts."""
    async with serve(settings, with_worker=True) as service:
        app = create_ui(UiSettings.model_validate({"api_url": str(service.client.base_url)}))
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as http,
        ):
            yield service, http


@pytest.mark.trial
async def test_pages_of_results_of_all_kinds(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with visit(settings) as (service, http):
        empty = await http.get("/history")
        assert "Nothing has been sent yet." in empty.text
        for directive in DIRECTIVES:
            result = await finish(service, f"one {directive}")
            answer = await http.get(f"/history/{result['id']}")
            assert answer.status_code == 200, answer.text
            part = await http.get(f"/history/{result['id']}/part", headers={"X-Part": "1"})
            assert (part.status_code, part.headers["x-part-ended"]) == (200, "1")
        hidden = {"model": "scripted", "input": "gone {{chunks=2}}", "store": False}
        sent = await service.client.post("/v1/responses", json=hidden)
        assert sent.status_code == 200, sent.text
        gone = f"/history/{sent.headers['x-result-id']}"

        async def is_erased() -> bool:
            return "erased" in (await http.get(gone)).text

        await until(is_erased)
        assert "Its texts were erased" in (await http.get("/history")).text
        long = await finish(service, "long {{chunks=300}}", parameters={"max_tokens": 400})
        text = await http.get(f"/history/{long['id']}/text")
        assert text.text == long["result"]
        assert text.headers["content-type"] == "text/plain; charset=utf-8"
        whole = await http.get(f"/history/{long['id']}/json")
        assert whole.json() == long
        monkeypatch.setattr(bounded, "MAX_BYTES", 2000)
        large = await http.get(f"/history/{long['id']}")
        assert large.status_code == 200
        assert "too large to be shown" in large.text
        part = await http.get(f"/history/{long['id']}/part", headers={"X-Part": "1"})
        assert "too large to be shown" in part.text


@pytest.mark.trial
async def test_a_browser_that_leaves_holds_nothing(settings: Settings) -> None:
    async with serve(settings, with_worker=True) as service:
        body = {"model": "scripted", "content": "{{delay_ms=100 chunks=500}}"}
        sent = (await service.client.post("/results/", json=body)).json()
        app = create_ui(UiSettings.model_validate({"api_url": str(service.client.base_url)}))
        async with app.router.lifespan_context(app):
            for path in (
                f"/results/{sent['id']}/events",
                f"/history/{sent['id']}/json",
                "/history/export",
            ):
                for piece in ("start", "body"):
                    await leave(app, path, f"http.response.{piece}")
                pool = app.state.client.http._transport._pool
                assert all(one.is_idle() or one.is_closed() for one in pool.connections), path


async def leave(app: Starlette, path: str, stuck_at: str) -> None:
    """Ask for a page, take no more from a part of it on, and be gone then."""
    scope = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "method": "GET",
        "path": path, "raw_path": path.encode(), "query_string": b"", "http_version": "1.1",
        "headers": [(b"host", b"localhost")], "scheme": "http", "root_path": "",
    }  # fmt: skip
    is_stuck = asyncio.Event()

    async def receive() -> Message:
        await is_stuck.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == stuck_at:
            is_stuck.set()
            await asyncio.Event().wait()

    await app(scope, receive, send)
