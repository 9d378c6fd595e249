"""The processes of a model: none of them outlives the one that started it."""

import asyncio
import os

import psutil
import pytest

from tests.e2e.small_models import SmallModels, engine_of

pytestmark = pytest.mark.timeout(300)


async def test_the_engine_dies_with_its_stub(tools_triton: SmallModels) -> None:
    engine = engine_of(tools_triton, "tools")
    stub = engine.parent()
    assert stub is not None
    assert stub.pid != os.getpid()
    family = [stub, *stub.children(recursive=True)]
    stub.kill()
    _, alive = await asyncio.to_thread(psutil.wait_procs, family[1:], 60)
    assert alive == []
    async with tools_triton.client() as client:
        await client.unload("tools")
        await client.load("tools")
        async for _ in client.generate("tools", "def ", {"max_tokens": 1}):
            pass


async def test_stub_and_engine_die_with_their_server(tools_triton: SmallModels) -> None:
    """No later test needs the server: tests/scheduling.py runs this file behind those that do."""
    engine = engine_of(tools_triton, "tools")
    stub = engine.parent()
    assert stub is not None
    server = stub.parent()
    assert server is not None
    assert server.pid != os.getpid()
    family = server.children(recursive=True)
    stub.suspend()  # It can do nothing about it by itself.
    server.kill()
    _, alive = await asyncio.to_thread(psutil.wait_procs, family, 60)
    assert alive == []
