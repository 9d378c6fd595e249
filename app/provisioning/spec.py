"""A launch's request, and its completion by the profile, the tier and the catalogue."""

from pathlib import PurePosixPath
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from app.core.errors import invalid_field
from app.core.whole_numbers import WHOLE
from app.inference.engine_options import check_engine_options
from app.inference.model_repository import ModelRepositoryError, entry_name
from app.inference.server_store import is_static_name
from app.provisioning import patterns
from app.provisioning.catalogue import CatalogueEntry, ModelName, Revision
from app.provisioning.profiles import (
    Name,
    Profile,
    Provider,
    Tier,
    find_profile,
    no_such_profile,
)
from app.provisioning.resources import choose_tier, size_of
from app.provisioning.sizing.resources import MAX_NODES

MAX_ADAPTERS = 64  # of a launch

Plain = Annotated[str, StringConstraints(pattern=r"^[a-z0-9_]{1,32}$")]


AdapterName = Annotated[str, StringConstraints(pattern=patterns.ADAPTER)]


class StrictModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class ResourceRequest(StrictModel):
    """Resources of one server, on each of its nodes; absent ones are the tier's."""

    nodes: Annotated[int, Field(ge=1, le=MAX_NODES), WHOLE] | None = Field(
        None, description="Nodes of a server, only of Slurm; more than one are joined by Ray."
    )
    gpus: Annotated[int, Field(ge=0, le=64), WHOLE] | None = None
    cpus: Annotated[int, Field(ge=1, le=1024), WHOLE] | None = None
    memory_gb: Annotated[int, Field(ge=1, le=16_384), WHOLE] | None = None
    gres: Annotated[str, StringConstraints(pattern=patterns.GRES)] | None = Field(
        None, description="Slurm's, such as `gpu:a100:2`; follows from `gpus`."
    )


class EngineOptions(BaseModel):
    """Options of vLLM's engine, under its own names: these, and those of GET /launches/engine-options.

    An entry of a Triton repository has its own.
    """

    model_config = ConfigDict(extra="allow", strict=True)

    max_model_len: Annotated[int, Field(ge=1, le=10_000_000), WHOLE] | None = None
    dtype: Plain | None = None
    quantization: Plain | None = None
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = None
    enforce_eager: bool | None = None

    @property
    def pipeline_stages(self) -> int | None:
        """The request's number of stages, if it has one."""
        return (self.model_extra or {}).get("pipeline_parallel_size")


class ModelChoice(StrictModel):
    """A model, and the profile to launch it with."""

    model: ModelName = Field(
        description="A Hugging Face id, or a path below the profile's `model_roots`: a directory "
        "with a config.json, or an entry of a Triton model repository."
    )
    revision: Revision | None = Field(None, description="Branch, tag or commit of the model.")
    provider: Provider | None = None
    profile: Name | None = Field(None, description="See GET /launches/profiles.")


class LaunchCreate(ModelChoice):
    """A Triton server to launch; absent members are the catalogue's, the tier's or the profile's."""

    name: Name = Field(description="The launch's, and its server's in GET /servers.")
    served_name: Name | None = Field(
        None, description="Name of the model in requests; default: its name without the owner."
    )
    tier: Name | None = Field(None, description="One of the profile's sizes.")
    resources: ResourceRequest = Field(default_factory=ResourceRequest)
    partition: Name | None = None
    account: Name | None = None
    constraint: Name | None = None
    modules: Annotated[list[Name], Field(max_length=16)] | None = None
    time_limit_minutes: Annotated[int, Field(ge=1, le=525_600), WHOLE] | None = None
    idle_minutes: Annotated[float, Field(ge=0, le=100_000)] | None = Field(
        None, description="Stop after so long without a request; 0: never."
    )
    start_minutes: Annotated[float, Field(gt=0, le=1440)] | None = Field(
        None, description="Give up if the model is not ready so long after the job's start."
    )
    priority: Annotated[int, Field(ge=-10_000, le=0), WHOLE] = Field(
        0, description="Below 0 lets other jobs go first (Slurm's --nice, negated)."
    )
    engine: EngineOptions = Field(default_factory=EngineOptions)
    adapters: Annotated[dict[AdapterName, ModelName], Field(max_length=MAX_ADAPTERS)] = Field(
        default_factory=dict,
        description="LoRA adapters by the name that requests use, as `model:name`: a directory below "
        "the profile's `model_roots`, or a Hugging Face id.",
    )
    trust_remote_code: bool = Field(
        False, description="Run Python code of the model's repository, where the profile allows it."
    )


class LaunchSpec(StrictModel):
    """A complete request: stored in the table, and the source of the job's script."""

    name: Name
    model: ModelName
    revision: Revision | None
    profile: Name
    served_name: Name
    tier: str
    nodes: int = 1  # each has the following resources
    gpus: int
    cpus: int
    memory_gb: int
    gres: Annotated[str, StringConstraints(pattern=patterns.GRES)] | None
    partition: Name | None
    account: Name | None
    constraint: Name | None
    modules: list[Annotated[str, StringConstraints(pattern=patterns.MODULE)]]
    time_limit_minutes: int
    idle_minutes: float
    start_minutes: float
    priority: int
    engine: EngineOptions
    adapters: dict[AdapterName, ModelName] = Field(default_factory=dict)
    trust_remote_code: bool

    def to_json(self) -> str:
        """For the table: former versions refuse the newer members, which are there only where they have an effect."""
        newer = {"nodes": 1, "adapters": {}}
        return self.model_dump_json(
            exclude={name for name, usual in newer.items() if getattr(self, name) == usual}
        )

    @property
    def all_gpus(self) -> int:
        return self.nodes * self.gpus

    @property
    def pipeline_stages(self) -> int:
        """Stages of layers: by default one a node, so that tensors are divided inside a node."""
        return self.engine.pipeline_stages or self.nodes


def to_spec(
    request: LaunchCreate,
    profiles: dict[str, Profile],
    catalogue: dict[str, CatalogueEntry],
) -> LaunchSpec:
    """Complete a request; blocks. Raises InvalidRequestError that names the wrong field."""
    if is_static_name(request.name):
        raise invalid_field("name", "is kept for the servers that TRITON_GRPC_SERVICE names")
    offered = catalogue.get(request.model)
    profile, model, revision = resolve(request, profiles, offered)
    tier = _tier(request, profile, offered, model, revision)
    given = request.resources
    gpus = tier.gpus if given.gpus is None else given.gpus
    tier_gres = tier.gres if gpus == tier.gpus else None
    nodes = _nodes(request, profile, gpus)
    if request.trust_remote_code and not profile.trust_remote_code:
        raise invalid_field("trust_remote_code", f"the profile {profile.name!r} does not allow it")
    minutes = request.time_limit_minutes or profile.default_minutes
    if minutes > profile.max_minutes:
        raise invalid_field(
            "time_limit_minutes", f"the profile allows at most {profile.max_minutes} minutes"
        )
    return LaunchSpec(
        name=request.name,
        model=model,
        revision=revision,
        profile=profile.name,
        served_name=request.served_name or _served_name(request.model),
        tier=tier.name,
        nodes=nodes,
        gpus=gpus,
        cpus=given.cpus or tier.cpus,
        memory_gb=given.memory_gb or tier.memory_gb,
        gres=given.gres or tier_gres or (f"gpu:{gpus}" if gpus else None),
        partition=request.partition or tier.partition or profile.partition,
        account=request.account or profile.account,
        constraint=request.constraint or tier.constraint or profile.constraint,
        modules=list(profile.modules if request.modules is None else request.modules),
        time_limit_minutes=minutes,
        idle_minutes=profile.idle_minutes if request.idle_minutes is None else request.idle_minutes,
        start_minutes=request.start_minutes or profile.start_minutes,
        priority=request.priority,
        engine=_engine(request, profile, nodes, gpus),
        adapters=_adapters(request, profile),
        trust_remote_code=request.trust_remote_code,
    )


def _nodes(request: LaunchCreate, profile: Profile, gpus: int) -> int:
    nodes = request.resources.nodes or 1
    if nodes > 1 and profile.provider != "slurm":
        raise invalid_field(
            "resources.nodes",
            f"only Slurm has servers of several nodes, and the profile {profile.name!r} is of "
            f"{profile.provider}",
        )
    if nodes > profile.max_nodes:
        raise invalid_field(
            "resources.nodes",
            f"the profile {profile.name!r} allows at most {profile.max_nodes} (max_nodes)",
        )
    if nodes > 1 and not gpus:
        raise invalid_field("resources.nodes", "a server of several nodes needs GPUs on each")
    return nodes


def _engine(request: LaunchCreate, profile: Profile, nodes: int, gpus: int) -> EngineOptions:
    given = check_engine_options(request.engine.model_dump(), profile.engine_options)
    engine = EngineOptions(**given)
    stages = engine.pipeline_stages
    if stages is not None and (stages < 1 or max(nodes * gpus, 1) % stages):
        raise invalid_field(
            "engine.pipeline_parallel_size",
            f"must divide the launch's GPUs, which are {nodes * gpus}",
        )
    if nodes > 1 and "distributed_executor_backend" in given:
        raise invalid_field(
            "engine.distributed_executor_backend", "is ray in a launch of several nodes"
        )
    return engine


def _adapters(request: LaunchCreate, profile: Profile) -> dict[str, str]:
    for name, place in request.adapters.items():
        if place.startswith("/") and not is_below_a_root(place, profile.model_roots):
            raise invalid_field(
                f"adapters.{name}", f"must lie below a model root of the profile {profile.name!r}"
            )
    return request.adapters


def resolve(
    choice: ModelChoice, profiles: dict[str, Profile], offered: CatalogueEntry | None
) -> tuple[Profile, str, str | None]:
    """The profile, the model's id or path there, and its revision; `offered`: the catalogue's entry.

    Raises InvalidRequestError that names the wrong field.
    """
    profile = _profile(choice, profiles, offered)
    model = _model(choice, profile, offered)
    own = choice.revision or (offered.revision if offered else None)
    return profile, model, None if model.startswith("/") else own


def _profile(
    request: ModelChoice, profiles: dict[str, Profile], offered: CatalogueEntry | None
) -> Profile:
    name = request.profile or (offered.profile if offered and request.provider is None else None)
    profile = find_profile(profiles, name, request.provider)
    if profile is None:
        raise invalid_field("profile" if name else "provider", no_such_profile(profiles))
    if request.provider not in (None, profile.provider):
        raise invalid_field("provider", f"the profile {profile.name!r} is of {profile.provider}")
    return profile


def _model(request: ModelChoice, profile: Profile, offered: CatalogueEntry | None) -> str:
    model = offered.path if offered and offered.path else request.model
    if not model.startswith("/"):
        return model
    if request.revision is not None:
        raise invalid_field("revision", "only of a Hugging Face id: a path has none")
    if not is_below_a_root(model, profile.model_roots):
        raise invalid_field("model", f"must lie below a model root of the profile {profile.name!r}")
    return model


def is_below_a_root(path: str, roots: tuple[str, ...]) -> bool:
    return any(
        path != root and PurePosixPath(path).is_relative_to(PurePosixPath(root)) for root in roots
    )


def _tier(
    request: LaunchCreate,
    profile: Profile,
    offered: CatalogueEntry | None,
    model: str,
    revision: str | None,
) -> Tier:
    name = request.tier or (offered.tier if offered and profile.tier(offered.tier or "") else None)
    size = offered.size_gb if offered else None
    if size is None and name is None:
        size = size_of(model, revision, profile)
    # Each node holds its part of the weights.
    share = None if size is None else size / (request.resources.nodes or 1)
    tier = choose_tier(profile, share, name)
    if tier is None:
        names = ", ".join(one.name for one in profile.tiers)
        what = "has no such tier" if name else f"has no tier for {share:g} GB"
        raise invalid_field("tier", f"the profile {profile.name!r} {what}; there are {names}")
    return tier


def _served_name(model: str) -> str:
    try:
        name = entry_name(PurePosixPath(model).name)[:63]
    except ModelRepositoryError:
        name = ""
    if not patterns.fits(patterns.NAME, name):
        raise invalid_field("served_name", f"{model!r} gives no plain name: name one")
    return name
