"""The web page in a real browser, in front of a real vLLM engine: watch, come back, stop."""

from collections.abc import AsyncIterator

import pytest
from playwright.async_api import Page, expect

from app.core.settings import Settings
from app.ui.main import create_ui
from app.ui.settings import UiSettings
from tests.chromium import open_browser, open_page
from tests.conftest import Service
from tests.integration.support import serve, serve_app

pytestmark = pytest.mark.timeout(300)

ENGINE_MS = 60_000  #: 300 tokens of an engine that shares two processors with three other tests


@pytest.fixture
async def api(vllm_settings: Settings) -> AsyncIterator[Service]:
    """API and worker behind a socket, in front of the vLLM engine."""
    async with serve(vllm_settings, with_worker=True) as service:
        yield service


@pytest.fixture
async def page(api: Service) -> AsyncIterator[Page]:
    """A visitor's page of a web page in front of that API."""
    settings = UiSettings.model_validate({"api_url": str(api.client.base_url)})
    async with (
        serve_app(create_ui(settings)) as url,
        open_browser() as browser,
        open_page(browser, url) as page,
    ):
        yield page


async def test_watched_left_resumed_and_stopped(api: Service, page: Page) -> None:
    output, badge = page.locator(".live .output"), page.locator(".live .badge")
    await page.goto("/playground")
    await page.check("input[value=text]")
    await page.fill("#prompt", "def ")
    await page.fill("#p-max_tokens", "300")
    await page.fill("#p-temperature", "0")
    await page.click("summary:has-text('Length')")  # closes it
    await page.click("button.primary")
    await expect(output).to_contain_text("(", timeout=ENGINE_MS)
    await page.reload()
    await expect(badge).to_have_text("completed", timeout=ENGINE_MS)
    result_id = page.url.rsplit("/", 1)[1]
    result = (await api.client.get(f"/results/{result_id}")).json()
    assert await output.text_content() == result["result"]
    await expect(page.locator(".live .figures")).to_contain_text("300 tokens")

    # With others to generate, a fast engine, too, takes longer than the clicks.
    parameters = {"max_tokens": 1000, "ignore_eos": True}
    others = [{"model": "demo", "content": f"def {n}", "parameters": parameters} for n in range(32)]
    assert (await api.client.post("/results/", json=others)).status_code == 202
    await page.check("input[value=text]")
    await page.fill("#prompt", "class ")
    await page.fill("#p-max_tokens", "1000")
    await page.click("button.primary")
    await page.wait_for_url(lambda url: result_id not in url)
    await expect(output).to_contain_text(" ", timeout=ENGINE_MS)
    await expect(page.locator(".live .figures")).to_contain_text("tokens/s")
    await page.click("button.danger")
    await expect(badge).to_have_text("cancelled")
    stopped = (await api.client.get(f"/results/{page.url.rsplit('/', 1)[1]}")).json()
    assert stopped["error"]["code"] == "cancelled"
    assert await output.text_content() == stopped["result"]
    await api.client.post("/results/cancel?model_name=demo")
