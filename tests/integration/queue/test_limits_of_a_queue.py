"""The running limits that a process has read when it begins to claim."""

from app.queue.job_queue import JobQueue
from tests.integration.queue.queue_bench import Bench

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
