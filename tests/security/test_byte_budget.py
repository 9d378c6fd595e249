"""The byte budget: first come, first served, and fair by team."""

import asyncio
from collections.abc import Awaitable

import pytest

from app.core import byte_budget
from app.core.byte_budget import (
    ACCOUNT,
    Account,
    ByteBudget,
    charge,
    charge_to,
    charged,
    read_within,
    release,
)
from app.core.errors import MemoryBusyError

HOSTILE, POLITE = "hostile", "polite"


async def settle() -> None:
    """Let every task run that can."""
    for _ in range(20):
        await asyncio.sleep(0)


def start(waiting: Awaitable[int]) -> asyncio.Future[int]:
    return asyncio.ensure_future(waiting)


async def test_a_team_gets_as_many_bytes_as_it_leaves_free() -> None:
    budget = ByteBudget(1000)
    hostile = [Account(budget, HOSTILE) for _ in range(20)]
    tasks = [start(budget.take(one, 100)) for one in hostile]
    await settle()
    assert sum(task.done() for task in tasks) == 5
    await asyncio.wait_for(budget.take(Account(budget, POLITE), 200), 20)
    assert budget.used == 700
    hostile[0].close()
    await settle()
    assert budget.used == 600, "beside another team it has as much as it leaves free"
    for one in hostile[1:]:
        one.close()
        await settle()
    assert all(task.done() for task in tasks)


async def test_the_first_request_of_a_team_waits_only_for_room() -> None:
    budget = ByteBudget(1000)
    first, second, third = (Account(budget, team) for team in "abc")
    for one in (first, first, second, second):
        await budget.take(one, 200)
    large = start(budget.take(third, 250))
    small = start(budget.take(Account(budget, "d"), 50))
    await settle()
    assert not large.done()
    assert not small.done(), "nothing overtakes a team that has nothing"
    first.close()
    await asyncio.wait_for(asyncio.gather(large, small), 20)


async def test_one_text_counts_a_quarter_at_most_and_one_request_half() -> None:
    budget = ByteBudget(1000)
    large = Account(budget, HOSTILE)
    assert await budget.take(large, 100_000) == 250, "it is read, and others beside it"
    assert await budget.take(large, 250) == 250
    with pytest.raises(MemoryBusyError, match="Send it in parts") as refused:
        await budget.take(large, 1)
    assert "Retry-After" not in refused.value.headers
    assert await budget.take(Account(budget, POLITE), 250) == 250


async def test_a_wait_is_bounded_and_leaves_no_trace() -> None:
    budget = ByteBudget(1000, wait_seconds=0.01)
    first = Account(budget, HOSTILE)
    await budget.take(first, 250)
    await budget.take(first, 250)
    with pytest.raises(MemoryBusyError, match="LLM_MAX_BYTES_IN_FLIGHT") as refused:
        await budget.take(Account(budget, HOSTILE), 250)
    assert refused.value.headers["Retry-After"]
    assert budget.used == 500
    first.close()
    assert await budget.take(Account(budget, HOSTILE), 250) == 250


async def test_a_team_leaves_places_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(byte_budget, "_MAX_WAITING", 10)
    budget = ByteBudget(1000)
    for team in (HOSTILE, POLITE):
        await budget.take(Account(budget, team), 250)
    waiting = [start(budget.take(Account(budget, HOSTILE), 250)) for _ in range(5)]
    await settle()
    with pytest.raises(MemoryBusyError):
        await budget.take(Account(budget, HOSTILE), 250)
    polite = start(budget.take(Account(budget, POLITE), 250))
    await settle()
    assert not polite.done()
    for one in (*waiting, polite):
        one.cancel()


async def test_a_stream_with_a_ticket_is_one_of_its_team() -> None:
    budget = ByteBudget(1000)
    account = Account(budget, "")
    ACCOUNT.set(account)
    charge_to(POLITE)
    assert account.team == POLITE
    await budget.take(account, 100)
    charge_to(HOSTILE)
    assert account.team == POLITE, "bytes are given back to the team that took them"
    account.close()


async def test_a_waiter_that_is_cancelled_as_it_is_admitted_gives_back() -> None:
    budget = ByteBudget(1000)
    first, second = Account(budget, HOSTILE), Account(budget, HOSTILE)
    await budget.take(first, 250)
    await budget.take(first, 250)
    leaving = start(budget.take(second, 250))
    await settle()
    first.close()  # admits it; its task has not run since
    leaving.cancel()
    await settle()
    assert leaving.cancelled()
    assert budget.used == second.held == 0


async def test_the_texts_of_one_request_have_an_end() -> None:
    """As those of a list of saved prompts, which are read at the same time."""
    budget = ByteBudget(1000)
    other, account = Account(budget, POLITE), Account(budget, HOSTILE)
    for one in (account, account, other, other):
        await budget.take(one, 200)
    await budget.take(account, 10)
    await budget.take(Account(budget, "further"), 150)
    tasks = [start(budget.take(account, 60)) for _ in range(3)]
    await settle()
    assert not any(task.done() for task in tasks)
    other.close()
    done, _ = await asyncio.wait(tasks, timeout=20)
    assert len(done) == 3
    assert sum(isinstance(task.exception(), MemoryBusyError) for task in tasks) == 2
    assert account.held == 470


async def test_a_request_that_needs_more_ends_before_others_begin() -> None:
    """Otherwise all would hold their bodies, and none would get the bytes to end."""
    budget = ByteBudget(1000)
    holders = [Account(budget, HOSTILE) for _ in range(5)]
    for one in holders:
        await budget.take(one, 100)
    new = start(budget.take(Account(budget, HOSTILE), 100))
    growing = [start(budget.take(one, 100)) for one in holders]
    await settle()
    assert [task.done() for task in growing] == [True, True, False, False, False]
    assert budget.used == 700, "a quarter stays for other teams"
    holders[0].close()
    await settle()
    assert [task.done() for task in growing] == [True] * 4 + [False]
    assert not new.done()
    for one in holders[1:]:
        one.close()
    await asyncio.wait_for(new, 20)
    growing[-1].cancel()


async def test_a_stored_request_keeps_a_copy_of_its_texts() -> None:
    budget = ByteBudget(1000)
    account = Account(budget, POLITE)
    await budget.take(account, 200)
    account.shrink()
    assert account.held == budget.used == 50


async def test_texts_are_charged_before_they_are_read() -> None:
    budget = ByteBudget(1_000_000)
    account = Account(budget, POLITE)
    ACCOUNT.set(account)
    assert await charge(8_192) == 0 == account.held, "a small one is free"
    amount = await charge(10_000)
    assert amount == account.held == 40_000
    release(amount)

    async def read() -> str:
        assert account.held == 240_000
        return "x" * 20_000

    assert await read_within(60_000, read, len) == ("x" * 20_000, 80_000)
    assert account.held == 80_000, "it keeps what has been read"
    async with charged(10_000):
        assert account.held == 120_000

    async def fail() -> str:
        raise KeyError

    with pytest.raises(KeyError):
        await read_within(60_000, fail, len)
    assert account.held == 80_000
    account.close()
    assert budget.used == 0 == await charge(10_000), "a task that outlives its request"
