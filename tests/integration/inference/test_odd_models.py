"""Servers and models that are not what the service expects: clear errors, and nothing is lost."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from app.cli.up.triton import EmbeddedTriton
from app.inference.triton_client import TritonClient
from tests.conftest import Service, make_settings, run_service, run_triton
from tests.integration.support import read, send, until
from tests.postgres import PostgresServer

_MODELS = Path(__file__).parents[2] / "triton_models"


class OddTriton(EmbeddedTriton):
    """Its models cannot be probed with a prompt."""

    async def probe(self, _client: TritonClient, _model: str) -> str:
        return ""


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OddTriton]:
    """A server with a model of numbers and one that answers garbage."""
    models = {name: _MODELS / name for name in ("no_text", "garbage")}
    with run_triton(OddTriton, tmp_path_factory.mktemp("odd"), models) as server:
        yield server


@pytest.fixture
async def service(
    postgres_server: PostgresServer, database_name: str, odd: OddTriton
) -> AsyncIterator[Service]:
    settings = make_settings(postgres_server, database_name, triton_grpc=odd.address("grpc"))
    async with run_service(settings, with_worker=True) as running:
        yield running


async def finished(service: Service, model: str, **parameters: Any) -> dict[str, Any]:
    sent = await send(service, "x", model=model, parameters=parameters)
    return await read(service, sent["id"], wait=30)


async def test_a_model_that_is_no_language_model_refuses(service: Service) -> None:
    result = await finished(service, "no_text")
    assert (result["state"], result["attempt"]) == ("failed", 1)
    assert (result["error"]["code"], result["error"]["retryable"]) == ("invalid_request", False)
    assert "text_input" in result["error"]["message"]


async def test_bytes_that_are_not_utf8_are_replaced(service: Service) -> None:
    result = await finished(service, "garbage")
    assert (result["state"], result["finish_reason"]) == ("completed", "stop")
    assert result["result"] == "caf\ufffd \ufffd\ufffd\ufffd"


async def test_log_probabilities_that_cannot_be_read_are_the_models_error(service: Service) -> None:
    result = await finished(service, "garbage", logprobs=1)
    assert (result["state"], result["attempt"]) == ("failed", 1)
    assert result["error"]["code"] == "model_error"
    assert "cannot be read" in result["error"]["message"]


async def test_a_server_that_is_not_triton_is_reported_as_such(service: Service) -> None:
    async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as other:
        port = other.sockets[0].getsockname()[1]
        body = {"name": "other", "grpc": f"127.0.0.1:{port}"}
        assert (await service.client.post("/servers", json=body)).status_code == 201

        async def has_error() -> str:
            found = (await service.client.get("/servers/other")).json()
            assert not found["healthy"]
            return str(found["error"])

        assert "Triton's gRPC port" in await until(has_error)
        assert (await finished(service, "garbage"))["state"] == "completed"
