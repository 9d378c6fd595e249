"""A browser without scripts, in front of a service and its web page."""

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx

from app.core.ids import new_id
from app.core.settings import Settings
from app.ui.bulk.background import Background
from app.ui.main import create_ui
from app.ui.settings import UiSettings
from tests.integration.support import serve, until

KEY = new_id().hex
MAPPING = {"key": KEY, "kind": "completion", "prompt": "prompt", "model": "scripted", "max_tokens": "3"}  # fmt: skip


class Visitor:
    """A browser without scripts."""

    def __init__(
        self, http: httpx.AsyncClient, api: httpx.AsyncClient, background: Background
    ) -> None:
        self.http = http
        self.api = api
        self.background = background

    async def upload(self, content: bytes, name: str = "file.csv") -> httpx.Response:
        return await self.http.post(
            "/bulk/files", data={"purpose": "batch"}, files={"file": (name, content)}
        )

    async def send(self, content: bytes, name: str = "file.csv", **form: str) -> httpx.Response:
        uploaded = await self.upload(content, name)
        assert uploaded.status_code == 303, uploaded.text
        return await self.http.post(uploaded.headers["location"], data=MAPPING | form)

    async def ended(self, path: str) -> str:
        """The job's page once it has ended."""

        async def look() -> str | None:
            response = await self.http.get(f"{path}/progress")
            assert response.status_code == 200, response.text
            return response.text if "x-part-ended" in response.headers else None

        await until(look, 60)
        return (await self.http.get(path)).text

    async def until_idle(self, path: str) -> str:
        """The job's page once this process sends none of its rows."""

        async def look() -> str | None:
            text = (await self.http.get(path)).text
            return None if self.background.is_busy(path.rpartition("/")[2]) else text

        await until(look, 60)
        return (await self.http.get(path)).text

    async def results(self, path: str) -> list[dict[str, Any]]:
        response = await self.http.get(f"{path}/results.jsonl")
        assert response.status_code == 200, response.text
        return [json.loads(line) for line in response.text.splitlines()]

    async def jobs(self) -> list[dict[str, Any]]:
        jobs: list[dict[str, Any]] = (await self.api.get("/jobs")).json()
        return jobs

    async def files(self) -> list[dict[str, Any]]:
        files: list[dict[str, Any]] = (await self.api.get("/v1/files")).json()["data"]
        return files


@contextlib.asynccontextmanager
async def visit(settings: Settings, **ui_settings: object) -> AsyncIterator[Visitor]:
    """A service, its web page, and a visitor."""
    async with serve(settings, with_worker=True) as service:
        url = str(service.client.base_url)
        app = create_ui(UiSettings.model_validate({"api_url": url} | ui_settings))
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as http,
        ):
            yield Visitor(http, service.client, app.state.bulk_background)
