"""The documents' programs for OpenAI's client, while the API restarts."""

import asyncio
import contextlib
import re
import sys
from collections.abc import AsyncIterator

import pytest

from tests.conftest import ROOT, Service
from tests.listening import listening

pytestmark = pytest.mark.trial  # programs of the documents, in processes of their own

# With the lost answer before them, as many failures as the client's default allows.
_REFUSED = {2, 3}


class Restarting:
    """A TCP proxy: the answer of the first connection is lost, the next ones are refused, then all pass."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.connections = 0
        self.port = 0

    @contextlib.asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        async with listening(self._serve) as self.port:
            yield

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        number = self.connections
        if number not in _REFUSED:
            from_api, to_api = await asyncio.open_connection("127.0.0.1", self._port)
            sending = asyncio.create_task(_pass_on(reader, to_api))
            try:
                if number == 1:
                    await from_api.read(1)
                else:
                    await _pass_on(from_api, writer)
            finally:
                sending.cancel()
                to_api.close()
                writer.close()
        writer.close()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()


@pytest.mark.parametrize(("document", "results"), [("docs/openai.md", 2), ("docs/batches.md", 10)])
async def test_a_program_survives_a_restart_of_the_api_with_each_result_once(
    calling: Service, document: str, results: int
) -> None:
    proxy = Restarting(calling.client.base_url.port or 0)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)
    program = next(block for block in blocks if "import OpenAI" in block)
    async with proxy.run():
        program = program.replace("127.0.0.1:8887", f"127.0.0.1:{proxy.port}")
        run = await asyncio.create_subprocess_exec(
            sys.executable, "-c", program.replace('"demo"', '"scripted"'),
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        output, errors = await run.communicate()
    assert (run.returncode, errors) == (0, b"")
    assert output
    assert proxy.connections > max(_REFUSED)
    assert len((await calling.client.get("/results/")).json()) == results
    if "batches" in document:
        assert b"batch_" in output.splitlines()[0]
