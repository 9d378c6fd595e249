"""LoRA adapters of the models in a model repository (docs/lora.md).

In the directory of a version's `model.json`, `multi_lora.json` has the path of each adapter by name, as
NVIDIA's vLLM backend reads it. `adapter_teams.json` has the teams that may use an adapter; one without an entry is
open to all.
"""

import asyncio
import logging
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app.core.background_threads import background_threads
from app.inference.tokenizer_files import newest_version, read_json, repository_with

logger = logging.getLogger(__name__)

ADAPTERS_FILE = "multi_lora.json"
TEAMS_FILE = "adapter_teams.json"
# The sampling parameter by which both backends take an adapter.
ADAPTER_PARAMETER = "lora_name"
MAX_ADAPTERS = 1_000  # of a model
_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
_READING = background_threads("adapters", 1)


def full_name(model: str, adapter: str | None) -> str:
    """The name by which requests name a model with an adapter."""
    return model if adapter is None else f"{model}:{adapter}"


@dataclass(slots=True, frozen=True)
class Adapters:
    """The adapters of one model, in order; `teams` has those that are not open to all."""

    names: tuple[str, ...] = ()
    teams: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def allows(self, name: str, team_id: str | None) -> bool:
        """Return if a team may use an adapter; None is a reader without a team, who may use none."""
        if team_id is None or name not in self.names:
            return False
        return name not in self.teams or team_id in self.teams[name]

    def with_name(self, name: str) -> "Adapters":
        return Adapters(tuple(sorted({*self.names, name})), self.teams)

    def of_team(self, team_id: str | None) -> list[str]:
        return [name for name in self.names if self.allows(name, team_id)]


class AdapterFiles:
    """The adapters of all models; a file that changes is read again."""

    def __init__(self, *repositories: Path) -> None:
        self._repositories = repositories
        self._known: dict[str, tuple[object, Adapters]] = {}  # the files' state, and their content

    async def read(self, models: Collection[str]) -> dict[str, Adapters]:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(_READING, self._read_all, list(models))

    def _read_all(self, models: list[str]) -> dict[str, Adapters]:
        return {model: self._read(model) for model in models}

    def _read(self, model: str) -> Adapters:
        try:
            engine_file = newest_version(repository_with(self._repositories, model), model)
            if engine_file is None:
                return Adapters()
            state = _state_of(engine_file)
            known = self._known.get(model)
            if known is not None and known[0] == state:
                return known[1]
        except OSError:  # replaced at this moment: the next refresh reads it
            return Adapters()
        try:
            adapters = read_adapters(engine_file)
        except (OSError, ValueError, TypeError) as error:
            adapters = Adapters()
            logger.warning(
                "the adapters of model %s are not available: %s",
                model,
                error,
                extra={"action": "adapters_unreadable"},
            )
        self._known[model] = state, adapters
        return adapters


def _state_of(engine_file: Path) -> object:
    """A value that changes with the files of a version's adapters."""
    states = []
    for file in (engine_file, *(engine_file.with_name(one) for one in (ADAPTERS_FILE, TEAMS_FILE))):
        status = file.stat() if file.is_file() else None
        states.append(status and (status.st_mtime_ns, status.st_size, status.st_ino))
    return engine_file, tuple(states)


def read_adapters(engine_file: Path) -> Adapters:
    """The adapters beside a model.json. Raises OSError, ValueError, TypeError for wrong files."""
    engine = read_json(engine_file)
    if str(engine.get("enable_lora", False)).lower() != "true":
        return Adapters()
    paths = read_json(engine_file.with_name(ADAPTERS_FILE))
    if len(paths) > MAX_ADAPTERS:
        raise ValueError(f"{ADAPTERS_FILE} has {len(paths)} entries, more than {MAX_ADAPTERS}")
    for name in paths:
        if not _NAME.fullmatch(name):
            raise ValueError(
                f"{ADAPTERS_FILE}: the name {name[:64]!r} must have letters, digits and ._- alone"
            )
    teams = read_json(engine_file.with_name(TEAMS_FILE))
    if unknown := sorted(teams.keys() - paths.keys()):
        raise ValueError(f"{TEAMS_FILE} names adapters that are not there: {', '.join(unknown)}")
    return Adapters(
        tuple(sorted(paths)), {name: _read_teams(name, given) for name, given in teams.items()}
    )


def _read_teams(name: str, given: Any) -> frozenset[str]:
    if not isinstance(given, list) or not all(isinstance(team, str) for team in given):
        raise TypeError(f"{TEAMS_FILE}: {name} must be a list of teams")
    return frozenset(given)
