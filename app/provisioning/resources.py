"""Facts of a launch's model, and the smallest tier that is large enough for it."""

import re
from pathlib import Path

from app.provisioning.profiles import Profile, Tier
from app.provisioning.sizing.config_file import find_model, read_config
from app.provisioning.sizing.facts import ModelFacts, PlanError
from app.provisioning.sizing.weights import weight_bytes

_MAX_COMMIT = 64
_COMMIT = re.compile(r"[0-9a-f]{40,64}", re.ASCII)


def facts_of(model: str, revision: str | None, profile: Profile) -> ModelFacts | None:
    """Read the facts of a model from its files, if they are on this machine and the launch would read them.

    A path counts below the profile's model roots, a Hugging Face id in its cache; neither it, nor
    its config.json, may lead out of them by a link. None if there are no such files. Blocks. Raises
    PlanError for files that are wrong.
    """
    if profile.host is not None:
        return None
    if model.startswith("/"):
        place, roots = Path(model), profile.model_roots
    elif profile.cache is not None:
        place, roots = _cached(Path(profile.cache), model, revision), (profile.cache,)
    else:
        return None
    try:
        if not _is_inside(place, roots):
            return None
        directory = find_model(place)
        config = directory / "config.json"
        if not config.is_file() or not _is_inside(config, roots):
            return None
    except OSError:
        return None
    try:
        return read_config(directory)
    except PlanError as error:
        # Users see only the path that they named.
        raise PlanError(str(error).replace(f"{directory}/", "")) from None


def size_of(model: str, revision: str | None, profile: Profile) -> float | None:
    """GB (10^9 bytes) of a model's weights, if its files can be read here. Blocks."""
    try:
        facts = facts_of(model, revision, profile)
    except PlanError:
        return None
    return None if facts is None else weight_bytes(facts, facts.dtype) / 1e9


def _cached(cache: Path, model: str, revision: str | None) -> Path:
    """Directory of a model's revision in the cache; HF_HOME is `cache`.

    https://huggingface.co/docs/huggingface_hub/guides/manage-cache: `refs` name commits.
    """
    repository = cache / "hub" / f"models--{model.replace('/', '--')}"
    name = revision or "main"
    try:
        with (repository / "refs" / name).open(encoding="ascii") as file:
            commit = file.read(_MAX_COMMIT)
    except (OSError, UnicodeDecodeError):
        commit = name
    return repository / "snapshots" / (commit if _COMMIT.fullmatch(commit) else name)


def _is_inside(path: Path, roots: tuple[str, ...]) -> bool:
    real = path.resolve()
    return any(real.is_relative_to(Path(root).resolve()) for root in roots)


def choose_tier(profile: Profile, size_gb: float | None, name: str | None) -> Tier | None:
    """The named tier, else the smallest that takes the model; None if there is none.

    `size_gb` is the size of the weights (`size_of`); if it is None, the result is the profile's
    first tier.
    """
    if name is not None:
        return profile.tier(name)
    if size_gb is None:
        return profile.tiers[0]
    limited = [one for one in profile.tiers if one.max_model_size_gb is not None]
    fitting = (one for one in limited if size_gb <= (one.max_model_size_gb or 0))
    unlimited = (one for one in profile.tiers if one.max_model_size_gb is None)
    smallest = min(fitting, key=lambda one: (one.max_model_size_gb, one.gpus), default=None)
    return smallest or next(unlimited, None)
