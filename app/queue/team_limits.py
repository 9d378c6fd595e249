"""Limits of each team for each model, and its reuse, as set by the operator.

Every process holds all of them. It reads them again when notified of a change, and regularly.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from app.core.database import Database
from app.core.listener import LIMITS, Listener
from app.core.polling import PollingLoop
from app.core.settings import Settings

ANY_MODEL = "*"
_PERIOD_SECONDS = 10.0


@dataclass(slots=True, frozen=True)
class Limits:
    """Limits of one team for one model; None is no limit.

    `weight` is the team's share of the model while several teams wait for it, relative to others'.
    `reuse` applies to requests that have no `reuse` of their own.
    """

    weight: float = 1.0
    max_queued: int | None = None
    max_running: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    reuse: bool = False


@dataclass(slots=True, frozen=True)
class RunningLimits:
    """Limits of the running results of one model: the default, and teams with their own."""

    default: int | None
    of_teams: Mapping[str, int]


_NAMES = tuple(field.name for field in fields(Limits))
_COLUMNS = ", ".join(_NAMES)
_VALUES = ", ".join(f"${place}" for place in range(3, 3 + len(_NAMES)))
_READ = f"SELECT team_id, model_name, {_COLUMNS} FROM team_limits"
_SET = f"""
WITH stored AS (
  INSERT INTO team_limits AS l (team_id, model_name, {_COLUMNS}) VALUES ($1, $2, {_VALUES})
  ON CONFLICT (team_id, model_name) DO UPDATE
  SET ({_COLUMNS}) = ROW({", ".join(f"excluded.{name}" for name in _NAMES)})
  RETURNING 1)
SELECT pg_notify('{LIMITS}', '') FROM stored
"""
_REMOVE = f"""
WITH removed AS (
  DELETE FROM team_limits WHERE team_id = $1 AND model_name = $2 RETURNING 1)
SELECT pg_notify('{LIMITS}', '') FROM removed
"""

Stored = Mapping[str, float | int | None]


def without_running_limits_sql(model: str, team: str = "l.team_id") -> str:
    """Condition: a team, or any, has no running limit for a model, as stored: a process may read late."""
    return f"""NOT EXISTS (
    SELECT FROM team_limits l WHERE l.team_id = {team}
      AND l.max_running IS NOT NULL AND l.model_name IN ({model}, '{ANY_MODEL}'))"""


class TeamLimits:
    """The limits in force; `run` keeps them current."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self._database = database
        self._default: Stored = {
            "weight": 1.0,
            "max_queued": settings.team_max_queued,
            "max_running": settings.team_max_running,
            "requests_per_minute": settings.team_requests_per_minute,
            "tokens_per_minute": settings.team_tokens_per_minute,
            "reuse": False,
        }
        self._rows: dict[tuple[str, str], Stored] = {}
        # As asked for; bounded by teams and models.
        self._limits: dict[tuple[str, str], Limits] = {}
        self._is_loaded = False
        self.has_running = settings.team_max_running is not None
        self._loop = PollingLoop("limits", self.refresh, seconds=_PERIOD_SECONDS)

    def subscribe(self, listener: Listener) -> None:
        listener.subscribe(LIMITS, lambda _: self._loop.wake())

    async def run(self) -> None:
        await self._loop.run()

    async def refresh(self) -> None:
        rows = await self._database.fetch(_READ)
        self._rows = {
            (row["team_id"], row["model_name"]): {
                name: row[name] for name in _NAMES if row[name] is not None
            }
            for row in rows
        }
        self._limits = {}
        self._is_loaded = True
        self.has_running = self._default["max_running"] is not None or any(
            "max_running" in row for row in self._rows.values()
        )

    async def load(self) -> None:
        """Read the table unless it was read. Raises DatabaseUnavailableError."""
        if not self._is_loaded:
            await self.refresh()

    def of(self, team_id: str, model: str) -> Limits:
        """Return a team's limits for a model: by its row for the model, its row for any, the default."""
        limits = self._limits.get((team_id, model))
        if limits is None:
            of_any = self._rows.get((team_id, ANY_MODEL), {})
            members = {**self._default, **of_any, **self._rows.get((team_id, model), {})}
            limits = self._limits[team_id, model] = Limits(**members)  # type: ignore[arg-type]
        return limits

    def running(self, model: str) -> RunningLimits | None:
        of_teams = {}
        for team_id, name in self._rows:
            if name in (ANY_MODEL, model):
                most = self.of(team_id, model).max_running
                if most is not None:
                    of_teams[team_id] = most
        default = self._default["max_running"]
        if default is None and not of_teams:
            return None
        return RunningLimits(None if default is None else int(default), of_teams)

    async def stored(self) -> Sequence[tuple[str, str, Stored]]:
        await self.refresh()
        return [(*key, self._rows[key]) for key in sorted(self._rows)]

    async def set(self, team_id: str, model: str, values: Stored) -> None:
        """Set a team's limits for a model; those that `values` lacks become the default."""
        await self._database.fetch(_SET, team_id, model, *(values.get(name) for name in _NAMES))

    async def remove(self, team_id: str, model: str) -> bool:
        return bool(await self._database.fetch(_REMOVE, team_id, model))
