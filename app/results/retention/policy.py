"""Retention times of results and prompts: the settings' values, and a team's own.

Each value of a team replaces that of the settings, whether longer or shorter. A request's
`retain_seconds` can only shorten its team's.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import asyncpg

from app.core.database import Database
from app.core.settings import Settings

FOREVER = 0.0  # a team's own value as stored

_ALL = "SELECT team_id, results_seconds, prompts_seconds FROM team_retention ORDER BY team_id"
_OF = "SELECT results_seconds, prompts_seconds FROM team_retention WHERE team_id = $1"
_SET = """
INSERT INTO team_retention (team_id, results_seconds, prompts_seconds) VALUES ($1, $2, $3)
ON CONFLICT (team_id) DO UPDATE SET results_seconds = excluded.results_seconds,
  prompts_seconds = excluded.prompts_seconds
"""
_REMOVE = "DELETE FROM team_retention WHERE team_id = $1 RETURNING team_id"


@dataclass(slots=True, frozen=True)
class Kept:
    """Seconds from the end of a result; None: no limit."""

    results_seconds: float | None
    prompts_seconds: float | None

    @property
    def is_forever(self) -> bool:
        return self.results_seconds is None and self.prompts_seconds is None


@dataclass(slots=True, frozen=True)
class Policies:
    default: Kept
    of_teams: Mapping[str, Kept]

    def of(self, team_id: str) -> Kept:
        return self.of_teams.get(team_id, self.default)


class RetentionPolicy:
    """Reads and sets the retention of teams, without a cache: it is rarely needed."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self._database = database
        self._default = Kept(settings.results_retention_seconds, settings.prompts_retention_seconds)

    async def all(self) -> Policies:
        rows = await self._database.fetch(_ALL)
        return Policies(self._default, {row["team_id"]: self._to_kept(row) for row in rows})

    async def of(self, team_id: str) -> Kept:
        row = await self._database.fetchrow(_OF, team_id)
        return self._default if row is None else self._to_kept(row)

    async def stored(self) -> list[tuple[str, float | None, float | None]]:
        """Each team's own values: team, results, prompts; None where the settings' applies."""
        rows = await self._database.fetch(_ALL)
        return [(row["team_id"], row["results_seconds"], row["prompts_seconds"]) for row in rows]

    async def set(self, team_id: str, results: float | None, prompts: float | None) -> None:
        """Set a team's own values; `FOREVER`, or None for the settings'."""
        await self._database.fetch(_SET, team_id, results, prompts)

    async def remove(self, team_id: str) -> bool:
        return bool(await self._database.fetch(_REMOVE, team_id))

    def _to_kept(self, row: asyncpg.Record) -> Kept:
        return Kept(
            _merge(row["results_seconds"], self._default.results_seconds),
            _merge(row["prompts_seconds"], self._default.prompts_seconds),
        )


def _merge(own: float | None, default: float | None) -> float | None:
    if own is None:
        return default
    return None if own == FOREVER else own
