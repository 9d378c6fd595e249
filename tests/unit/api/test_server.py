"""The HTTP server: connections that come at once."""

import asyncio
import socket

import pytest
import uvicorn
import uvloop
from starlette.applications import Starlette

from app.api.connection import Connection
from app.api.server import _Server
from tests.integration.support import until

CONNECTIONS = 320


@pytest.mark.trial
def test_many_connections_are_accepted_in_few_rounds() -> None:
    """A client that connects behind hundreds of others waits for few rounds of the event loop."""
    rounds = uvloop.run(_rounds_until_all_are_accepted())
    assert rounds < CONNECTIONS // 4


async def _rounds_until_all_are_accepted() -> int:
    app = Starlette()
    config = uvicorn.Config(
        app, port=0, http=Connection, lifespan="off", ws="none", log_config=None
    )
    server = _Server(app, config)
    serving = asyncio.create_task(server.serve())

    async def has_started() -> bool:
        return server.started

    await until(has_started)
    address = server.servers[0].sockets[0].getsockname()
    clients = [socket.create_connection(address) for _ in range(CONNECTIONS)]
    rounds = 0

    async def are_accepted() -> bool:
        nonlocal rounds
        rounds += 1
        await asyncio.sleep(0)
        return len(server.server_state.connections) == CONNECTIONS

    while not await are_accepted():
        pass
    for client in clients:
        client.close()
    server.should_exit = True
    await serving
    return rounds
