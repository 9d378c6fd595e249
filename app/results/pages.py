"""Pages of a team's results, newest first: conditions, index and order.

Lists, exports and searches share these filters.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from uuid import UUID

from app.core.ids import HIGHEST_ID, LOWEST_ID, lowest_id
from app.queue.finish import READ_COLUMNS
from app.results.rows import State
from app.results.tags import tag_of

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
    metadata: Mapping[str, str] | None = None  # pairs that it has, their values as text
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
    source: str = "results"  # a table or a join of the index's table with `results`
    found_by: str = ""  # bounds of a row of `results`, where the index is of another table

    @property
    def conditions(self) -> str:
        """The walk's results as conditions on rows of `results`."""
        return f"{self.found_by or self.bounds} AND {self.tests}"

    def select(self, columns: str, limit: int) -> str:
        return (
            f"SELECT {columns} FROM {self.source} WHERE {self.bounds} AND {self.tests} "
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
    pairs = list((narrowed.metadata or {}).items())
    if narrowed.ids is not None:
        return [_lookup(narrowed.ids, _Tests(filters, state, pairs), low, high)]
    orders = _orders(filters, state, has_tags=bool(pairs))
    walks = [_walk(order, _Tests(filters, state, pairs), low, high) for order in orders]
    by_tag = [
        _tag_walk(team_id, pair, _Tests(filters, state, [*pairs[:place], *pairs[place + 1 :]]), low, high)
        for place, pair in enumerate(pairs)
    ]  # fmt: skip
    by_context = int("context_id" in filters)  # the first walk is also that of searches by words
    return [*walks[:by_context], *by_tag, *walks[by_context:]]


@dataclass(slots=True, frozen=True)
class _Order:
    """Columns before `id` in an index, and the condition of its rows, if it has not all."""

    columns: tuple[str, ...]
    where: str = ""


@dataclass(slots=True, frozen=True)
class _Tests:
    """The conditions, of which an index serves some.

    IS TRUE keeps the columns of the others from the indexes: the planner must not prefer one without the
    walk's order.
    """

    filters: Mapping[str, object]
    state: State | None
    pairs: Sequence[tuple[str, str]]

    def of_rows(
        self, served: Iterable[str], first: int, *, state: bool = True
    ) -> tuple[str, list[object]]:
        """Conditions on a row but those on `served` columns, and their arguments from $first on."""
        rest = {name: value for name, value in self.filters.items() if name not in served}
        tests = [f"({name} = ${place}) IS TRUE" for place, name in enumerate(rest, first)]
        if state and self.state is not None:
            tests.append(f"state = '{self.state}'")
        places = itertools.count(first + len(rest))
        tests += [_HAS_PAIR.format(key=next(places), value=next(places)) for _ in self.pairs]
        return " AND ".join(tests), [*rest.values(), *itertools.chain(*self.pairs)]


# As `tags_of_metadata` has it: no list, object or null.
_HAS_PAIR = """metadata ->> ${key}::text = ${value}::text
  AND jsonb_typeof(metadata -> ${key}::text) IN ('string', 'number', 'boolean')"""

# OFFSET 0: each result is found by its id, in the order of its tag.
_TAGGED = """result_tags t CROSS JOIN LATERAL (
  SELECT * FROM results WHERE id = t.result_id OFFSET 0) r"""
_IS_TAGGED = """(SELECT true FROM result_tags
  WHERE team_id = $1 AND tag = $2 AND result_id = id LIMIT 1) IS NOT NULL AND id >= $3 AND id < $4"""

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


def _orders(
    filters: Mapping[str, object], state: State | None, *, has_tags: bool
) -> Sequence[_Order]:
    orders = [_BY_CONTEXT] if "context_id" in filters else []
    if state == "failed":
        return orders + ([_FAILED_BY[name] for name in _FAILED_BY if name in filters] or [_FAILED])
    if "model_name" in filters:
        orders.append(_BY_MODEL)
    if state == "pending":
        orders.append(_PENDING)
    return orders or ([] if has_tags else [_NEWEST])


def _lookup(ids: Sequence[UUID], tests: _Tests, low: UUID, high: UUID) -> Walk:
    """The results of some ids, by the primary key; each condition is tested."""
    tested, arguments = tests.of_rows((), 4)
    return Walk(
        "id = ANY($1::uuid[]) AND id >= $2 AND id < $3", tested, "id DESC",
        [list(ids), low, high, *arguments], 3, low, high,
    )  # fmt: skip


def _walk(order: _Order, tests: _Tests, low: UUID, high: UUID) -> Walk:
    key, count = ", ".join(order.columns), len(order.columns)
    values = ", ".join(f"${place}" for place in range(1, count + 1))
    # Rows, not equalities: only the one index that begins with these columns has this order.
    # A generic plan otherwise walks down all ids, in the hope of a common value.
    bounds = [f"({key}, id) >= ({values}, ${count + 1})", f"({key}, id) < ({values}, ${count + 2})"]
    if order.where:
        bounds.append(order.where)
    tested, arguments = tests.of_rows(order.columns, count + 3, state=not order.where)
    return Walk(
        " AND ".join(bounds), tested or "true",
        ", ".join(f"{name} DESC" for name in (*order.columns, "id")),
        [*(tests.filters[name] for name in order.columns), low, high, *arguments],
        count + 2, low, high,
    )  # fmt: skip


def _tag_walk(team_id: str, pair: tuple[str, str], tests: _Tests, low: UUID, high: UUID) -> Walk:
    """The results with a pair in their metadata, by the index of tags."""
    tested, arguments = tests.of_rows(("team_id",), 5)
    key = "(t.team_id, t.tag, t.result_id)"
    return Walk(
        f"{key} >= ($1, $2, $3) AND {key} < ($1, $2, $4)", tested or "true",
        "t.team_id DESC, t.tag DESC, t.result_id DESC",
        [team_id, tag_of(*pair), low, high, *arguments], 4, low, high,
        source=_TAGGED, found_by=_IS_TAGGED,
    )  # fmt: skip
