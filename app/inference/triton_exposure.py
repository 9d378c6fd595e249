"""Exposure of a Triton server to strangers, found by harmless requests without its secret."""

import asyncio
from typing import Any

import grpc
import httpx
from tritonclient.grpc import service_pb2 as pb, service_pb2_grpc

from app.core.settings.fields import split_address

_SECONDS = 5.0
_HTTP_PORT = 8000  # Triton's default
_NO_MODEL = "no-such-model"
# With the first a stranger can have the server run code, with the others write files and map memory.
# Unloading is refused under polling, as loading is.
_QUERIES: dict[str, tuple[str, Any]] = {
    "model-repository": (
        "RepositoryModelUnload",
        pb.RepositoryModelUnloadRequest(model_name=_NO_MODEL),
    ),
    "shared-memory": ("SystemSharedMemoryStatus", pb.SystemSharedMemoryStatusRequest()),
    "trace": ("TraceSetting", pb.TraceSettingRequest()),
    "logging": ("LogSettings", pb.LogSettingsRequest()),
}


async def open_protocols(address: str) -> list[str]:
    """Protocols of a gRPC port that answer requests without the secret."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)

        async def is_open(method: str, message: Any) -> bool:
            try:
                await getattr(stub, method)(message, timeout=_SECONDS)
            except grpc.aio.AioRpcError:  # restricted, unreachable, or an older server lacks it
                return False
            return True

        answers = await asyncio.gather(*(is_open(*query) for query in _QUERIES.values()))
    return [protocol for protocol, answer in zip(_QUERIES, answers, strict=True) if answer]


async def open_http(grpc_address: str, http_address: str | None) -> str | None:
    """The HTTP address that answers requests without the secret; Triton's default one if None is known."""
    address = http_address or f"{split_address(grpc_address, 0)[0]}:{_HTTP_PORT}"
    try:
        async with httpx.AsyncClient(
            base_url=f"http://{address}/v2", trust_env=False, timeout=_SECONDS
        ) as client:
            logged = await client.get("/logging")
            unloaded = await client.post(f"/repository/models/{_NO_MODEL}/unload")
    except (httpx.HTTPError, httpx.InvalidURL):
        return None
    is_closed = b"restricted" in logged.content and not unloaded.is_success
    is_triton = b"restricted" in logged.content or b"log_verbose_level" in logged.content
    return address if is_triton and not is_closed else None
