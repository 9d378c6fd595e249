"""The web page in a real Chromium, in front of what `make run LIGHT=1` starts.

All tests here share one loop, one run of `up` and one browser; each has a browser context of its own.
"""

import inspect
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page

from app.cli.up import processes
from tests.browser.accessibility import assert_accessible
from tests.chromium import open_browser, open_page
from tests.conftest import ROOT

HERE = Path(__file__).parent
_START_SECONDS = 120


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One loop for them all: a browser belongs to the loop that started it."""
    for item in items:
        is_async = inspect.iscoroutinefunction(getattr(item, "function", None))
        if is_async and HERE in item.path.parents:
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


@dataclass
class Stack:
    """A running service with its web page: `api` calls the one, `url` is the other's."""

    url: str
    api: httpx.Client
    data: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    pid: int | None = None  # of `up`

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
                process.pid,
            )
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)


@dataclass
class Secured:
    """The same service behind an API that asks for tokens, with a web page of its own."""

    url: str
    api_url: str
    environment: Mapping[str, str]

    def token(self, team: str, *options: str) -> str:
        """A new API key."""
        command = [sys.executable, "-m", "app", "token", "create", "--team", team, *options]
        return subprocess.check_output(
            command, cwd=ROOT, env={**os.environ, **self.environment}, text=True
        ).split()[0]

    def read(self, path: str, token: str) -> Any:
        """The API's response to a client with that token."""
        headers = {"Authorization": f"Bearer {token}"}
        return httpx.get(self.api_url + path, headers=headers).json()

    def revoke(self, token: str) -> None:
        """End an API key."""
        subprocess.run(
            [sys.executable, "-m", "app", "token", "revoke", "_".join(token.split("_")[:2])],
            cwd=ROOT, env={**os.environ, **self.environment}, check=True,
        )  # fmt: skip


@pytest.fixture(scope="session")
def secured(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    """An API with LLM_AUTH=on on the database of `stack`, and a page in front of it."""
    port, ui_port = processes.free_port(), processes.free_port()
    url, api_url = f"http://127.0.0.1:{ui_port}", f"http://127.0.0.1:{port}"
    environment = {
        **stack.environment,
        "LLM_AUTH": "on", "LLM_PORT": str(port),
        "LLM_UI_PORT": str(ui_port), "LLM_UI_API_URL": api_url,
    }  # fmt: skip
    log = (tmp_path_factory.mktemp("secured") / "log").open("wb")
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "app", command], cwd=ROOT, env={**os.environ, **environment},
            stdout=log, stderr=subprocess.STDOUT,
        )
        for command in ("serve", "ui")
    ]  # fmt: skip
    try:
        for ready in (f"{api_url}/health/ready", f"{url}/ready"):
            wait_for(ready)
        yield Secured(url, api_url, environment)
    finally:
        for process in started:
            process.send_signal(signal.SIGTERM)
        for process in started:
            process.wait(timeout=30)
        log.close()


def wait_for(url: str) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            if httpx.get(url).is_success:
                return
        except httpx.HTTPError:
            pass
        assert time.monotonic() < deadline, url
        time.sleep(0.1)


def _read_settings(file: Path) -> dict[str, str]:
    """The environment that `make run` wrote for a shell, as a shell reads it."""
    said = subprocess.check_output(["bash", "-c", f"set -a; . {file}; env -0"], env={}, text=True)
    pairs = (line.partition("=") for line in said.split("\0") if "=" in line)
    return {name: value for name, _, value in pairs if name.isupper() and name != "PWD"}


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser() -> AsyncIterator[Browser]:
    """The Chromium that the system has."""
    async with open_browser() as browser:
        yield browser


@pytest_asyncio.fixture(loop_scope="session")
async def page(stack: Stack, browser: Browser) -> AsyncIterator[Page]:
    """A page of a visitor who has never been here."""
    async with open_page(browser, stack.url) as page:
        yield page


__all__ = ["Stack", "assert_accessible"]
