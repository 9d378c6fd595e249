"""Wire schemas of launches: their state, profiles, and the operator's catalogue."""

from datetime import datetime
from typing import Any
from uuid import UUID

import orjson
from pydantic import BaseModel, Field

from app.core.ids import created_at
from app.inference.engine_options import Access, engine_options, vllm_version
from app.provisioning.profiles import Profile, Provider, Tier
from app.provisioning.spec import LaunchSpec
from app.provisioning.store import Launch, State


class ServerRead(BaseModel):
    """Addresses of the launched server, `host:port` each."""

    grpc: str
    http: str | None = Field(description="Null since HTTP is closed; a launch before that has it.")
    metrics: str


class LaunchRead(BaseModel):
    """A Triton server that the service started, and its job."""

    id: UUID
    name: str
    provider: Provider
    profile: str
    model: str
    served_name: str = Field(description="The model's name in requests.")
    state: State
    reason: str = Field(description="Why it waits, is unhealthy, stops or ended; for people.")
    job_id: str | None = Field(description="Slurm's job id, or a process id.")
    node: str | None
    server: ServerRead | None
    exit_code: int | None
    created_at: datetime
    submitted_at: datetime | None
    started_at: datetime | None
    healthy_at: datetime | None
    last_used_at: datetime | None
    stopping_at: datetime | None
    ended_at: datetime | None
    spec: LaunchSpec = Field(description="The whole request: what was given, and what was chosen.")


class DryRunRead(BaseModel):
    """A launch that was not started: its specification and its job script."""

    spec: LaunchSpec
    script: str = Field(description="The job's script.")
    model_json: dict[str, Any] = Field(
        description="The engine's arguments; an entry of a Triton repository has its own."
    )


class LogRead(BaseModel):
    """The end of a job's output, as the reconciler last read it."""

    log: str


class ProfileRead(BaseModel):
    """A place where servers can be launched."""

    name: str
    provider: Provider
    default: bool
    default_minutes: int
    max_minutes: int
    max_nodes: int
    idle_minutes: float
    model_roots: list[str]
    trust_remote_code: bool
    engine_options: list[str] = Field(
        description="Options of the engine that are not free, and permitted here."
    )
    tiers: list[Tier]


class EngineOptionRead(BaseModel):
    """An option of the engine, for `engine` of a launch."""

    name: str
    types: list[str] = Field(
        description="bool, int, float, str, object, or `list of` one of them: any of these."
    )
    choices: list[str | int] = Field(
        description="All of its values, if not empty; of a list: its items'."
    )
    default: str | float | bool | None = Field(description="vLLM's; null if it depends.")
    access: Access = Field(
        description="free; profile: if the profile's `engine_options` name it; never."
    )
    reason: str | None = Field(
        description="Why it needs that (of a free one: values that are no choices), or cannot be set."
    )
    group: str
    help: str


class EngineOptionsRead(BaseModel):
    """The options of the engine that launches know."""

    vllm: str = Field(description="The version of vLLM that has them.")
    options: list[EngineOptionRead]


def engine_options_to_wire() -> dict[str, Any]:
    members = tuple(EngineOptionRead.model_fields)
    return {
        "vllm": vllm_version(),
        "options": [
            {name: getattr(one, name) for name in members} for one in engine_options().values()
        ],
    }


def launch_to_wire(launch: Launch) -> dict[str, Any]:
    members = (
        "name", "provider", "profile", "model", "state", "reason", "job_id", "node", "exit_code",
        "submitted_at", "started_at", "healthy_at", "last_used_at", "stopping_at", "ended_at",
    )  # fmt: skip
    spec = orjson.loads(launch.spec_json)
    return {
        "id": str(launch.id),
        **{name: getattr(launch, name) for name in members},
        "served_name": spec["served_name"],
        "server": launch.address and {"http": None} | launch.address,
        "created_at": created_at(launch.id),
        "spec": spec,
    }


def profile_to_wire(profile: Profile) -> dict[str, Any]:
    """Members of a profile that users may read: no hosts, accounts or paths except the models'."""
    wire = profile.model_dump(include=set(ProfileRead.model_fields))
    return wire | {name: list(wire[name]) for name in ("model_roots", "engine_options", "tiers")}
