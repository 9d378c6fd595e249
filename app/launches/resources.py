"""What a launch asks for, where its request does not say: the smallest tier that is large enough."""

from dataclasses import dataclass
from pathlib import Path

from app.launches.profiles import Profile, Tier
from app.plan.config_file import read_config
from app.plan.facts import PlanError
from app.plan.weights import weight_bytes


@dataclass(frozen=True, slots=True)
class Resources:
    """Of one server, on one node. `memory_gb`: host memory, Slurm's G."""

    gpus: int
    cpus: int
    memory_gb: int
    tier: str
    gres: str | None = None
    constraint: str | None = None
    partition: str | None = None


def size_of(model: str, profile: Profile) -> float | None:
    """GB (10^9 bytes) of a model's weights, if it is a directory that can be read here.

    Blocks. A link that leads out of the profile's roots is not followed.
    """
    if profile.host is not None or not model.startswith("/"):
        return None
    path = Path(model).resolve()
    if not any(path.is_relative_to(Path(root).resolve()) for root in profile.model_roots):
        return None
    try:
        facts = read_config(path)
    except PlanError:
        return None
    return weight_bytes(facts, facts.dtype) / 1e9


def suggest_resources(
    profile: Profile, size_gb: float | None, tier: str | None
) -> Resources | None:
    """The named tier, else the smallest that takes the model; None if there is none.

    `size_gb` is the size of the weights (`size_of`), where it is known; else it is the profile's
    first tier.
    """
    if tier is not None:
        named = profile.tier(tier)
        return None if named is None else _of(named)
    if size_gb is None:
        return _of(profile.tiers[0])
    fitting = [
        one
        for one in profile.tiers
        if one.max_model_size_gb is not None and size_gb <= one.max_model_size_gb
    ]
    if fitting:
        return _of(min(fitting, key=lambda one: (one.max_model_size_gb or 0, one.gpus)))
    return next((_of(one) for one in profile.tiers if one.max_model_size_gb is None), None)


def _of(tier: Tier) -> Resources:
    return Resources(
        gpus=tier.gpus,
        cpus=tier.cpus,
        memory_gb=tier.memory_gb,
        tier=tier.name,
        gres=tier.gres or (f"gpu:{tier.gpus}" if tier.gpus else None),
        constraint=tier.constraint,
        partition=tier.partition,
    )
