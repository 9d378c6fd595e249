"""Reports of the ledger: sums of a period, grouped as asked."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Literal, get_args

from app.core.database import Database
from app.core.errors import invalid_field
from app.results.usage.ledger import SUMS
from app.results.usage.prices import COST, PRICE

Group = Literal["team", "key", "model", "adapter", "day", "month", "outcome"]
GROUPS: tuple[Group, ...] = get_args(Group)
MAX_DAYS = 366  # of a report
MAX_ROWS = 10_000

_EXPRESSIONS: dict[Group, str] = {
    "team": "team_id",
    "key": "token_id",
    "model": "model_name",
    "adapter": "adapter",
    "day": "day::text",
    "month": "to_char(day, 'YYYY-MM')",
    "outcome": "ended_as",
}
_TOKENS = ("prompt_tokens", "cached_prompt_tokens", "completion_tokens", "reasoning_tokens")
_OUTCOMES = """coalesce(sum(results), 0)::bigint AS results,
  coalesce(sum(results) FILTER (WHERE ended_as = 'completed'), 0)::bigint AS completed,
  coalesce(sum(results) FILTER (WHERE ended_as = 'cancelled'), 0)::bigint AS cancelled,
  coalesce(sum(results) FILTER (WHERE ended_as NOT IN ('completed', 'cancelled')), 0)::bigint AS failed"""
_SUMS = ", ".join(f"coalesce(sum({name}), 0)::bigint AS {name}" for name in _TOKENS)
# In one statement: its snapshot has each result in one of both.
LEDGER = " UNION ALL ".join(
    f"SELECT team_id, day, token_id, model_name, adapter, ended_as, {', '.join(SUMS)} FROM {table}"
    for table in ("usage_days", "usage_entries")
)
_REPORT = f"""
SELECT {{groups}} {_OUTCOMES}, {_SUMS},
  coalesce(sum(engine_microseconds), 0)::float8 / 1000000 AS engine_seconds,
  {COST} AS cost
FROM ({LEDGER}) u LEFT JOIN {PRICE} WHERE day BETWEEN $1 AND $2 {{condition}} {{order}} LIMIT {MAX_ROWS + 1}
"""


@dataclass(slots=True, frozen=True)
class Usage:
    """Results that ended, by outcome, and their sums. `failed` excludes the cancelled."""

    results: int
    completed: int
    cancelled: int
    failed: int
    prompt_tokens: int
    cached_prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    engine_seconds: float
    cost: float | None  # None where no price is set


@dataclass(slots=True, frozen=True)
class UsageRow:
    group: Mapping[Group, str]
    usage: Usage


def total_of(rows: Sequence[UsageRow]) -> Usage:
    costs = [row.usage.cost for row in rows if row.usage.cost is not None]
    sums = {
        name: sum(getattr(row.usage, name) for row in rows)
        for name in Usage.__slots__
        if name != "cost"
    }
    return Usage(**sums, cost=sum(costs) if costs else None)


@dataclass(slots=True, frozen=True)
class UsageQuery:
    """A period of UTC days, both included, and filters; `team_id` None: all teams."""

    first: date
    last: date
    group_by: Sequence[Group]
    team_id: str | None
    token_id: str | None = None
    model_name: str | None = None


class UsageReports:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def read(self, query: UsageQuery) -> list[UsageRow]:
        """The groups of a period in their order. Raises InvalidRequestError for too many."""
        _check_period(query)
        arguments: list[object] = [query.first, query.last]
        condition = ""
        for column in ("team_id", "token_id", "model_name"):
            if (value := getattr(query, column)) is not None:
                arguments.append(value)
                condition += f" AND {column} = ${len(arguments)}"
        columns = [f'{_EXPRESSIONS[group]} AS "{group}"' for group in query.group_by]
        places = ", ".join(str(place) for place in range(1, len(columns) + 1))
        statement = _REPORT.format(
            groups="".join(f"{column}, " for column in columns),
            condition=condition,
            order=f"GROUP BY {places} ORDER BY {places}" if columns else "",
        )
        rows = await self._database.fetch(statement, *arguments)
        if len(rows) > MAX_ROWS:
            raise invalid_field(
                "group_by",
                f"the report has more than {MAX_ROWS:,} rows; narrow the period, or name a `key` or "
                "`model`",
            )
        return [
            UsageRow(
                {group: row[group] for group in query.group_by},
                Usage(**{name: row[name] for name in Usage.__slots__}),
            )
            for row in rows
        ]


def _check_period(query: UsageQuery) -> None:
    days = (query.last - query.first).days + 1
    if days < 1:
        raise invalid_field("to", "is before `from`")
    if days > MAX_DAYS:
        raise invalid_field("from", f"a report has at most {MAX_DAYS} days; this one has {days:,}")
