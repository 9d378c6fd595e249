"""Limits as the queue applies them: what counts, and which of them a process has read."""

import pytest

from app.core.errors import LimitError
from app.queue.admission import Admission
from app.queue.budgets import BudgetGuard
from app.queue.depth import QueueDepth
from app.queue.job_queue import JobQueue
from app.queue.team_limits import Limits, TeamLimits
from tests.integration.queue.queue_bench import Bench, ended, make_result

_SET = "INSERT INTO team_limits (team_id, model_name, weight, max_running) VALUES ($1, '*', 1, $2)"


async def test_stored_limits_are_known_after_loading(bench: Bench) -> None:
    assert not bench.queue.has_running_limits
    await bench.connection.execute(_SET, "first", 2)
    await bench.connection.execute(_SET, "second", None)
    queue = JobQueue(bench.database, bench.settings)
    await queue.load_limits()
    assert queue.has_running_limits


async def test_limits_of_another_kind_are_no_running_limits(bench: Bench) -> None:
    await bench.connection.execute(_SET, "first", None)
    queue = JobQueue(bench.database, bench.settings)
    await queue.load_limits()
    assert not queue.has_running_limits


async def test_results_that_run_or_ended_do_not_wait(bench: Bench) -> None:
    """Nor do those of other teams and models."""
    depth = QueueDepth(bench.database, bench.settings)
    limits = TeamLimits(bench.database, bench.settings)
    admission = Admission(
        bench.database, depth, limits, BudgetGuard(bench.database, "USD"), bench.settings
    )
    worker = await bench.worker()
    await bench.add(2)
    ending, _ = await bench.claim(worker)
    assert await bench.end(worker, ended(ending)) == [True]
    await bench.add(team_id="other")
    await bench.add(model_name="other")
    await bench.add(2, priority=1)
    bounded = [make_result(limits=Limits(max_queued=3)) for _ in range(2)]
    async with admission.admitted(bounded[:1]):
        assert await bench.queue.enqueue(bounded[:1]) == [True]
    with pytest.raises(LimitError, match=r"^3 results of team 'default' wait"):
        async with admission.admitted(bounded[1:]):
            raise AssertionError("it is refused")
