"""No state of PostgreSQL's statistics turns the plan of a hot statement.

Each hot statement runs on a hundred thousand results that wait beside as many that have ended, in
every state that the statistics may be in. The bounds are on pages and rows, never on time.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import pytest_asyncio

from tests.integration.queue.plans.explaining import Reading
from tests.integration.queue.plans.hot_job_statements import HOT_JOB_STATEMENTS
from tests.integration.queue.plans.hot_list_statements import HOT_LIST_STATEMENTS
from tests.integration.queue.plans.hot_statements import HOT_STATEMENTS, HotStatement, Queue
from tests.integration.queue.plans.states import (
    STATES,
    Databases,
    State,
    full_databases,
    queue_in,
)
from tests.postgres import PostgresServer

pytestmark = [
    pytest.mark.trial,  # all statements in all states of the statistics
    pytest.mark.asyncio(loop_scope="module"),
]

# A join of the queue with a list of models, such as `idle` of `enqueue` was: from statistics of an idle
# queue it reads all that waits.
_ALL_THAT_WAITS = """
SELECT m FROM unnest($1::text[]) AS m WHERE NOT EXISTS (
  SELECT FROM results w WHERE w.model_name = m AND w.state = 'pending' AND w.worker_id IS NULL)
"""

STATEMENTS = (*HOT_STATEMENTS, *HOT_LIST_STATEMENTS, *HOT_JOB_STATEMENTS)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def databases(postgres_server: PostgresServer, template: str) -> AsyncIterator[Databases]:
    async with full_databases(postgres_server, template) as databases:
        yield databases


@dataclass(slots=True, frozen=True)
class InState:
    state: State
    queue: Queue


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=STATES, ids=[state.name for state in STATES]
)
async def case(request: pytest.FixtureRequest, databases: Databases) -> AsyncIterator[InState]:
    async with queue_in(request.param, databases) as queue:
        yield InState(request.param, queue)


@pytest.mark.parametrize("statement", STATEMENTS, ids=[one.name for one in STATEMENTS])
async def test_a_hot_statement_reads_little(case: InState, statement: HotStatement) -> None:
    async with case.queue.database.undone() as readings:
        await statement.run(case.queue)
    assert readings
    bounds = statement.bounds(knows_sizes=case.state.knows_sizes)
    for reading in readings:
        if not case.state.has_dead_entries:
            assert reading.buffers <= bounds.buffers, describe(reading)
        assert reading.rows <= bounds.rows, describe(reading)


def describe(reading: Reading) -> str:
    read = f"{reading.buffers} buffers, {reading.rows} rows; {reading.largest_scan()}"
    return f"{read}\n{reading.query}"


async def test_a_plan_that_has_turned_is_noticed(databases: Databases) -> None:
    """A bad form in a good state reads no more than a good form; in a bad state it does."""
    buffers = {}
    for name in ("analysed while full", "analysed while idle"):
        (state,) = (state for state in STATES if state.name == name)
        async with queue_in(state, databases) as queue, queue.database.undone() as readings:
            await queue.database.fetch(_ALL_THAT_WAITS, ["new"])
            buffers[name] = readings[0].buffers
    assert buffers["analysed while full"] < 100
    assert buffers["analysed while idle"] > 1_000
