"""Write docs/images: every page of the web page, of a service that has something to show.

Run from the repository's root by `make screenshots`: it starts `make run` with the demo model on ports of
its own, sends what the pages are to show, and photographs them in Chromium. `IMAGES="bulk launch"` writes only
these.
"""

import asyncio
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Coroutine, Iterator
from pathlib import Path

import httpx
from playwright.async_api import Page, async_playwright

from app.cli.up import processes

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
_START_SECONDS = 300
_LOAD_SECONDS = 270
_CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 131072, "tie_word_embeddings": False,
}  # fmt: skip
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


def prepare(api: httpx.Client) -> tuple[str, str]:
    """Send data for the pages, for some minutes: plots show only whole minutes.

    The ids of a result, and of an attribution of it.
    """
    until = time.monotonic() + _LOAD_SECONDS
    for round_ in itertools.count():
        bodies = [
            {
                "model": "demo",
                "content": prompt,
                "parameters": {"max_tokens": 40 + 30 * (round_ % 7), "temperature": 0.5},
            }
            for prompt in random.sample(_PROMPTS, 1 + round_ % len(_PROMPTS))
        ]
        for one in api.post("/results/", json=bodies).raise_for_status().json():
            api.get(f"/results/{one['id']}", params={"wait": 60})
        if round_ % 9 == 4:
            stopped = api.post("/results/", json={"model": "demo", "content": "def f"}).json()
            api.post(f"/results/{stopped['id']}/cancel")
            late = {"model": "demo", "content": "x", "deadline_seconds": 0.001}
            api.post("/results/", json=late)
        if time.monotonic() > until:
            break
    attributed = {"model": "demo", "content": "def read(", "parameters": {"max_tokens": 80}}
    result_id = str(api.post("/results/", json=attributed).json()["id"])
    api.get(f"/results/{result_id}", params={"wait": 60})
    (index,) = api.get("/indexes").json()
    path = f"/results/{result_id}/attribution"
    attribution = api.post(path, json={}, params={"index": index}).raise_for_status().json()
    return result_id, str(attribution["id"])


async def photograph(
    url: str, names: Collection[str], result_id: str = "", attribution_id: str = ""
) -> None:
    """Pages by their names, in light; the playground in dark and as on a phone as well."""
    IMAGES.mkdir(exist_ok=True)
    path = shutil.which("chromium") or shutil.which("google-chrome")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        context = await browser.new_context(
            base_url=url, viewport={"width": 1200, "height": 860}, color_scheme="light"
        )
        page = await context.new_page()
        for name, show in FORMS.items():
            if name in names:
                await show(page)
        for name, address in LOADED.items():
            if name in names:
                filled = address.format(result=result_id, attribution=attribution_id)
                await page.goto(filled, wait_until="networkidle")
                await take(page, name)
        if PHONE in names:
            await page.set_viewport_size({"width": 390, "height": 800})
            await page.emulate_media(color_scheme="dark")
            await page.goto(f"/playground/{result_id}")
            await take(page, PHONE)
        await browser.close()


async def show_playground(page: Page) -> None:
    """An answer on its way."""
    await page.goto("/playground")
    await page.check("input[value=text]")
    await page.fill("#prompt", "def parse_date(text):\n")
    await page.fill("#p-max_tokens", "300")
    await page.fill("#p-temperature", "0.2")
    await page.click("button.primary")
    await page.wait_for_selector(".live .output:not(:empty)")
    await asyncio.sleep(0.8)
    await take(page, "playground")
    await page.wait_for_selector(".badge.completed")


async def show_compare(page: Page) -> None:
    """The same model twice, cold and hot."""
    await page.goto("/compare")
    await page.check("input[value=text]")
    await page.fill("#prompt", "def binary_search(items, target):\n")
    for place, temperature in ((1, "0"), (2, "1.2")):
        await page.fill(f"#p-{place}-temperature", temperature)
        await page.fill(f"#p-{place}-max_tokens", "120")
    await page.click("button.primary")
    await page.wait_for_selector(".live .badge.completed >> nth=1")
    await take(page, "compare")


async def show_bulk(page: Page) -> None:
    """A file of functions to be written, on its way."""
    rows = "".join(f"{n},def convert_{n}(value):\n" for n in range(1, 121))
    await page.goto("/bulk")
    await page.set_input_files(
        "#file",
        {"name": "functions.csv", "mimeType": "text/csv", "buffer": b"id,prompt\n" + rows.encode()},
    )
    await page.click("button.primary")
    await page.check("input[value=completion]")
    await page.fill("#max_tokens", "60")
    await page.click("button.primary >> text=Send")
    await page.wait_for_selector("progress")
    await asyncio.sleep(15)
    await take(page, "bulk")


async def show_launch(page: Page) -> None:
    """Sizing of a well-known model (by the config.json of Llama 3.1 8B)."""
    await page.goto("/launches/new")
    await page.click("#config summary")
    await page.fill("#f-config", json.dumps(_CONFIG))
    await page.click("button[value=plan]")
    await page.wait_for_selector("#plan")
    await page.locator("#h-plan").scroll_into_view_if_needed()
    await page.evaluate("document.querySelector('#plan').scrollIntoView()")
    await take(page, "launch")


async def take(page: Page, name: str) -> None:
    """One picture, of what fits the window."""
    await page.screenshot(path=IMAGES / f"{name}.png")
    sys.stdout.write(f"docs/images/{name}.png\n")


FORMS: dict[str, Callable[[Page], Coroutine[None, None, None]]] = {
    "playground": show_playground,
    "compare": show_compare,
    "bulk": show_bulk,
    "launch": show_launch,
}
# Pages that show what was sent before.
LOADED = {
    "history": "/history",
    "result": "/history/{result}",
    "attribution": "/history/{attribution}",
    "models": "/models",
    "system": "/system",
}
PHONE = "phone-dark"


def main(names: Collection[str]) -> None:
    """Start, prepare, photograph, stop."""
    if unknown := set(names) - {*FORMS, *LOADED, PHONE}:
        raise SystemExit(f"There is no image {', '.join(sorted(unknown))}.")
    needs_load = bool(set(names) - set(FORMS))
    load = ", then some minutes of load" if needs_load else ""
    sys.stdout.write(f"Starting the service with the demo model{load}\n")
    sys.stdout.flush()
    with running() as (url, api):
        prepared = prepare(api) if needs_load else ()
        asyncio.run(photograph(url, names, *prepared))


if __name__ == "__main__":
    main(sys.argv[1:] or [*FORMS, *LOADED, PHONE])
