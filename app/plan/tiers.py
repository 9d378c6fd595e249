"""Tiers: named pieces of a cluster that models are given by their size.

docs/plan.md shows the TOML file that tells of them.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from app.plan.facts import PlanError
from app.plan.gpus import find_gpus
from app.plan.members import Members
from app.plan.resources import Resources

MAX_FILE_BYTES = 1 << 20
_MAX_COUNT = 1 << 16
_MAX_GB = 1 << 24


@dataclass(frozen=True, slots=True)
class Tier:
    """Resources of one size. `max_model_size_gb` None: any; `gres` and `constraint` as Slurm has them."""

    name: str
    gpu_count: int
    cpu_cores: int
    memory_gb: int
    max_model_size_gb: int | None = None
    gpu_type: str = ""
    gres: str = ""
    constraint: str = ""
    description: str = ""

    def request(self, minutes: int) -> Resources:
        """What to ask a scheduler for, for so long."""
        return Resources(self.gpu_count, self.gres, self.cpu_cores, self.memory_gb, minutes)


@dataclass(frozen=True, slots=True)
class Tiers:
    """All tiers by partition; `models` maps a model to its partition and tier."""

    partitions: Mapping[str, tuple[Tier, ...]]
    default_partition: str
    default_minutes: int = 30
    max_minutes: int = 180
    models: Mapping[str, tuple[str, str]] = field(default_factory=dict)


# A CPU serves small models only, and is chosen by name only.
BUILT_IN = Tiers(
    partitions={
        "gpu": (
            Tier("small", 1, 6, 48, 32, gres="gpu:1", description="One GPU"),
            Tier("medium", 2, 8, 160, 128, gres="gpu:2", description="Two GPUs"),
            Tier("large", 4, 12, 320, None, gres="gpu:4", description="Four GPUs"),
        ),
        "cpu": (Tier("cpu", 0, 8, 32, 8, description="No GPU"),),
    },
    default_partition="gpu",
)


def choose_tier(
    tiers: Tiers, model_bytes: int, model: str = "", partition: str = ""
) -> tuple[str, Tier]:
    """The partition and tier for a model: its own, else the smallest that is large enough.

    `model_bytes` are the weights'. A tier without a limit takes what fits nowhere else. Raises
    PlanError where there is none, or no such partition.
    """
    if model in tiers.models:
        named, own = tiers.models[model]
        return named, next(tier for tier in tiers.partitions[named] if tier.name == own)
    named = partition or tiers.default_partition
    if named not in tiers.partitions:
        known = ", ".join(tiers.partitions)
        raise PlanError(f"partition: {named[:80]!r} is none of {known}")
    offered = tiers.partitions[named]
    size = model_bytes / 1e9
    fitting = [
        (tier.max_model_size_gb, tier.gpu_count, place)
        for place, tier in enumerate(offered)
        if tier.max_model_size_gb is not None and size <= tier.max_model_size_gb
    ]
    if fitting:
        return named, offered[min(fitting)[2]]
    for tier in offered:
        if tier.max_model_size_gb is None:
            return named, tier
    largest = max(tier.max_model_size_gb or 0 for tier in offered)
    raise PlanError(
        f"no tier of partition {named!r} takes a model of {size:.1f} GB: the largest takes {largest}"
    )


def read_tiers(file: Path | None) -> Tiers:
    """The tiers of a TOML file; the built-in ones without one. Raises PlanError."""
    if file is None:
        return BUILT_IN
    try:
        if file.exists() and not file.is_file():
            raise PlanError(f"{file}: is no file")
        if file.stat().st_size > MAX_FILE_BYTES:
            raise PlanError(f"{file}: is larger than {MAX_FILE_BYTES >> 20} MiB")
        document = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(f"{file}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise PlanError(f"{file}: is not UTF-8") from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise PlanError(f"{file}: {error}") from None
    try:
        return _tiers(Members(document))
    except PlanError as error:
        raise PlanError(f"{file}: {error}") from None


def _tiers(document: Members) -> Tiers:
    document.refuse_others("time", "partitions", "models")
    if not document.has("partitions"):
        raise PlanError("partitions: missing: write [partitions.NAME]")
    inner = document.inner("partitions")
    partitions: dict[str, tuple[Tier, ...]] = {}
    default = ""
    for name in inner.names(_MAX_COUNT):
        partition = inner.inner(name)
        partition.refuse_others("default", "tiers")
        partitions[name] = _partition(partition)
        if partition.flag("default", default=False):
            default = default or name
    if not partitions:
        raise PlanError("partitions: empty: write [partitions.NAME]")
    time = document.inner("time") if document.has("time") else Members({}, "time.")
    time.refuse_others("default", "max")
    most = time.number("max", high=525_600, default=180)
    return Tiers(
        partitions=partitions,
        default_partition=default or next(iter(partitions)),
        default_minutes=time.number("default", high=most, default=min(30, most)),
        max_minutes=most,
        models=_models(document, partitions),
    )


def _partition(partition: Members) -> tuple[Tier, ...]:
    tiers = tuple(_tier(one) for one in partition.tables("tiers", 1000))
    if not tiers:
        raise PlanError(f"{partition.name_of('tiers')}: missing: write [[partitions.NAME.tiers]]")
    names = [tier.name for tier in tiers]
    if len(set(names)) < len(names):
        raise PlanError(f"{partition.name_of('tiers')}: two of one name")
    return tiers


def _tier(one: Members) -> Tier:
    one.refuse_others(*Tier.__dataclass_fields__)
    name = one.text("name")
    if not name:
        raise PlanError(f"{one.name_of('name')}: missing")
    if one.has("gpu_type"):
        try:
            find_gpus(one.text("gpu_type"))
        except PlanError as error:
            raise PlanError(f"{one.name_of('gpu_type')}: {error}") from None
    gpus = one.number("gpu_count", low=0, high=_MAX_COUNT)
    limit = one.has("max_model_size_gb")
    return Tier(
        name=name,
        gpu_count=gpus,
        cpu_cores=one.number("cpu_cores", high=_MAX_COUNT),
        memory_gb=one.number("memory_gb", high=_MAX_GB),
        max_model_size_gb=one.number("max_model_size_gb", high=_MAX_GB) if limit else None,
        gpu_type=one.text("gpu_type"),
        gres=one.text("gres", default=f"gpu:{gpus}" if gpus else ""),
        constraint=one.text("constraint"),
        description=one.text("description"),
    )


def _models(
    document: Members, partitions: Mapping[str, tuple[Tier, ...]]
) -> dict[str, tuple[str, str]]:
    if not document.has("models"):
        return {}
    inner = document.inner("models")
    models = {}
    for name in inner.names(_MAX_COUNT):
        partition, _, tier = inner.text(name).rpartition(".")
        if not any(one.name == tier for one in partitions.get(partition, ())):
            raise PlanError(f"{inner.name_of(name)}: is no PARTITION.TIER of this file")
        models[name] = (partition, tier)
    return models
