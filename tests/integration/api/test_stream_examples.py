"""The programs of docs/streams.md, as they are printed there, over connections that are cut."""

import asyncio
import contextlib
import os
import re
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import UUID

import orjson
import pytest

from app.core.settings import Settings
from app.worker.attempt import Attempt, StopReason
from tests.conftest import ROOT, Service
from tests.integration.cutting_http_proxy import CuttingHttpProxy
from tests.integration.support import UNKNOWN_ID, finish, read, send, serve

pytestmark = pytest.mark.trial  # programs of the documents, in processes of their own

# Bytes of a body until it is cut: some cuts let no event through, and at least one does, even when all
# of the text is there already.
CUTS = (9_000, 29, 0, 31_000, 333, 17_000)
# One word an event: astral and combining code points, and what JSON or a shell could trip over.
WORDS = (
    "e\u0301a\u0308 🙂 👩\u200d👩\u200d👧 \\n \\u001b \\\\ \"'` $HOME %s%% \x1b[1m \x7f 漢字 "
    "\u202eabc \ufeff z̶̡͎a -n ' event: \\ data:\\0101 <b>&amp;</b> \U0010ffff"
)
PROMPT = "{{delay_ms=30 text=" + " ".join(word * 40 for word in WORDS.split() * 5) + "}}"
CHROMIUM = [
    "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
# Script that a test adds to the page: it reports when the page has shown the end.
TELL = b"""
<script>
  const state = document.querySelector("#state");
  const report = () => {
    const shown = [state.textContent, document.querySelector("#text").textContent];
    fetch("/outcome", { method: "POST", body: JSON.stringify(shown) });
  };
  // The end may have come before this script.
  if (state.textContent !== "pending") report();
  else new MutationObserver(report).observe(state, { childList: true });
</script>
"""


def example(language: str) -> str:
    text = (ROOT / "docs" / "streams.md").read_text()
    (found,) = re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)
    return str(found)


@pytest.fixture
async def one(settings: Settings) -> AsyncIterator[Service]:
    """A service with room for three streams, whose silences are full of comments."""
    changes = {"max_streams": 3, "keep_alive_seconds": 0.02, "max_attempts": 2}
    async with serve(settings.model_copy(update=changes), with_worker=True) as service:
        yield service


@contextlib.asynccontextmanager
async def running(*command: str, api: str, home: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """A program that gets the API's address; stopped with all its processes."""
    process = await asyncio.create_subprocess_exec(
        *command, env=os.environ | {"API": api, "HOME": str(home)}, cwd=home, start_new_session=True,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.communicate()


def proxy_to(service: Service, **settings: Any) -> CuttingHttpProxy:
    return CuttingHttpProxy(service.client.base_url.port or 0, **settings)


@contextlib.asynccontextmanager
async def reading(
    language: str, api: str, result_id: str, directory: Path
) -> AsyncIterator[asyncio.subprocess.Process]:
    """The program of a language at work on a result."""
    program = directory / f"stream.{language}"
    program.write_text(example(language))
    interpreter = sys.executable if language == "python" else "/bin/sh"
    async with running(interpreter, str(program), result_id, api=api, home=directory) as process:
        yield process


def assert_joined(proxy: CuttingHttpProxy, result: dict[str, Any]) -> None:
    """Each connection was asked to go on where the one before was cut."""
    assert proxy.cut == len(CUTS)
    places = [tuple(map(int, position.split(":"))) for position in proxy.positions]
    assert len(places) == len(CUTS) + 1
    assert places == sorted(places)
    assert len(set(places)) >= 2
    assert (1, 0) < places[-1] <= (1, len(result["result"]))


needs_curl = pytest.param(
    "sh",
    marks=[
        pytest.mark.skipif(
            not (shutil.which("curl") and shutil.which("jq")), reason="needs curl and jq"
        ),
    ],
)


@pytest.mark.parametrize("language", [needs_curl, "python"])
async def test_a_program_survives_cuts(one: Service, tmp_path: Path, language: str) -> None:
    proxy = proxy_to(one, cuts=CUTS)
    async with proxy.run():
        sent = await send(one, PROMPT)
        async with reading(language, proxy.url, sent["id"], tmp_path) as process:
            output, errors = await process.communicate()
    result = await read(one, sent["id"])
    assert output.decode() == result["result"]
    assert (process.returncode, errors) == (0, b"")
    assert_joined(proxy, result)


@pytest.mark.parametrize("language", [needs_curl, "python"])
async def test_a_program_is_live(one: Service, tmp_path: Path, language: str) -> None:
    api = str(one.client.base_url).rstrip("/")
    sent = await send(one, "{{chunks=90000 delay_ms=20}}", parameters={"max_tokens": 90_000})
    async with reading(language, api, sent["id"], tmp_path) as process:
        assert process.stdout is not None
        begin = await process.stdout.read(1)  # long before the end
        await one.client.post(f"/results/{sent['id']}/cancel")
        output, errors = await process.communicate()
    result = await read(one, sent["id"])
    assert (begin + output).decode() == result["result"]
    assert errors.decode() == result["error"]["message"] + "\n"
    assert process.returncode == 1


@pytest.mark.parametrize("language", [needs_curl, "python"])
async def test_a_program_tells_attempts_and_failure(
    one: Service, tmp_path: Path, language: str
) -> None:
    api = str(one.client.base_url).rstrip("/")
    sent = await send(one, "{{lost_at=5 delay_ms=30}}", continue_lost_attempts=False)
    async with reading(language, api, sent["id"], tmp_path) as process:
        output, errors = await process.communicate()
    result = await read(one, sent["id"])
    assert result["attempt"] > 1
    notice = f"\n--- attempt {result['attempt']}, from character 0 ---\n"
    assert output.decode().rpartition(notice)[1:] == (notice, result["result"])
    assert errors.decode() == result["error"]["message"] + "\n"
    assert process.returncode == 1


@pytest.mark.parametrize("language", [needs_curl, "python"])
async def test_a_program_keeps_the_text_that_is_continued(
    one: Service, tmp_path: Path, language: str
) -> None:
    api = str(one.client.base_url).rstrip("/")
    sent = await send(one, "{{chunks=200 delay_ms=30}}", parameters={"max_tokens": 200})
    async with reading(language, api, sent["id"], tmp_path) as process:
        assert process.stdout is not None
        begin = await asyncio.wait_for(process.stdout.read(1), 60)
        attempt = one.services.hub.running(UUID(sent["id"]))
        assert isinstance(attempt, Attempt)
        attempt.stop(StopReason.MODEL_DIED)
        output, errors = await process.communicate()
    result = await read(one, sent["id"])
    assert (result["attempt"], result["continued"]) == (2, 1)
    assert ((begin + output).decode(), errors.decode()) == (result["result"], "")


PAGES = {
    "EventSource": example("html"),
    "tickets": re.sub(
        r"  function open\(\) \{\n.*?\n  \}\n", lambda _: example("js"), example("html"),
        count=1, flags=re.DOTALL,
    ),
}  # fmt: skip
needs_browser = [
    pytest.mark.skipif(not shutil.which("chromium"), reason="needs chromium"),
]


@contextlib.asynccontextmanager
async def browsing(url: str, directory: Path) -> AsyncIterator[None]:
    """A browser that looks at a page, and nothing else."""
    command = [*CHROMIUM, f"--user-data-dir={directory / 'browser'}"]
    async with running(*command, url, api="", home=directory):
        yield


async def shown(proxy: CuttingHttpProxy, result_id: str, directory: Path) -> tuple[str, str]:
    """The state and the text that the page ends with."""
    async with browsing(f"{proxy.url}/stream.html?result={result_id}", directory):
        state, text = orjson.loads(await asyncio.wait_for(proxy.outcome.get(), 60))
    return state, text


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=needs_browser) for kind in PAGES])
async def test_a_page_survives_cuts(one: Service, tmp_path: Path, kind: str) -> None:
    proxy = proxy_to(one, cuts=CUTS, pages={"/stream.html": PAGES[kind].encode() + TELL})
    async with proxy.run():
        sent = await send(one, PROMPT)
        state, text = await shown(proxy, sent["id"], tmp_path)
    result = await read(one, sent["id"])
    assert (state, text) == ("completed", result["result"])
    assert_joined(proxy, result)
    streams = [path for path in proxy.paths if "/stream?" in path]
    if kind == "tickets":
        assert len(streams) == len({path.partition("&ticket=")[2] for path in streams})
    else:
        assert set(streams) == {f"/results/{sent['id']}/stream?after=0:0"}, "it gave up"


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=needs_browser) for kind in PAGES])
async def test_a_page_says_that_there_is_no_result(one: Service, tmp_path: Path, kind: str) -> None:
    proxy = proxy_to(one, pages={"/stream.html": PAGES[kind].encode() + TELL})
    async with proxy.run():
        assert await shown(proxy, UNKNOWN_ID, tmp_path) == ("there is no such result", "")


@pytest.mark.parametrize(
    "kind",
    [needs_curl, "python", *(pytest.param(kind, marks=needs_browser) for kind in PAGES)],
)
async def test_a_full_service_is_asked_again(one: Service, tmp_path: Path, kind: str) -> None:
    result = await finish(one, "{{chunks=9}}")
    other = await send(one, "{{chunks=9000 delay_ms=20}}")
    proxy = proxy_to(one, pages={f"/{name}": PAGES[name].encode() + TELL for name in PAGES})
    async with proxy.run(), contextlib.AsyncExitStack() as held:
        for _ in range(3):
            await held.enter_async_context(
                one.client.stream("GET", f"/results/{other['id']}/stream")
            )
        if kind in PAGES:
            address = f"{proxy.url}/{kind}?result={result['id']}"
            async with browsing(address, tmp_path):
                await asyncio.wait_for(proxy.was_refused.wait(), 30)
                await held.aclose()
                _, text = orjson.loads(await asyncio.wait_for(proxy.outcome.get(), 30))
        else:
            async with reading(kind, proxy.url, result["id"], tmp_path) as process:
                await asyncio.wait_for(proxy.was_refused.wait(), 30)
                await held.aclose()
                begins = asyncio.get_running_loop().time()
                output, _ = await process.communicate()
                assert asyncio.get_running_loop().time() - begins > 3, "it came back too soon"
                text = output.decode()
    assert text == result["result"]
    assert proxy.statuses[0] == 503
    assert proxy.statuses[-1] == 200
    await one.client.delete(f"/results/{other['id']}", params={"force": True})


@pytest.mark.skipif(not (shutil.which("curl") and shutil.which("jq")), reason="needs curl and jq")
async def test_the_calls_of_the_readme_and_its_pages(one: Service, tmp_path: Path) -> None:
    pages = (
        "README.md",
        *(f"docs/{name}.md" for name in ("idempotency", "history", "tgi", "tenstorrent")),
    )
    blocks = re.findall(
        r"```sh\n(.*?)```", "\n".join((ROOT / page).read_text() for page in pages), re.DOTALL
    )
    # test_cli_token.py runs the call with a token.
    calls = [block for block in blocks if "curl" in block and "app token" not in block]
    assert len(calls) == 13
    program = (
        "\nprintf '\\036'\n".join(calls)
        .replace("http://127.0.0.1:8887", "$API")
        .replace("demo", "scripted")
    )
    api = str(one.client.base_url).rstrip("/")
    async with running("/bin/sh", "-euc", program, api=api, home=tmp_path) as process:
        output, errors = await process.communicate()
    assert (process.returncode, errors) == (0, b"")
    assert b'"code"' not in output
    assert b'[{"generated_text":"def ' in output
    one_call, seven_calls, stream, *_ = output.split(b"\x1e")
    assert orjson.loads(one_call)["state"] == "completed"
    assert orjson.loads(seven_calls[seven_calls.rindex(b'{"id":') :])["state"] == "completed"
    assert stream.count(b"event: completed\n") == 1
