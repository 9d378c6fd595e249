"""A hook of hatchling: the wheel requires the versions of the locks, which the tests run with."""

from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

# The sets that `make run` installs. uv installs Triton's environment at the first start.
_LOCKS = ("requirements.txt", "requirements-embedded.txt", "requirements-uv.txt")


class LockedDependencies(MetadataHookInterface):
    """`project.dependencies`, without the hashes: the metadata of a wheel has no place for them."""

    def update(self, metadata: dict[str, Any]) -> None:
        root = Path(self.root)
        lines = [line for lock in _LOCKS for line in (root / lock).read_text().splitlines()]
        # Hashes and comments are indented.
        pins = {line.removesuffix("\\").strip() for line in lines if line[:1].isalnum()}
        metadata["dependencies"] = sorted(pins)
