"""Models that a profile's host has: below the model roots, and in the Hugging Face cache.

One `find` on the host reads names and sizes, and no content of a file.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from app.provisioning import patterns
from app.provisioning.catalogue import CatalogueEntry
from app.provisioning.hosts import MAX_OUTPUT, HostError, Hosts
from app.provisioning.profiles import Profile

# hub/models--OWNER--NAME/snapshots/COMMIT/FILE, or ROOT/OWNER/NAME/FILE.
# https://huggingface.co/docs/huggingface_hub/guides/manage-cache
_DEPTH = "4"
_SNAPSHOT = re.compile(r"/hub/models--([^/]+)/snapshots/([0-9a-f]{40,64})", re.ASCII)
_MODEL_FILES = ("config.json", "config.pbtxt")
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
# Files of weights that a repository may have beside those that vLLM reads.
_PREFERRED = (r"model.*\.safetensors", r".*\.safetensors", r".*")
_PART = re.compile(r".*-(\d{5})-of-(\d{5})\.\w+", re.ASCII)
_LINE = re.compile(r"(\d+)\.\d+\t(\d+)\t(/.+)")


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model's directory. `name` and `revision` are those of a launch."""

    name: str
    revision: str | None
    changed: int  # Unix time of its configuration
    weights: Mapping[str, int] = field(default_factory=dict)  # bytes by file
    is_entry: bool = False  # of a Triton model repository, which may name weights elsewhere

    @property
    def size_gb(self) -> float:
        """The weights' size in 10^9 bytes."""
        return sum(self.weights.values()) / 1e9

    @property
    def fault(self) -> str | None:
        """The reason why it cannot be launched as it is."""
        parts = [found for name in self.weights if (found := _PART.fullmatch(name))]
        missing = int(parts[0][2]) - len(parts) if parts else 0
        if missing > 0:
            return f"{missing} of {parts[0][2].lstrip('0')} files are missing"
        if not self.weights and not self.is_entry:
            return "has no weights"
        return None


async def find_models(hosts: Hosts, profile: Profile) -> list[FoundModel]:
    """The models on the profile's host, by name. Raises HostError."""
    places = list(profile.model_roots)
    if profile.cache is not None:
        places.append(f"{profile.cache}/hub")
    if not places:
        raise HostError(f"The profile {profile.name} has neither model_roots nor a cache.")
    # Links are followed: the files of a snapshot are links to blobs.
    command = ["find", "-L", *places, "-mindepth", "2", "-maxdepth", _DEPTH, "-type", "f", "("]
    for name in (*_MODEL_FILES, *_WEIGHTS):
        command += ["-name", name, "-o"]
    command[-1:] = [")", "-printf", r"%T@\t%s\t%p\n"]
    answer = await hosts.run(profile, command)
    # It is 1 also if one directory of many cannot be read.
    if answer.status != 0 and not answer.output:
        raise HostError(f"The models of {profile.name} cannot be listed: {answer.error_line}")
    if len(answer.output) >= MAX_OUTPUT:
        raise HostError(
            f"The model roots of {profile.name} have too many files: name smaller ones."
        )
    return group(answer.output.splitlines(), profile)


def group(lines: Iterable[str], profile: Profile) -> list[FoundModel]:
    """The models by name, of `TIME<tab>BYTES<tab>PATH` lines; other lines are passed over."""
    files = {
        PurePosixPath(line[3]): (int(line[1]), int(line[2]))
        for line in map(_LINE.fullmatch, lines)
        if line and patterns.is_plain_path(line[3])
    }
    configurations: dict[PurePosixPath, PurePosixPath] = {}
    for path in sorted(files, key=lambda one: (len(one.parts), one)):
        if path.name in _MODEL_FILES and _above(path.parent, configurations) is None:
            configurations[path.parent] = path  # of an entry, if there are both
    weights: dict[PurePosixPath, dict[str, int]] = {directory: {} for directory in configurations}
    for path, (_, size) in files.items():
        above = _above(path, configurations)
        if above is not None and path.name not in _MODEL_FILES:
            weights[above][str(path.relative_to(above))] = size
    found: list[FoundModel] = []
    for directory, path in configurations.items():
        name, revision = _name(str(directory), profile)
        read = _read_by_vllm(weights[directory])
        is_entry = path.suffix == ".pbtxt"
        found.append(FoundModel(name, revision, files[path][0], read, is_entry))
    return sorted(found, key=lambda one: (one.name, -one.changed))


def catalogue_entries(models: Iterable[FoundModel], profile: Profile) -> dict[str, CatalogueEntry]:
    """Entries for the catalogue: of each model's newest revision that can be launched."""
    entries: dict[str, CatalogueEntry] = {}
    for one in models:
        may_launch = profile.triton_entries or not one.is_entry
        if one.fault is None and one.name not in entries and may_launch:
            entries[one.name] = CatalogueEntry(
                name=one.name,
                revision=one.revision,
                size_gb=round(one.size_gb, 3) or None,
                profile=profile.name,
            )
    return entries


def _above(
    path: PurePosixPath, known: Mapping[PurePosixPath, PurePosixPath]
) -> PurePosixPath | None:
    """The known directory that this path is below."""
    return next((one for one in path.parents if one in known), None)


def _read_by_vllm(weights: Mapping[str, int]) -> dict[str, int]:
    """The files of the first kind that there is: others repeat the weights in another format."""
    for pattern in _PREFERRED:
        chosen = {
            name: size
            for name, size in weights.items()
            if re.fullmatch(pattern, PurePosixPath(name).name)
        }
        if chosen:
            return chosen
    return {}


def _name(directory: str, profile: Profile) -> tuple[str, str | None]:
    """Name and revision in a launch: the Hugging Face id of a snapshot in the cache, else the path."""
    if profile.cache is not None:
        found = _SNAPSHOT.fullmatch(directory.removeprefix(profile.cache))
        if found and patterns.is_model_id(name := found[1].replace("--", "/", 1)):
            return name, found[2]
    return directory, None
