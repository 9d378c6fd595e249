"""A real Chromium, and a visitor's page in it."""

import contextlib
import shutil
from collections.abc import AsyncIterator

import pytest
from playwright.async_api import Browser, Page, async_playwright, expect

CHROMIUM = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
# A test machine may stall for seconds: 5 s, Playwright's default, is then too short.
_TIMEOUT_MS = 20_000
expect.set_options(timeout=_TIMEOUT_MS)


@contextlib.asynccontextmanager
async def open_browser() -> AsyncIterator[Browser]:
    """The Chromium that the system has; it belongs to the loop that opened it."""
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("needs chromium: apt-get install chromium")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=CHROMIUM)
        yield browser
        await browser.close()


@contextlib.asynccontextmanager
async def open_page(browser: Browser, url: str) -> AsyncIterator[Page]:
    """A page of a visitor who has never been here.

    Errors in its scripts, and what the Content-Security-Policy refused, are errors here.
    """
    context = await browser.new_context(base_url=url)
    page = await context.new_page()
    page.set_default_timeout(_TIMEOUT_MS)
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on(
        "console",
        lambda message: problems.append(message.text) if "Security" in message.text else None,
    )
    yield page
    await context.close()
    assert not problems
