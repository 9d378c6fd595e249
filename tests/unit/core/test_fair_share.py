"""Shares of the event loop and of the connections: a team's many tasks delay no other team's few."""

import asyncio
import inspect
import time
from collections.abc import AsyncIterator

import pytest

from app.core.fair_share import (
    FairShares,
    connection_of_team,
    in_turns,
    move_to,
    pause,
    shared_lock,
)

STEP_SECONDS = 0.0005
TASKS = 200


@pytest.fixture
async def shares() -> AsyncIterator[FairShares]:
    yield FairShares(connections=4)
    asyncio.get_running_loop().set_task_factory(None)


class Crowd:
    """Requests of one team that are always ready; each step takes half a millisecond."""

    def __init__(self, shares: FairShares, team: str = "crowd", tasks: int = TASKS) -> None:
        self.steps = 0
        self.is_over = False
        self.tasks = [asyncio.create_task(shares.run(team, self.work())) for _ in range(tasks)]

    async def work(self) -> None:
        while not self.is_over:
            spin()
            self.steps += 1
            await asyncio.sleep(0)

    async def end(self) -> None:
        self.is_over = True
        await asyncio.gather(*self.tasks)


def spin(seconds: float = STEP_SECONDS) -> None:
    ends = time.perf_counter() + seconds
    while time.perf_counter() < ends:
        pass


async def take_steps(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def steps_beside(shares: FairShares, crowd: Crowd, team: str) -> int:
    """Steps of the crowd while another request takes ten."""
    await take_steps(5)
    before = crowd.steps
    await shares.run(team, take_steps(10))
    return crowd.steps - before


async def test_a_crowd_delays_a_step_of_another_team_by_one_turn(shares: FairShares) -> None:
    crowd = Crowd(shares)
    # Four steps fill a turn; a thousand and more of them were ready.
    assert await steps_beside(shares, crowd, "few") < TASKS
    await crowd.end()


async def test_requests_of_the_crowd_wait_for_one_another(shares: FairShares) -> None:
    """Every task gets its turn, in order: none is ten steps ahead of another."""
    counts = [0] * 20

    async def work(place: int) -> None:
        while max(counts) < 40:
            spin()
            counts[place] += 1
            await asyncio.sleep(0)

    await asyncio.gather(*(shares.run("crowd", work(place)) for place in range(20)))
    assert min(counts) > 30


async def test_tasks_of_a_request_take_its_turns(shares: FairShares) -> None:
    crowd = Crowd(shares, tasks=0)

    async def with_children() -> None:
        await asyncio.gather(*(asyncio.create_task(crowd.work()) for _ in range(TASKS)))

    children = asyncio.create_task(shares.run("crowd", with_children()))
    assert await steps_beside(shares, crowd, "few") < TASKS
    await crowd.end()
    await children


async def test_a_request_can_move_to_another_team(shares: FairShares) -> None:
    """The tasks it starts then take the other team's turns."""
    crowd = Crowd(shares, "anyone")

    async def child() -> int:
        await asyncio.sleep(0)
        before = crowd.steps
        await take_steps(10)
        return crowd.steps - before

    steps: list[int] = []

    async def request() -> None:
        move_to("few")
        steps.append(await asyncio.create_task(child()))

    await shares.run("anyone", request())
    assert steps[0] < TASKS
    await crowd.end()


async def test_a_long_step_pauses_where_it_can(shares: FairShares) -> None:
    """A loop that waits for nothing would be a single step."""
    places = []

    async def long() -> None:
        for place in range(5):
            spin(0.003)
            places.append(place)
            await pause()

    working = asyncio.create_task(shares.run("long", long()))
    await take_steps(2)
    assert 0 < len(places) < 5
    await working


async def test_a_long_list_pauses_between_its_items(shares: FairShares) -> None:
    done: list[int] = []

    async def read_list() -> None:
        async for item in in_turns(range(TASKS)):
            spin()
            done.append(item)

    reading = asyncio.create_task(shares.run("crowd", read_list()))
    await asyncio.sleep(0)
    await shares.run("few", take_steps(10))
    assert len(done) < TASKS / 2
    await reading
    assert done == list(range(TASKS))


async def test_a_pause_outside_of_requests_does_nothing() -> None:
    await pause()
    move_to("any")
    async with connection_of_team(0.1):
        pass


async def test_errors_reach_the_caller(shares: FairShares) -> None:
    async def broken() -> None:
        await asyncio.sleep(0)
        raise LookupError("here")

    with pytest.raises(LookupError, match="here"):
        await shares.run("team", broken())


async def test_tasks_that_wait_for_their_turn_can_be_cancelled(shares: FairShares) -> None:
    crowd = Crowd(shares)
    errors: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    started, ended = [], []

    async def endless(number: int) -> None:
        started.append(number)
        try:
            while True:
                await take_steps(1)
        finally:
            ended.append(number)

    tasks = [asyncio.create_task(shares.run("crowd", endless(number))) for number in range(5)]
    while len(started) < 5:
        await take_steps(1)
    await take_steps(5)
    for one in tasks:
        one.cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(one, asyncio.CancelledError) for one in outcomes)
    assert ended == started
    await crowd.end()
    assert not errors


async def test_a_team_alone_waits_for_nothing_in_the_next_round(shares: FairShares) -> None:
    team = shares.of("alone")

    found: list[bool] = []

    async def request() -> None:
        spin(0.003)
        await take_steps(2)
        found.append(team.has_turn())

    await shares.run("alone", request())
    await take_steps(2)
    assert found == [True]
    assert team.has_turn()


async def test_a_task_can_be_cancelled_before_it_starts(shares: FairShares) -> None:
    async def start_and_cancel() -> None:
        child = asyncio.create_task(take_steps(1))
        assert inspect.getcoroutinestate(child.get_coro()) == inspect.CORO_CREATED  # type: ignore[arg-type]
        child.cancel()
        with pytest.raises(asyncio.CancelledError):
            await child

    await shares.run("team", start_and_cancel())


async def test_a_request_with_a_connection_waits_for_no_turn(shares: FairShares) -> None:
    """Other teams may wait for that connection."""
    crowd = Crowd(shares)
    steps = []

    async def hold() -> None:
        async with connection_of_team(60):
            before = crowd.steps
            await take_steps(10)
            steps.append(crowd.steps - before)

    await take_steps(5)
    await shares.run("crowd", hold())
    # Each of the ten rounds has one turn of the crowd; in its order it would wait for all, ten times.
    assert steps[0] < 2 * TASKS
    await crowd.end()


async def test_tasks_of_a_request_with_a_connection_wait_for_no_turn(shares: FairShares) -> None:
    """A pool takes a connection back in a task of its own."""
    crowd = Crowd(shares)
    steps = []

    async def hold() -> None:
        async with connection_of_team(60):
            before = crowd.steps
            await asyncio.create_task(take_steps(10))
            steps.append(crowd.steps - before)

    await take_steps(5)
    await shares.run("crowd", hold())
    assert steps[0] < 2 * TASKS
    await crowd.end()


async def test_a_request_with_a_shared_lock_waits_for_no_turn(shares: FairShares) -> None:
    crowd, lock, steps = Crowd(shares), asyncio.Lock(), []

    async def hold() -> None:
        async with shared_lock(lock):
            before = crowd.steps
            await take_steps(10)
            steps.append(crowd.steps - before)

    await take_steps(5)
    await shares.run("crowd", hold())
    assert steps[0] < 2 * TASKS
    assert not lock.locked()
    await crowd.end()


async def test_a_request_may_take_a_second_connection(shares: FairShares) -> None:
    """All that a team may have are held by requests that need one more."""
    held, all_hold = [], asyncio.Event()

    async def hold_two() -> None:
        async with connection_of_team(60):
            held.append(1)
            if len(held) == shares.connections:
                all_hold.set()
            await all_hold.wait()
            async with connection_of_team(60):
                pass

    await asyncio.gather(*(shares.run("team", hold_two()) for _ in range(shares.connections)))


async def test_errors_that_many_requests_await_take_turns(shares: FairShares) -> None:
    """A statement that fails resumes all of its callers at once."""
    failed: list[str] = []
    future = asyncio.get_running_loop().create_future()

    async def work() -> None:
        try:
            await future
        except LookupError as error:
            spin()
            failed.append(str(error))

    tasks = [asyncio.create_task(shares.run("crowd", work())) for _ in range(TASKS)]
    await take_steps(20)
    future.set_exception(LookupError("lost"))
    await take_steps(10)
    assert 0 < len(failed) < TASKS // 2
    await asyncio.gather(*tasks)
    assert failed == ["lost"] * TASKS


async def test_a_cancellation_replaces_an_error_that_waits_for_its_turn(shares: FairShares) -> None:
    crowd = Crowd(shares)
    future = asyncio.get_running_loop().create_future()
    begun, ended = list[bool](), list[type[BaseException]]()

    async def work() -> None:
        begun.append(True)
        try:
            await future
        except (LookupError, asyncio.CancelledError) as error:
            ended.append(type(error))
            await take_steps(1)  # nothing is left of the other error

    waiting = asyncio.create_task(shares.run("crowd", work()))
    while not begun:
        await take_steps(1)
    future.set_exception(LookupError("lost"))
    await take_steps(3)
    waiting.cancel()
    await waiting
    assert ended == [asyncio.CancelledError]
    await crowd.end()


async def test_steps_that_become_expensive_are_stopped_within_a_round(shares: FairShares) -> None:
    """As many steps are admitted as cheap ones would fit into a turn."""
    long: list[int] = []
    is_expensive = False

    async def work(number: int) -> None:
        while not is_expensive:
            spin(0.00002)
            await take_steps(1)
        spin(0.005)
        long.append(number)

    tasks = [asyncio.create_task(shares.run("crowd", work(number))) for number in range(60)]
    await take_steps(500)
    is_expensive = True
    for _ in range(10):
        before = len(long)
        await take_steps(2)
        assert len(long) - before <= 4
    await asyncio.gather(*tasks)
    assert len(long) == 60


async def test_a_team_has_half_of_the_connections(shares: FairShares) -> None:
    held, may_go = [], asyncio.Event()

    async def hold(seconds: float) -> None:
        async with connection_of_team(seconds):
            held.append(seconds)
            await may_go.wait()

    holding = [asyncio.create_task(shares.run("many", hold(60))) for _ in range(2)]
    await take_steps(10)
    with pytest.raises(TimeoutError):
        await shares.run("many", hold(0.01))
    third = asyncio.create_task(shares.run("many", hold(60)))
    other = asyncio.create_task(shares.run("other", hold(60)))
    await take_steps(10)
    assert len(held) == 3
    may_go.set()
    await asyncio.gather(*holding, third, other)
    assert len(held) == 4
