"""The hot statements of lists, run by the service's own functions on the rows of `full_queue`."""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from app.results.pages import ResultFilter
from tests.integration.queue.plans.full_queue import MODELS, RARE
from tests.integration.queue.plans.hot_statements import TEAM, Bounds, HotStatement, Queue, Work

_LIMIT = 50

Filters = Sequence[Mapping[str, Any]]


def _by(*dimensions: Filters, context: bool = False) -> Work:
    """A page by each combination of the filters; `context` adds one, which 67 results have."""

    async def list_all(queue: Queue) -> None:
        context_id = queue.ids.context if context else None
        for combined in product(*dimensions):
            filters = {name: value for one in combined for name, value in one.items()}
            narrowed = ResultFilter(context_id=context_id, **filters)
            await queue.results.list(TEAM, narrowed, after=None, limit=_LIMIT, full=False)

    return list_all


async def _at_depth(queue: Queue) -> None:
    for after in (None, *queue.ids.ended[-1:]):
        await queue.results.list(TEAM, ResultFilter(), after=after, limit=_LIMIT, full=False)


_MODELS: Filters = [{"model_name": name} for name in (MODELS[0], RARE, "none")]
_STATES: Filters = [{"state": state} for state in ("pending", "failed", "completed")]
_ERRORS: Filters = [{"error_code": "model_error"}, {"error_code": "none"}, {"retryable": False}]
# A frequent pair, a rare one and none of its index.
_PAIRS: Filters = [{"metadata": {"run": value}} for value in ("busy", "rare", "none")]

# A table of some rows is read as fast by any index: a page may read all of the team's rows, and sort them.
_UNKNOWN = Bounds(14_000, 140_000)

HOT_LIST_STATEMENTS: Sequence[HotStatement] = (
    HotStatement("list", _at_depth, 1_500, 200, Bounds(1_500, 30_000)),
    HotStatement("list by model", _by(_MODELS), 400, 200, _UNKNOWN),
    # No index has the completed results alone: the waiting ones, a third of a hundred thousand, are above them.
    HotStatement("list by state", _by(_STATES), 6_000, 70_000, _UNKNOWN),
    HotStatement("list by error", _by(_ERRORS), 200, 200, _UNKNOWN),
    HotStatement("list by context", _by([{}], context=True), 400, 600),
    HotStatement("list by metadata", _by(_PAIRS), 500, 400, _UNKNOWN),
    HotStatement("list by model and state", _by(_MODELS, _STATES), 8_000, 70_000, _UNKNOWN),
    HotStatement("list by model and error", _by(_MODELS, _ERRORS), 500, 1_000, _UNKNOWN),
    HotStatement("list by model and context", _by(_MODELS, context=True), 200, 300),
    # A frequent pair, whose results end completed or wait: the walks of both read on.
    HotStatement("list by metadata and state", _by(_PAIRS, _STATES), 14_000, 70_000, _UNKNOWN),
    HotStatement("list by metadata and model", _by(_PAIRS, _MODELS), 2_000, 2_000, _UNKNOWN),
)
