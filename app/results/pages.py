"""Pages of a team's results, newest first: conditions, index and order.

Lists, exports and searches share these filters.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
    ids: Sequence[UUID] | None = None  # few: they are looked up one by one
    words: str | None = None  # in the syntax of websearch_to_tsquery; only `ResultSearch` uses them


@dataclass(slots=True, frozen=True)
class Walk:
    """A team's results in the order of one index, newest first: a range of it, and tests of each row."""

    bounds: str
    tests: str  # for the conditions that the index does not serve
    order: str
    arguments: Sequence[
        object
    ]  # of the bounds, with `low` and `high` at their end, and of the tests
    bounds_count: int  # of these, those of the bounds
    low: UUID  # no id is below it
    high: UUID  # all ids are below it

    @property
    def conditions(self) -> str:
        return f"{self.bounds} AND {self.tests}"

    def select(self, columns: str, limit: int) -> str:
        return (
            f"SELECT {columns} FROM results WHERE {self.conditions} "
            f"ORDER BY {self.order} LIMIT {int(limit)}"
        )

    def below(self, high: UUID) -> "Walk":
        """The rest of it, below an id."""
        arguments = list(self.arguments)
        arguments[self.bounds_count - 1] = high
        return replace(self, arguments=arguments, high=high)


def walks_of(team_id: str, narrowed: ResultFilter, after: UUID | None) -> Sequence[Walk]:
    """The walks to the results below the id `after`, one for each index that serves a condition.

    Each of them finds the same results. There is none where no result can be found.
    """
    state = narrowed.state
    if narrowed.error_code is not None or narrowed.retryable is not None:
        if state not in (None, "failed"):
            return []  # only failed results have an error
        state = "failed"
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
    low = lowest_id(narrowed.created_after) if narrowed.created_after else LOWEST_ID
    high = lowest_id(narrowed.created_before) if narrowed.created_before else HIGHEST_ID
    high = min(high, after or HIGHEST_ID)
    if narrowed.ids is not None:
        return [_lookup(narrowed.ids, filters, state, low, high)]
    return [_walk(order, filters, state, low, high) for order in _orders(filters, state)]


@dataclass(slots=True, frozen=True)
class _Order:
    """Columns before `id` in an index, and the condition of its rows, if it has not all."""

    columns: tuple[str, ...]
    where: str = ""


_NEWEST = _Order(("team_id",))
_BY_MODEL = _Order(("team_id", "model_name"))
_BY_CONTEXT = _Order(("context_id",))
# Conditions are literals, so that the planner may use the partial indexes. Each list of failed results by a
# column has its own condition or order of columns: no other index must look as cheap.
_PENDING = _Order(("team_id",), "state = 'pending'")
_FAILED = _Order(("team_id",), "state = 'failed'")
_FAILED_BY = {
    "error_code": _Order(("team_id", "error_code"), "error_code IS NOT NULL"),
    "error_retryable": _Order(("team_id", "error_retryable"), "error_retryable IS NOT NULL"),
    "model_name": _Order(("model_name", "team_id"), "state = 'failed'"),
}


def _orders(filters: Mapping[str, object], state: State | None) -> Sequence[_Order]:
    orders = [_BY_CONTEXT] if "context_id" in filters else []
    if state == "failed":
        return orders + ([_FAILED_BY[name] for name in _FAILED_BY if name in filters] or [_FAILED])
    if "model_name" in filters:
        orders.append(_BY_MODEL)
    if state == "pending":
        orders.append(_PENDING)
    return orders or [_NEWEST]


def _lookup(
    ids: Sequence[UUID], filters: Mapping[str, object], state: State | None, low: UUID, high: UUID
) -> Walk:
    """The results of some ids, by the primary key; each condition is tested."""
    tests = [f"{name} = ${place}" for place, name in enumerate(filters, 4)]
    if state is not None:
        tests.append(f"state = '{state}'")
    return Walk(
        "id = ANY($1::uuid[]) AND id >= $2 AND id < $3", " AND ".join(tests), "id DESC",
        [list(ids), low, high, *filters.values()], 3, low, high,
    )  # fmt: skip


def _walk(
    order: _Order, filters: Mapping[str, object], state: State | None, low: UUID, high: UUID
) -> Walk:
    key, count = ", ".join(order.columns), len(order.columns)
    values = ", ".join(f"${place}" for place in range(1, count + 1))
    # Rows, not equalities: only the one index that begins with these columns has this order.
    # A generic plan otherwise walks down all ids, in the hope of a common value.
    bounds = [f"({key}, id) >= ({values}, ${count + 1})", f"({key}, id) < ({values}, ${count + 2})"]
    if order.where:
        bounds.append(order.where)
    rest = [name for name in filters if name not in order.columns]
    tests = [f"{name} = ${place}" for place, name in enumerate(rest, count + 3)]
    if state is not None and not order.where:
        tests.append(f"state = '{state}'")
    return Walk(
        " AND ".join(bounds), " AND ".join(tests) or "true",
        ", ".join(f"{name} DESC" for name in (*order.columns, "id")),
        [*(filters[name] for name in order.columns), low, high, *(filters[name] for name in rest)],
        count + 2, low, high,
    )  # fmt: skip
