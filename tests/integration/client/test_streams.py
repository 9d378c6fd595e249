"""Streams of the client over connections that are cut, and a thousand of them in one process."""

import asyncio
import os
import resource
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from app.core.settings import Settings
from llm_api_client import AsyncClient, Client, ConnectionFailedError
from tests.conftest import ROOT, Service
from tests.integration.client.support import blocking, url_of
from tests.integration.cutting_http_proxy import CuttingHttpProxy
from tests.integration.support import read, send, serve

# Characters of one to four bytes, and those that lines and JSON could break at.
WORDS = [
    "é",
    "🙂",
    "👩\u200d👩\u200d👧",
    "\\n",
    "\\u2028",
    "漢字",
    "data:\\0101",
    "event:",
    "\U0010ffff",
]
PROMPT = "{{delay_ms=12 text=" + " ".join(WORDS * 60) + "}}"
# Bytes of each connection until it is cut: some let no event through.
CUTS = (900, 1, 1500, 700, 0, 2500, 1100, 800, 30, 1200) * 2
STREAMS = 1000


@pytest.fixture
async def one(settings: Settings) -> AsyncIterator[Service]:
    """API and worker, with comments in the silences."""
    changes = {"keep_alive_seconds": 0.05, "max_streams": 2 * STREAMS}
    async with serve(settings.model_copy(update=changes), with_worker=True) as service:
        yield service


@pytest.mark.trial
async def test_a_stream_survives_twenty_cuts(one: Service) -> None:
    proxy = CuttingHttpProxy(one.client.base_url.port or 0, cuts=CUTS)
    async with proxy.run():
        sent = await send(one, PROMPT)

        def follow() -> tuple[str, str]:
            with Client(proxy.url) as client, client.stream(sent["id"]) as stream:
                return "".join(stream), stream.text

        joined, text = await asyncio.to_thread(follow)
    result = await read(one, sent["id"])
    assert proxy.cut == len(CUTS)
    assert joined.encode() == text.encode() == result["result"].encode()


@pytest.mark.trial
async def test_an_awaited_stream_survives_twenty_cuts(one: Service) -> None:
    proxy = CuttingHttpProxy(one.client.base_url.port or 0, cuts=CUTS)
    async with proxy.run():
        sent = await send(one, PROMPT)
        async with AsyncClient(proxy.url) as client, client.stream(sent["id"]) as stream:
            joined = "".join([delta async for delta in stream])
    result = await read(one, sent["id"])
    assert proxy.cut == len(CUTS)
    assert joined == stream.text == result["result"]


@pytest.mark.trial
async def test_an_export_survives_cuts(one: Service) -> None:
    def work(client: Client) -> list[str]:
        sent = client.send_many([f"{{{{text=word-{i}}}}}" for i in range(120)], model="scripted")
        for result in sent:
            assert not isinstance(result, Exception)
            client.wait(result)
        return [result.id for result in sent if not isinstance(result, Exception)]

    sent = await blocking(one, work)
    proxy = CuttingHttpProxy(
        one.client.base_url.port or 0, cuts=(9_000, 1, 20_000, 0), cut_paths=("/export",)
    )
    async with proxy.run(), AsyncClient(proxy.url) as client:
        exported = [result.id async for result in client.export()]
    assert proxy.cut == 4
    assert exported == sent[::-1]


@pytest.mark.trial
async def test_a_service_that_is_gone_ends_the_stream(settings: Settings) -> None:
    async with serve(settings, with_worker=True) as service:
        url = url_of(service)
        sent = await send(service, "{{chunks=500 delay_ms=20}}", parameters={"max_tokens": 500})
        client = AsyncClient(url, patience=1)
        stream = client.stream(sent["id"])
        assert await anext(aiter(stream))
    with pytest.raises(ConnectionFailedError):
        async for _ in stream:
            pass
    await client.close()


@pytest.mark.trial
async def test_a_thousand_streams_in_one_process(one: Service) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 10_000), hard))
    try:
        script = Path(__file__).with_name("many_streams.py")
        process = await asyncio.create_subprocess_exec(
            sys.executable, script, url_of(one), str(STREAMS), stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT / "client")},
        )  # fmt: skip
        output, _ = await process.communicate()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert process.returncode == 0
    assert output.decode().split()[0] == str(STREAMS)
