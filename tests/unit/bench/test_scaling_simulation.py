"""The simulation behind `bench scaling`: queues whose waits are known, the laws of closed loops, and the
service's model where what limits it is known.
"""

import random
from collections.abc import Callable, Sequence

import pytest

from bench.service_model import (
    API,
    CALLER,
    POSTGRES,
    TRITON,
    WORKER,
    Costs,
    Layout,
    simulate,
)
from bench.simulation import Batcher, Cores, Lock, Signal, Simulation, Thread
from bench.statements import (
    CLAIMED,
    ENDED_ALONE,
    ENDED_AND_TOLD,
    READ,
    STARTED,
    STORED,
    Cost,
    Notified,
    Statement,
)

_SECONDS = 20_000.0


def mean_wait(service: Callable[[], float], *, rate: float, cores: int = 1) -> float:
    """The mean wait of arrivals at random in a queue before so many cores, without their service."""
    simulation, dice = Simulation(), random.Random(7)  # noqa: S311
    servers = Cores(simulation, cores)
    waits: list[float] = []

    async def visit() -> None:
        began, seconds = simulation.now, service()
        await Thread(servers).work(seconds)
        waits.append(simulation.now - began - seconds)

    async def arrive() -> None:
        while True:
            await simulation.sleep(dice.expovariate(rate))
            simulation.spawn(visit())

    simulation.spawn(arrive())
    simulation.run(_SECONDS)
    return sum(waits) / len(waits)


def closed_loop(callers: int, seconds: float, pause: float) -> float:
    """Visits per second of a thread by callers who pause after each one."""
    simulation = Simulation()
    thread, count = Thread(Cores(simulation, 1)), 0

    async def call() -> None:
        nonlocal count
        while True:
            await simulation.sleep(pause)
            await thread.work(seconds)
            count += 1

    for _ in range(callers):
        simulation.spawn(call())
    simulation.run(100.0)
    return count / 100.0


def test_random_service_waits_as_the_formula_says() -> None:
    dice = random.Random(3)  # noqa: S311
    # M/M/1: load / (service rate - arrival rate)
    assert mean_wait(lambda: dice.expovariate(1.0), rate=0.5) == pytest.approx(1.0, rel=0.08)


def test_equal_service_waits_half_as_long() -> None:
    assert mean_wait(lambda: 1.0, rate=0.5) == pytest.approx(0.5, rel=0.08)  # M/D/1


def test_two_cores_wait_as_the_formula_says() -> None:
    dice = random.Random(3)  # noqa: S311
    # M/M/2 at load 0.5 each: C(2, 1) / (2 - 1), C = 1/3
    wait = mean_wait(lambda: dice.expovariate(1.0), rate=1.0, cores=2)
    assert wait == pytest.approx(1 / 3, rel=0.08)


@pytest.mark.parametrize("callers", [1, 3, 5, 8, 50])
def test_a_closed_loop_keeps_the_law_of_its_bottleneck(callers: int) -> None:
    # Throughput is at most callers / (all times), and one over the longest; without chance, exactly.
    rate = closed_loop(callers, 0.02, 0.08)
    assert rate == pytest.approx(min(callers / 0.1, 1 / 0.02), rel=0.02)


def test_threads_of_one_host_share_its_cores() -> None:
    simulation = Simulation()
    cores = Cores(simulation, 2)
    ends: list[float] = []

    async def work(thread: Thread) -> None:
        await thread.work(1.0)
        ends.append(simulation.now)

    for _ in range(3):
        simulation.spawn(work(Thread(cores)))
    busy = Thread(cores)
    simulation.run(10.0)
    assert ends == [1.0, 1.0, 2.0]
    simulation.spawn(work(busy))
    simulation.spawn(work(busy))  # of one thread, also if more cores are free
    simulation.run(20.0)
    assert ends[3:] == [3.0, 4.0]
    assert cores.busy == 5.0
    assert busy.busy == 2.0


def test_a_lane_takes_what_arrived_during_the_last_statement() -> None:
    simulation = Simulation()
    batches: list[list[int]] = []

    async def statement(items: Sequence[int]) -> None:
        batches.append(list(items))
        await simulation.sleep(1.0)

    lane = Batcher(simulation, statement, most=3)
    ends: dict[int, float] = {}

    async def submit(item: int, at: float) -> None:
        await simulation.sleep(at)
        await lane.submit(item)
        ends[item] = simulation.now

    for item, at in enumerate((0.0, 0.2, 0.3, 0.4, 0.5, 5.0)):
        simulation.spawn(submit(item, at))
    simulation.run(10.0)
    assert batches == [[0], [1, 2, 3], [4], [5]]
    assert ends == {0: 1.0, 1: 2.0, 2: 2.0, 3: 2.0, 4: 3.0, 5: 6.0}
    assert (lane.batches, lane.items, lane.busy) == (4, 6, 4.0)


def test_a_lock_has_one_holder_at_a_time() -> None:
    simulation = Simulation()
    lock, ends = Lock(simulation), []

    async def hold() -> None:
        await lock.acquire()
        await simulation.sleep(1.0)
        lock.release()
        ends.append(simulation.now)

    for _ in range(3):
        simulation.spawn(hold())
    simulation.run(10.0)
    assert ends == [1.0, 2.0, 3.0]
    assert lock.busy == 3.0


def test_a_signal_wakes_who_waits_and_is_not_lost() -> None:
    simulation = Simulation()
    signal, seen = Signal(simulation), []

    async def wait(at: float) -> None:
        await simulation.sleep(at)
        await signal.wait()
        seen.append(simulation.now)

    simulation.spawn(wait(0.0))
    simulation.spawn(wait(2.0))
    simulation.after(1.0, signal.set)
    simulation.run(10.0)
    assert seen == [1.0, 2.0]


# --- the service's model --------------------------------------------------------------------------


def costs(*, commit: float = 0.0, turn: float = 0.0, listener: float = 0.0) -> Costs:
    """Costs in round numbers: a result's life takes its process a millisecond, in one process."""
    nothing, statement = Cost(0.0, 0.0), Cost(0.0, 1e-4)
    kinds = (STORED, STARTED, CLAIMED, ENDED_ALONE, ENDED_AND_TOLD, READ)
    return Costs(
        statements={kind: Statement(statement, statement, 0.0, nothing) for kind in kinds},
        notified=Notified(listener, nothing, 0.0, 0.0),
        digest=0.0,
        request=4e-4,
        generation=4e-4,
        chunk=1e-4,
        triton=0.0,
        caller=0.0,
        wake=dict.fromkeys((API, WORKER, POSTGRES, TRITON, CALLER), 0.0),
        commit=commit,
        turn=turn,
        hand_over=0.0,
    )


def test_places_at_engines_bound_the_rate() -> None:
    layout = Layout(callers=64, slots=8, service_seconds=0.5)
    found = simulate(costs(), layout, seconds=20.0, warm_up=2.0)
    assert found.rate == pytest.approx(8 / 0.5, rel=0.05)
    assert found.p50 == pytest.approx(64 / 16, rel=0.05)


def test_a_process_is_one_core_and_processes_add_up() -> None:
    for apis in (1, 4):
        layout = Layout(
            callers=16 * apis,
            apis=apis,
            api_cores=4,
            apis_of_host=4,
            postgres_cores=16,
            is_one_host=False,
        )
        found = simulate(costs(), layout, seconds=0.5, warm_up=0.2)
        assert found.rate == pytest.approx(apis * 1000, rel=0.05)
        assert found.spent[API] == pytest.approx(1e-3, rel=0.05)


def test_chunks_cost_their_worker() -> None:
    layout = Layout(callers=16, is_one_host=False, postgres_cores=16, chunks=11)
    found = simulate(costs(), layout, seconds=0.5, warm_up=0.2)
    assert found.rate == pytest.approx(500, rel=0.05)


def test_notifying_commits_take_turns() -> None:
    layout = Layout(
        callers=32, apis=32, api_cores=32, apis_of_host=32, postgres_cores=64, is_one_host=False
    )
    # Each of 32 processes commits one end at a time, and so do all together: one in 11 ms.
    found = simulate(costs(commit=1e-3, turn=1e-2), layout, seconds=2.0, warm_up=0.5)
    assert found.notifying == pytest.approx(1 / 11e-3, rel=0.1)
    assert found.busy["lock of notifying commits"] == pytest.approx(1.0, rel=0.05)


def test_each_listener_costs_postgres_of_each_commit() -> None:
    layout = Layout(
        callers=8, apis=8, api_cores=8, apis_of_host=8, postgres_cores=16, is_one_host=False
    )
    reported, silent = (
        simulate(costs(listener=seconds), layout, seconds=0.1, warm_up=0.05)
        for seconds in (5e-5, 0.0)
    )
    more = reported.used["PostgreSQL's cores"] - silent.spent[POSTGRES] * reported.rate
    assert more == pytest.approx(reported.notifying * 8 * 5e-5, rel=0.15)
