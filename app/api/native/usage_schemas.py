"""Wire schemas of usage, as JSON and as CSV."""

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict
from datetime import date
from typing import Any

from pydantic import BaseModel, Field

from app.results.usage.report import Group, Usage, UsageQuery, UsageRow, total_of
from app.results.usage.spending import Budget


class UsageTotalRead(BaseModel):
    """Sums of results that ended in the period. A retry is a result of its own."""

    results: int
    completed: int
    cancelled: int
    failed: int = Field(description="Results that ended otherwise.")
    prompt_tokens: int
    cached_prompt_tokens: int = Field(
        description="Prompt tokens that the engine had in its cache; 0 where it does not report them."
    )
    completion_tokens: int
    reasoning_tokens: int = Field(
        description="Completion tokens of reasoning; 0 where the engine does not report them."
    )
    engine_seconds: float = Field(
        description="Time during which workers ran the attempts of the results, lost ones included."
    )
    cost: float | None = Field(
        description="By the prices of their days, in `currency`; null where no price is set."
    )


class UsageRowRead(UsageTotalRead):
    """A group of results; it has the members of `group_by`."""

    team: str | None = None
    key: str | None = Field(
        None,
        description="The `token_id` of a JWT, or the prefix of an API key; empty where unknown.",
    )
    model: str | None = None
    adapter: str | None = None
    day: date | None = None
    month: str | None = Field(None, description="As `2026-11`.")
    outcome: str | None = Field(None, description="`completed` or the error code.")


class UsageRead(BaseModel):
    first: date = Field(alias="from")
    last: date = Field(alias="to")
    group_by: list[Group]
    currency: str
    rows: list[UsageRowRead]
    total: UsageTotalRead


class BudgetRead(BaseModel):
    """A monthly budget, and its use as of some seconds ago."""

    team: str
    key: str | None = Field(description="Null: all keys of the team together.")
    max_tokens: int | None
    used_tokens: int
    max_cost: float | None
    used_cost: float
    currency: str
    month: str | None = Field(
        description="The month of the use, as `2026-11`; null: not checked yet."
    )


def budget_to_wire(budget: Budget, currency: str) -> dict[str, Any]:
    return {
        "team": budget.team_id,
        "key": budget.token_id or None,
        "max_tokens": budget.max_tokens,
        "used_tokens": budget.used_tokens,
        "max_cost": budget.max_cost,
        "used_cost": budget.used_cost,
        "currency": currency,
        "month": budget.month and f"{budget.month:%Y-%m}",
    }


def usage_to_wire(query: UsageQuery, rows: Sequence[UsageRow], currency: str) -> dict[str, Any]:
    return {
        "from": query.first,
        "to": query.last,
        "group_by": query.group_by,
        "currency": currency,
        "rows": [{**row.group, **asdict(row.usage)} for row in rows],
        "total": asdict(total_of(rows)),
    }


def usage_to_csv(query: UsageQuery, rows: Sequence[UsageRow]) -> str:
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow([*query.group_by, *Usage.__slots__])
    for row in rows:
        writer.writerow([*row.group.values(), *asdict(row.usage).values()])
    return text.getvalue()
