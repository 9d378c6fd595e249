"""Pages of a team's results, newest first: conditions, index and order.

Lists, exports and searches share these filters.
"""

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from app.core.ids import HIGHEST_ID, LOWEST_ID, lowest_id
from app.queue.finish import READ_COLUMNS
from app.results.rows import State

# Columns of a row on a page: all but a dialect's request, which may be as large as its prompt.
LIST_COLUMNS = {column: column for column in READ_COLUMNS} | {"request": "NULL AS request"}


@dataclass(slots=True, frozen=True)
class ResultFilter:
    """Conditions on results; None leaves a condition out."""

    state: State | None = None
    model_name: str | None = None
    context_id: UUID | None = None
    error_code: str | None = None
    retryable: bool | None = None
    created_after: datetime | None = None
    created_before: datetime | None = None
    words: str | None = None  # in the syntax of websearch_to_tsquery; only `ResultSearch` uses them


@dataclass(slots=True, frozen=True)
class Page:
    conditions: str
    order: str
    arguments: list[object]  # of the conditions, $1 and on
    low: UUID  # no id is below it
    high: UUID  # all ids are below it

    def select(self, columns: str, limit: int) -> str:
        return (
            f"SELECT {columns} FROM results WHERE {self.conditions} "
            f"ORDER BY {self.order} LIMIT {int(limit)}"
        )


def page_of(team_id: str, narrowed: ResultFilter, after: UUID | None) -> Page | None:
    """The page that begins below the id `after`; None where no result can be on it."""
    state = narrowed.state
    if narrowed.error_code is not None or narrowed.retryable is not None:
        if state not in (None, "failed"):
            return None  # only failed results have an error
        state = "failed"
    key, filters = _split(team_id, narrowed, state)
    low = lowest_id(narrowed.created_after) if narrowed.created_after else LOWEST_ID
    high = lowest_id(narrowed.created_before) if narrowed.created_before else HIGHEST_ID
    high = min(high, after or HIGHEST_ID)
    arguments = [*key.values(), low, high, *filters.values()]
    columns, count = ", ".join(key), len(key)
    values = ", ".join(f"${place}" for place in range(1, count + 1))
    # Rows, not equalities: only the one index that begins with these columns has this order.
    # A generic plan otherwise walks down all ids, in the hope of a common value.
    conditions = [
        f"({columns}, id) >= ({values}, ${count + 1})",
        f"({columns}, id) < ({values}, ${count + 2})",
        *(f"{name} = ${place}" for place, name in enumerate(filters, count + 3)),
    ]
    # Literal, so that the planner may use the partial indexes.
    if "error_code" in key:
        conditions.append("error_code IS NOT NULL")
    elif state is not None:
        conditions.append(f"state = '{state}'")
    order = ", ".join(f"{name} DESC" for name in (*key, "id"))
    return Page(" AND ".join(conditions), order, arguments, low, high)


def _split(
    team_id: str, narrowed: ResultFilter, state: State | None
) -> tuple[dict[str, object], dict[str, object]]:
    """Columns before `id` in the serving index, and the rest: the filter of fewest rows wins."""
    filters: dict[str, object] = {
        name: value
        for name, value in (
            ("team_id", team_id),
            ("model_name", narrowed.model_name),
            ("context_id", narrowed.context_id),
            ("error_code", narrowed.error_code),
            ("error_retryable", narrowed.retryable),
        )
        if value is not None
    }
    names = ["team_id"]
    if "context_id" in filters:
        names = ["context_id"]
    elif "error_code" in filters:
        names = ["team_id", "error_code"]
    elif "model_name" in filters and state in (None, "completed"):
        names = ["team_id", "model_name"]
    return {name: filters.pop(name) for name in names}, filters
