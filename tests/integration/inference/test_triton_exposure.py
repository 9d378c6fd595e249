"""Exposure of a Triton server's HTTP port, by the responses of Triton and of other programs."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from app.cli.up.triton import EmbeddedTriton
from app.inference.triton_exposure import open_http, open_protocols

LOGGING = b'{"log_verbose_level":0}'
RESTRICTED = b"This protocol is restricted, expecting header 'llm-secret'"


@contextlib.asynccontextmanager
async def answering(logging: tuple[int, bytes], unload: tuple[int, bytes]) -> AsyncIterator[str]:
    """The address of a server with these responses; any other request is refused."""
    answers = {
        "GET /v2/logging": logging,
        "POST /v2/repository/models/no-such-model/unload": unload,
    }

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                status, body = answers.get(head.split(" HTTP/")[0], (404, b"unknown"))
                length = f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n\r\n"
                writer.write(length.encode() + body)
        writer.close()
        ended.release()

    ended = asyncio.Semaphore(0)
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        await ended.acquire()  # the client has closed its connection


@pytest.mark.parametrize(
    ("logging", "unload", "is_open"),
    [
        ((200, LOGGING), (200, b""), True),
        ((200, LOGGING), (400, b"polling"), True),
        ((403, RESTRICTED), (200, b""), True),  # it has code unloaded, and so loaded
        ((403, RESTRICTED), (403, RESTRICTED), False),
        ((404, b"no Triton"), (404, b""), False),
        ((200, b"no Triton"), (200, b""), False),
    ],
)
async def test_an_http_port_is_open_if_triton_answers_without_the_secret(
    logging: tuple[int, bytes], unload: tuple[int, bytes], is_open: bool
) -> None:
    async with answering(logging, unload) as address:
        assert await open_http("unused:1", address) == (address if is_open else None)


async def test_the_http_port_is_tritons_default_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async with answering((200, LOGGING), (200, b"")) as address:
        port = int(address.partition(":")[2])
        monkeypatch.setattr("app.inference.triton_exposure._HTTP_PORT", port)
        assert await open_http("127.0.0.1:1", None) == address


async def test_a_port_without_a_server_is_not_open() -> None:
    assert await open_http("127.0.0.1:1", "127.0.0.1:1") is None
    assert await open_http("127.0.0.1:1", "[:1") is None
    assert await open_protocols("127.0.0.1:1") == []


async def test_a_proxy_of_the_environment_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    async with answering((200, LOGGING), (200, b"")) as address:
        assert await open_http("unused:1", address) == address


async def test_a_restricted_triton_has_no_open_protocol(triton: EmbeddedTriton) -> None:
    assert await open_protocols(triton.address("grpc")) == []
