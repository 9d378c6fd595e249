"""Wire schemas of Triton servers."""

from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from app.inference.server_pool import Server
from app.inference.server_store import MAX_SLOTS


class ServerCreate(BaseModel):
    """A Triton server to register."""

    model_config = ConfigDict(extra="forbid", str_max_length=512)

    name: str = Field(
        description="Letters, digits, `.`, `_` and `-`, 63 at most.", examples=["gpu-2"]
    )
    grpc: str = Field(description="Its gRPC address, `host:port`.", examples=["10.0.0.2:8001"])
    http: str | None = Field(None, description="Its HTTP address.", examples=["10.0.0.2:8000"])
    metrics: str | None = Field(None, description="Where its metrics are.")
    slots: int | None = Field(
        None,
        ge=1,
        le=MAX_SLOTS,
        description="Most results that each worker runs on it at a time; LLM_WORKER_SLOTS by default.",
    )
    secret: str | None = Field(
        None, description="The secret that it was started with; no response returns it."
    )


class ServedRead(BaseModel):
    """A model in a server's repository."""

    name: str
    version: int | None
    ready: bool
    reason: str | None = Field(description="Why it is not ready, usually Triton's message.")
    engine_dead_since: datetime | None = Field(
        description="When its engine stopped responding, although Triton may report it ready."
    )


class ServerRead(BaseModel):
    """A Triton server, as seen by the process that responds."""

    name: str
    grpc: str
    http: str | None
    metrics: str | None
    slots: int = Field(description="Most results that each worker runs on it at a time.")
    state: Literal["active", "draining"]
    registered: bool = Field(description="False for servers of TRITON_GRPC_SERVICE.")
    healthy: bool
    error: str | None = Field(description="Why it is not healthy.")
    running: int = Field(description="Running results, as workers reported some seconds ago.")
    models: list[ServedRead]


def server_to_wire(server: Server, running: int) -> dict[str, Any]:
    address = server.address
    return {
        "name": server.name,
        "grpc": address.grpc,
        "http": address.http,
        "metrics": address.metrics,
        "slots": server.slots,
        "state": "draining" if address.is_draining else "active",
        "registered": not address.is_static,
        "healthy": server.error is None,
        "error": server.error,
        "running": running,
        "models": [
            {
                "name": entry.name,
                "version": entry.version,
                "ready": entry.ready,
                "reason": None if entry.ready else entry.reason,
                "engine_dead_since": entry.engine_dead_since,
            }
            for entry in server.entries()
        ],
    }
