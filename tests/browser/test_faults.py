"""A page whose API becomes unavailable, and malformed addresses."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, expect

from app.cli.up import processes
from app.ui.main import create_ui
from app.ui.settings import UiSettings
from tests.browser.conftest import Stack, wait_for
from tests.chromium import open_page
from tests.conftest import ROOT
from tests.integration.support import serve_app


class Api:
    """An API of its own on the database of `stack`, that can be killed and started again."""

    def __init__(self, stack: Stack, log: Path) -> None:
        self.port = processes.free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._environment = {**os.environ, **stack.environment, "LLM_PORT": str(self.port)}
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "app", "serve"], cwd=ROOT, env=self._environment,
                stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
        wait_for(f"{self.url}/health/ready")

    def kill(self) -> None:
        assert self._process
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()


@pytest_asyncio.fixture(loop_scope="session")
async def api(stack: Stack, tmp_path: Path) -> AsyncIterator[Api]:
    api = Api(stack, tmp_path / "api.log")
    await asyncio.to_thread(api.start)
    yield api
    api.kill()


@pytest_asyncio.fixture(loop_scope="session")
async def own_page(api: Api, browser: Browser) -> AsyncIterator[Page]:
    """A page in front of that API."""
    settings = UiSettings.model_validate({"api_url": api.url})
    async with serve_app(create_ui(settings)) as url, open_page(browser, url) as page:
        yield page


async def test_the_api_goes_away_and_comes_back(api: Api, own_page: Page, stack: Stack) -> None:
    page = own_page
    await page.goto("/playground")
    await page.check("input[value=text]")
    await page.fill("#prompt", "{{delay_ms=50 chunks=300}} away")
    await page.fill("#p-max_tokens", "300")
    await page.click("button.primary")
    output = page.locator(".live .output")
    await expect(output).to_contain_text(" ")
    api.kill()
    await expect(page.locator("#offline")).to_contain_text("The connection is lost")
    other = await page.context.new_page()
    await other.goto("/playground")
    await expect(other.locator("[role=alert]")).to_contain_text("does not answer")
    await other.close()
    await asyncio.to_thread(api.start)
    await expect(page.locator(".live .badge")).to_have_text("completed", timeout=60_000)
    await expect(page.locator("#offline")).to_be_hidden()
    result = stack.api.get(f"/results/{page.url.rsplit('/', 1)[1]}").json()
    assert await output.text_content() == result["result"]


async def test_what_is_entered_outlives_the_api(api: Api, own_page: Page) -> None:
    page = own_page
    await page.goto("/playground")
    await page.fill("#prompt", "keep <me>")
    api.kill()
    await page.click("button.primary")
    await expect(page.locator("[role=alert]")).to_contain_text("does not answer")
    await asyncio.to_thread(api.start)
    await page.click("text=Send it again")
    await expect(page.locator(".live .badge")).to_have_text("completed")
    await expect(page.locator(".turn .text")).to_have_text("keep <me>")


HOSTILE = [
    "/playground/%2e%2e", "/playground/..%2f..%2fcontexts", "/playground/<script>",
    "/playground/%00", "/playground/" + "x" * 5000, "/playground?from=%2e%2e", "/compare?ids=a,b",
    "/compare?ids=" + "," * 500, "/results/%2e%2e/events", "/results/x/answer", "/static/../main.py",
    "/static/%2e%2e/main.py", "/nowhere", "/playground?model=%3Cscript%3E", "/sign-in?next=//x",
]  # fmt: skip

# A page with nothing of what the address names.
HARMLESS = {"/compare?ids=" + "," * 500, "/playground?model=%3Cscript%3E", "/sign-in?next=//x"}


@pytest.mark.parametrize("path", HOSTILE)
def test_hostile_addresses_are_answered_calmly(stack: Stack, path: str) -> None:
    answer = httpx.get(stack.url + path, headers={"X-Part": "1"}, follow_redirects=True)
    assert answer.status_code == (200 if path in HARMLESS else 404)
    assert "Traceback" not in answer.text
    assert "<script>" not in answer.text.replace('<script src="/static', "").replace(
        '<script type="module" src="/static', ""
    )


REMEDIES = [
    "/playground/export", "/playground?from=export", "/compare?ids=export", "/results/export/answer",
    "/results/export/events", "/playground?from={id}/attempts", "/playground?from={id}/stream",
    "/launches/profiles",
]  # fmt: skip


@pytest.mark.parametrize("path", REMEDIES)
def test_what_is_no_id_is_not_asked_for(stack: Stack, path: str) -> None:
    # The API would send all results, or a stream: the page's process would take them into memory.
    sent = stack.api.post("/results/", json={"model": "scripted", "content": "{{chunks=2}}"}).json()
    answer = httpx.get(stack.url + path.format(id=sent["id"]), headers={"X-Part": "1"})
    assert answer.status_code == 404


LONG = "x" * 70_000
UNSENDABLE = [
    ("/playground", {"prompt": "x", "deadline_seconds": "nan"}),
    ("/playground", {"prompt": "x", "p.temperature": "1e999"}),
    ("/playground", {"prompt": "x", "p.logit_bias": '{"1": NaN}'}),
    ("/playground", {"prompt": "x", "p.logit_bias": '{"\\ud800": 1}'}),
    ("/compare", {"prompt": "x", "1.model": "scripted", "1.more": '{"top_k": Infinity}'}),
    ("/launches/new", {"do": "plan", "config": '{"a": NaN}'}),
    ("/launches/new", {"do": "script", "engine.gpu_memory_utilization": "nan", "model": "x"}),
    ("/launches/downloads", {"model": LONG}),
    ("/models/load", {"name": LONG}),
    ("/models/servers/remove", {"name": LONG}),
    ("/history/cancel", {"model_name": LONG}),
]


@pytest.mark.parametrize(("path", "form"), UNSENDABLE)
def test_what_cannot_be_sent_is_reported(stack: Stack, path: str, form: dict[str, str]) -> None:
    answer = httpx.post(stack.url + path, data={"model": "scripted"} | form)
    assert answer.status_code == 422, answer.text
    assert "Internal error" not in answer.text


def test_odd_headers_are_no_fault_of_ours(stack: Stack) -> None:
    odd = {b"Last-Event-ID": b"\xe9", b"Content-Type": b"multipart/form-data; boundary=\xe9"}
    unknown = "01890000-0000-7000-8000-000000000000"
    assert httpx.get(f"{stack.url}/results/{unknown}/events", headers=odd).status_code == 422
    assert httpx.post(f"{stack.url}/bulk/files", content=b"x", headers=odd).status_code == 422
    form = {"model": "scripted", "prompt": "x {{chunks=2}}", "key": "\u00e9"}
    assert httpx.post(f"{stack.url}/playground", data=form).status_code == 303
    # No address without a name: the API would answer with a redirect, which is no success.
    assert httpx.post(f"{stack.url}/models/servers/remove", data={"name": ""}).status_code != 303


async def test_tokens_go_to_no_proxy(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    settings = UiSettings.model_validate({"api_url": str(stack.api.base_url)})
    async with serve_app(create_ui(settings)) as url, httpx.AsyncClient(trust_env=False) as http:
        assert (await http.get(f"{url}/playground")).status_code == 200


async def test_what_answers_is_not_the_api(stack: Stack) -> None:
    settings = UiSettings.model_validate({"api_url": f"{stack.url}/sign-in?x="})
    async with serve_app(create_ui(settings)) as url, httpx.AsyncClient() as http:
        answer = await http.get(f"{url}/playground")
        assert answer.status_code == 502
        assert "is not the API" in answer.text


@pytest.mark.parametrize("place", ["playground", "history"])
async def test_a_result_is_deleted_while_it_is_watched(
    stack: Stack, page: Page, place: str
) -> None:
    body = {"model": "scripted", "content": "{{delay_ms=100 chunks=600}}"}
    sent = stack.api.post("/results/", json=body).json()
    await page.goto(f"/{place}/{sent['id']}")
    await expect(page.locator(".live .output")).to_contain_text(" ")
    stack.api.delete(f"/results/{sent['id']}?force=true").raise_for_status()
    await expect(page.locator("#offline")).to_contain_text("not there any more")
    await expect(page.locator(".live .badge")).to_have_text("deleted")


async def test_what_is_marked_is_not_replaced(stack: Stack, page: Page) -> None:
    body = {"model": "scripted", "content": "{{delay_ms=100 chunks=100}}"}
    sent = stack.api.post("/results/", json=body).json()
    await page.goto(f"/history/{sent['id']}")
    help_text = page.get_by_text("The time by phase is shown once it has ended.")
    await help_text.select_text()
    await expect(page.locator(".live .badge")).to_have_text("completed", timeout=60_000)
    assert await page.evaluate("getSelection().toString()")
    await page.evaluate("getSelection().removeAllRanges()")
    await expect(help_text).to_have_count(0)
