"""Budgets against the ledger: the use of each budget in this month, and alerts about its thresholds."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date

from app.core.database import Database
from app.core.listener import LIMITS
from app.core.polling import PollingLoop
from app.queue.budgets import PERIOD_SECONDS
from app.results.usage.prices import COST, PRICE
from app.results.usage.report import LEDGER

THRESHOLDS = (50, 80, 100)  # percent
_MAX_CHECKED = 500  # budgets of a statement
# Less than the period: a look that comes a little early must find the budgets due.
_FRESH_SECONDS = PERIOD_SECONDS / 2

# Budgets that another process checks are skipped. A check in the future: the clock was set back.
_CHECK = f"""
WITH month AS (
  SELECT date_trunc('month', now() AT TIME ZONE 'UTC')::date AS first
), due AS MATERIALIZED (
  SELECT team_id, token_id FROM budgets
  WHERE checked_at IS NULL OR checked_at > now()
    OR checked_at <= now() - make_interval(secs => $1)
  ORDER BY team_id, token_id LIMIT {_MAX_CHECKED} FOR UPDATE SKIP LOCKED
), used AS (
  SELECT b.team_id, b.token_id, coalesce(sum(u.prompt_tokens + u.completion_tokens), 0) AS tokens,
    coalesce({COST}, 0) AS cost
  FROM due b CROSS JOIN month m
  LEFT JOIN LATERAL (
    SELECT * FROM ({LEDGER}) l
    WHERE l.team_id = b.team_id AND l.day >= m.first AND (b.token_id = '' OR l.token_id = b.token_id)
  ) u ON true
  LEFT JOIN {PRICE}
  GROUP BY b.team_id, b.token_id
), checked AS (
  UPDATE budgets b SET month = m.first, used_tokens = u.tokens, used_cost = u.cost, checked_at = now()
  FROM used u, month m WHERE b.team_id = u.team_id AND b.token_id = u.token_id
  RETURNING b.*
), alerts AS (
  INSERT INTO budget_alerts (id, team_id, token_id, month, threshold, url, max_tokens, max_cost,
                             used_tokens, used_cost)
  SELECT gen_random_uuid(), team_id, token_id, month, threshold, webhook_url, max_tokens, max_cost,
    used_tokens, used_cost
  FROM checked CROSS JOIN unnest($2::int[]) AS t(threshold)
  WHERE webhook_url IS NOT NULL AND (used_tokens * 100.0 >= max_tokens * threshold::float8
    OR used_cost * 100 >= max_cost * threshold)
  ORDER BY team_id, token_id, threshold
  ON CONFLICT (team_id, token_id, month, threshold) DO NOTHING
)
SELECT count(*) FROM checked
"""
_COLUMNS = "team_id, token_id, max_tokens, max_cost, webhook_url, month, used_tokens, used_cost"
_LIST = f"SELECT {_COLUMNS} FROM budgets ORDER BY team_id, token_id"
_OF_TEAM = f"SELECT {_COLUMNS} FROM budgets WHERE team_id = $1 ORDER BY token_id"
_SET = f"""
WITH stored AS (
  INSERT INTO budgets (team_id, token_id, max_tokens, max_cost, webhook_url)
  VALUES ($1, $2, $3, $4, $5)
  ON CONFLICT (team_id, token_id) DO UPDATE SET max_tokens = excluded.max_tokens,
    max_cost = excluded.max_cost, webhook_url = excluded.webhook_url, checked_at = NULL
  RETURNING 1)
SELECT pg_notify('{LIMITS}', '') FROM stored
"""
_REMOVE = f"""
WITH removed AS (DELETE FROM budgets WHERE team_id = $1 AND token_id = $2 RETURNING 1)
SELECT pg_notify('{LIMITS}', '') FROM removed
"""


@dataclass(slots=True, frozen=True)
class Budget:
    """A monthly budget, and its use in `month` (its first day) as of the last check."""

    team_id: str
    token_id: str  # empty: the whole team
    max_tokens: int | None
    max_cost: float | None
    webhook_url: str | None = None
    month: date | None = None  # None: not checked yet
    used_tokens: int = 0
    used_cost: float = 0.0


class Spending:
    """Budgets and their use; `run` keeps the use current, in any number of processes."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._loop = PollingLoop("spending", self.check, seconds=PERIOD_SECONDS)

    async def run(self) -> None:
        await self._loop.run()

    async def check(self) -> None:
        """Check the budgets that no process has checked for some seconds."""
        count = _MAX_CHECKED
        while count == _MAX_CHECKED:
            (row,) = await self._database.fetch(_CHECK, _FRESH_SECONDS, list(THRESHOLDS))
            count = row["count"]

    async def list(self, team_id: str | None = None) -> Sequence[Budget]:
        if team_id is None:
            rows = await self._database.fetch(_LIST)
        else:
            rows = await self._database.fetch(_OF_TEAM, team_id)
        return [Budget(**row) for row in rows]

    async def set(self, budget: Budget) -> None:
        await self._database.fetch(
            _SET,
            *(budget.team_id, budget.token_id, budget.max_tokens, budget.max_cost),
            budget.webhook_url,
        )

    async def remove(self, team_id: str, token_id: str) -> bool:
        return bool(await self._database.fetch(_REMOVE, team_id, token_id))
