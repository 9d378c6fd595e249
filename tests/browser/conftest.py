"""The web page in a real Chromium, in front of what `make run LIGHT=1` starts.

All tests here share one loop, one run of `up` and one browser; each has a browser context of its own.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, async_playwright

from app.embedded import processes
from tests.browser.accessibility import assert_accessible
from tests.conftest import ROOT

CHROMIUM = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
HERE = Path(__file__).parent
_START_SECONDS = 120


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One loop for them all: a browser belongs to the loop that started it."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)
            item.add_marker(pytest.mark.system)


@dataclass
class Stack:
    """A running service with its web page: `api` calls the one, `url` is the other's."""

    url: str
    api: httpx.Client
    data: Path
    environment: Mapping[str, str] = field(default_factory=dict)

    def send(self, prompt: str, **more: object) -> str:
        """Send a prompt to the scripted model; the result's id."""
        body = {"model": "scripted", "content": prompt} | more
        response = self.api.post("/results/", json=body)
        assert response.status_code in (200, 202), response.text
        return str(response.json()["id"])

    def finish(self, prompt: str, **more: object) -> str:
        """Send it and wait for the end; the result's id."""
        result_id = self.send(prompt, **more)
        self.api.get(f"/results/{result_id}", params={"wait": 30})
        return result_id


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """`python -m app up --light`, as `make run LIGHT=1` runs it; without authentication."""
    directory = tmp_path_factory.mktemp("up")
    port, ui_port = processes.free_port(), processes.free_port()
    output = directory / "output"
    options = ["--light", "--port", str(port), "--ui-port", str(ui_port)]
    with output.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "app", "up", *options, "--data", str(directory / "data")],
            cwd=ROOT,
            env=os.environ,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
        )
    try:
        deadline = time.monotonic() + _START_SECONDS
        while "Ready in" not in output.read_text():
            assert process.poll() is None, output.read_text()
            assert time.monotonic() < deadline, output.read_text()
            time.sleep(0.1)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as api:
            yield Stack(
                f"http://127.0.0.1:{ui_port}",
                api,
                directory / "data",
                _read_settings(directory / "data" / "settings.env"),
            )
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)


def _read_settings(file: Path) -> dict[str, str]:
    """What `make run` wrote for a shell, as a shell reads it."""
    said = subprocess.check_output(["bash", "-c", f"set -a; . {file}; env -0"], env={}, text=True)
    pairs = (line.partition("=") for line in said.split("\0") if "=" in line)
    return {name: value for name, _, value in pairs if name.isupper() and name != "PWD"}


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser() -> AsyncIterator[Browser]:
    """The Chromium that the system has."""
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("needs chromium: apt-get install chromium")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=CHROMIUM)
        yield browser
        await browser.close()


@pytest_asyncio.fixture(loop_scope="session")
async def page(stack: Stack, browser: Browser) -> AsyncIterator[Page]:
    """A page of a visitor who has never been here. Fails the test for errors in its scripts, and for
    what the Content-Security-Policy refused.
    """
    context = await browser.new_context(base_url=stack.url)
    page = await context.new_page()
    page.set_default_timeout(20_000)
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on(
        "console",
        lambda message: problems.append(message.text) if "Security" in message.text else None,
    )
    yield page
    await context.close()
    assert not problems


__all__ = ["Stack", "assert_accessible"]
