"""Write docs/images: every page of the web page, of a service that has something to show.

Run from the repository's root by `make screenshots`: it starts `make run` with the demo model on ports of
its own, sends what the pages are to show, and photographs them in Chromium.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
from playwright.async_api import Page, async_playwright

from app.embedded import processes

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
_START_SECONDS = 300
_PROMPTS = (
    "def read(",
    "class Queue:",
    "import json\n\ndef ",
    "def parse_date(",
    "async def main(",
)


@contextlib.contextmanager
def running() -> Iterator[tuple[str, httpx.Client]]:
    """A service with its web page: the page's address, and the API."""
    port, ui_port = processes.free_port(), processes.free_port()
    with tempfile.TemporaryDirectory(prefix="llm-screenshots-") as directory:
        output = Path(directory, "output")
        command = ["-m", "app", "up", "--port", str(port), "--ui-port", str(ui_port)]
        with output.open("wb") as stream:
            process = subprocess.Popen(
                [sys.executable, *command, "--data", f"{directory}/data"],
                cwd=ROOT,
                env=os.environ,
                stdout=stream,
                stderr=subprocess.STDOUT,
            )
        try:
            deadline = time.monotonic() + _START_SECONDS
            while "Ready in" not in output.read_text():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(output.read_text())
                time.sleep(0.2)
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as api:
                yield f"http://127.0.0.1:{ui_port}", api
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=60)


def prepare(api: httpx.Client) -> str:
    """Send what there is to be seen; the id of a result with an attribution."""
    for round_ in range(4):
        bodies = [
            {
                "model": "demo",
                "content": prompt,
                "parameters": {"max_tokens": 60 + 40 * round_, "temperature": 0.2 * round_},
            }
            for prompt in _PROMPTS
        ]
        sent = api.post("/results/", json=bodies).raise_for_status().json()
        for one in sent:
            api.get(f"/results/{one['id']}", params={"wait": 60})
    stopped = api.post("/results/", json={"model": "demo", "content": "def f"}).json()
    api.post(f"/results/{stopped['id']}/cancel")
    late = {"model": "absent", "content": "x", "deadline_seconds": 0.1}
    api.post("/results/", json=late)
    attributed = {"model": "demo", "content": "def read(", "parameters": {"max_tokens": 80}}
    result_id = str(api.post("/results/", json=attributed).json()["id"])
    api.get(f"/results/{result_id}", params={"wait": 60})
    indexes = api.get("/indexes").json()
    if indexes:
        api.post(f"/results/{result_id}/attribution", json={"index": indexes[0]})
    return result_id


async def photograph(url: str, result_id: str) -> None:
    """All pages, in light; the playground in dark and as on a phone as well."""
    IMAGES.mkdir(exist_ok=True)
    path = shutil.which("chromium") or shutil.which("google-chrome")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        context = await browser.new_context(
            base_url=url, viewport={"width": 1200, "height": 860}, color_scheme="light"
        )
        page = await context.new_page()
        await page.goto("/playground")
        await page.check("input[value=text]")
        await page.fill("#prompt", "def parse_date(text):\n")
        await page.fill("#p-max_tokens", "200")
        await page.fill("#p-temperature", "0.2")
        await page.click("button.primary")
        await page.wait_for_selector(".live .output:not(:empty)")
        await asyncio.sleep(0.5)
        await take(page, "playground")
        await page.wait_for_selector(".badge.completed")
        await page.goto("/compare")
        await page.check("input[value=text]")
        await page.fill("#prompt", "def binary_search(items, target):\n")
        for place, temperature in ((1, "0"), (2, "1.2")):
            await page.fill(f"#p-{place}-temperature", temperature)
            await page.fill(f"#p-{place}-max_tokens", "120")
        await page.click("button.primary")
        await page.wait_for_selector(".live .badge.completed >> nth=1")
        await take(page, "compare")
        for name, address in PAGES.items():
            await page.goto(address.format(result_id=result_id), wait_until="networkidle")
            await take(page, name)
        await page.set_viewport_size({"width": 390, "height": 800})
        await page.emulate_media(color_scheme="dark")
        await page.goto(f"/playground/{result_id}")
        await take(page, "phone-dark")
        await browser.close()


PAGES = {
    "history": "/history",
    "result": "/history/{result_id}",
    "bulk": "/bulk",
    "models": "/models",
    "launches": "/launches",
    "system": "/system",
}


async def take(page: Page, name: str) -> None:
    """One picture, of what fits the window."""
    await page.screenshot(path=IMAGES / f"{name}.png")
    sys.stdout.write(f"docs/images/{name}.png\n")


def main() -> None:
    """Start, prepare, photograph, stop."""
    sys.stdout.write("Starting the service with the demo model (about half a minute)\n")
    sys.stdout.flush()
    with running() as (url, api):
        result_id = prepare(api)
        asyncio.run(photograph(url, result_id))


if __name__ == "__main__":
    main()
