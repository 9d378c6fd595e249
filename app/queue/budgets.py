"""Monthly budgets of teams and tokens: requests are refused once one is used up.

A worker process compares the budgets with the ledger of usage (`results/usage/spending.py`). Each API
process holds the exhausted ones, and reads them again regularly and when notified of a change: a
request costs no statement.
"""

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from app.core.database import Database
from app.core.errors import BudgetExhaustedError
from app.core.listener import LIMITS, Listener
from app.core.polling import PollingLoop
from app.core.program import PROGRAM
from app.queue.enqueue import NewResult

WHOLE_TEAM = ""  # the token of a budget for all tokens of a team
PERIOD_SECONDS = 5.0

_MONTH = "date_trunc('month', now() AT TIME ZONE 'UTC')"
_EXHAUSTED = f"""
SELECT team_id, token_id, max_tokens, max_cost, used_tokens, used_cost,
  extract(epoch FROM ({_MONTH} + interval '1 month') AT TIME ZONE 'UTC')::float8 AS ends_at
FROM budgets
WHERE month = {_MONTH}::date AND (used_tokens >= max_tokens OR used_cost >= max_cost)
"""


@dataclass(slots=True, frozen=True)
class ExhaustedBudget:
    team_id: str
    token_id: str
    max_tokens: int | None
    max_cost: float | None
    used_tokens: int
    used_cost: float
    ends_at: float  # Unix time of the month's end


class BudgetGuard:
    """The exhausted budgets; `run` keeps them current."""

    def __init__(self, database: Database, currency: str) -> None:
        self._database = database
        self._currency = currency
        self._exhausted: dict[tuple[str, str], ExhaustedBudget] = {}
        self._is_loaded = False
        self._loop = PollingLoop("budgets", self.refresh, seconds=PERIOD_SECONDS)

    def subscribe(self, listener: Listener) -> None:
        listener.subscribe(LIMITS, lambda _: self._loop.wake())

    async def run(self) -> None:
        await self._loop.run()

    async def refresh(self) -> None:
        found = [ExhaustedBudget(**row) for row in await self._database.fetch(_EXHAUSTED)]
        self._exhausted = {(one.team_id, one.token_id): one for one in found}
        self._is_loaded = True

    async def check(self, results: Iterable[NewResult]) -> None:
        """Raise BudgetExhaustedError if a budget of one of these results is used up."""
        if not self._is_loaded:
            await self.refresh()
        if not self._exhausted:
            return
        for team_id, token_id in {(one.team_id, one.token_id) for one in results}:
            for name in (WHOLE_TEAM, token_id):
                found = self._exhausted.get((team_id, name)) if name is not None else None
                if found is not None and found.ends_at > time.time():
                    raise self._refusal(found)

    def _refusal(self, budget: ExhaustedBudget) -> BudgetExhaustedError:
        is_tokens = budget.max_tokens is not None and budget.used_tokens >= budget.max_tokens
        allowed = budget.max_tokens if is_tokens else budget.max_cost
        used = budget.used_tokens if is_tokens else budget.used_cost
        unit, option = ("tokens", "--tokens") if is_tokens else (self._currency, "--cost")
        ends = datetime.fromtimestamp(budget.ends_at, UTC)
        whose, command = f"Team {budget.team_id!r}", f"budget set {budget.team_id}"
        if budget.token_id != WHOLE_TEAM:
            whose = f"Key {budget.token_id!r} of team {budget.team_id!r}"
            command += f" --key {budget.token_id}"
        wait = max(1, math.ceil(budget.ends_at - time.time()))
        return BudgetExhaustedError(
            f"{whose} has used {_text(used)} {unit} of its monthly budget of {_text(allowed)}. The "
            f"month ends at {ends:%Y-%m-%dT%H:%M:%SZ}; until then, an operator may raise the budget: "
            f"`{PROGRAM} {command} {option} N`.",
            headers={"Retry-After": str(wait)},
            extra={
                "limit": "tokens" if is_tokens else "cost",
                "allowed": allowed,
                "used": used,
                "ends_at": f"{ends:%Y-%m-%dT%H:%M:%SZ}",
            },
        )


def _text(value: float | None) -> str:
    assert value is not None
    return f"{value:,.2f}".removesuffix(".00")
