"""Byte budget of a process: the texts of its requests and responses in memory, divided by team.

A request's account is charged before a text is read, and released when its response is sent.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TypeVar

from app.core import metrics
from app.core.errors import MemoryBusyError

_Value = TypeVar("_Value")

FREE_BYTES = 8_192  # a smaller text is not counted
# Memory of a text in a request, in multiples of its bytes: as it was received or read, as `str` (up to
# 4 bytes a character), and as JSON.
_COPIES = 4
WAIT_SECONDS = 10.0
_MAX_WAITING = 1_000  # requests: each end looks through them
_RETRY_SECONDS = 5


class ByteBudget:
    """Bytes that the requests of a process may hold, first come, first served.

    A team's first request gets what is free. Further ones get as much as they leave free, so that other
    teams find some. (Dynamic thresholds, Choudhury and Hahne 1998.)
    """

    def __init__(self, capacity: int, wait_seconds: float = WAIT_SECONDS) -> None:
        self.used = 0
        self._capacity = capacity
        self._half = capacity // 2
        self._wait_seconds = wait_seconds
        self._teams: dict[str, int] = {}
        self._waiting: list[_Waiter] = []

    async def take(self, account: "Account", amount: int) -> int:
        """Wait for the bytes; returns how many were taken.

        Raises MemoryBusyError if they are not free in time, or if the request holds too many already.
        """
        amount = min(amount, self._capacity // 4)  # a larger text is read, and others beside it
        if self._is_beyond(account, amount):
            raise _too_many()
        if not self._waiting and self._is_free(account, amount):
            self._add(account, amount)
            return amount
        self._check_room(account.team)
        waiter = _Waiter(account, amount)
        self._waiting.append(waiter)
        self._admit()
        try:
            async with asyncio.timeout(self._wait_seconds):
                await waiter.admitted
        except BaseException as error:
            if waiter.is_admitted:
                self.give_back(account, amount)
            elif waiter in self._waiting:
                self._waiting.remove(waiter)
                self._admit()
            if isinstance(error, TimeoutError):
                raise _busy() from None
            raise
        return amount

    def _check_room(self, team: str) -> None:
        """Raise MemoryBusyError for a team that leaves fewer places to wait than it has."""
        of_team = sum(one.account.team == team for one in self._waiting)
        if of_team >= _MAX_WAITING - len(self._waiting):
            raise _busy()

    def give_back(self, account: "Account", amount: int) -> None:
        if amount:
            self._add(account, -amount)
            self._admit()

    def _is_beyond(self, account: "Account", amount: int) -> bool:
        """True if the request would hold more than half: it has no end of texts."""
        return bool(account.held) and account.held + amount > self._half

    def _is_free(self, account: "Account", amount: int) -> bool:
        free, of_team = self._capacity - self.used, self._teams.get(account.team, 0)
        if account.held:  # a part is kept for those that end with it, and free what they hold
            return amount <= free and of_team + amount <= self._capacity - self._capacity // 4
        return amount <= free if not of_team else of_team + amount <= free - amount

    def _add(self, account: "Account", amount: int) -> None:
        account.held += amount
        self.used += amount
        metrics.BYTES_IN_FLIGHT.inc(amount)
        of_team = self._teams.get(account.team, 0) + amount
        if of_team:
            self._teams[account.team] = of_team
        else:
            self._teams.pop(account.team, None)

    def _admit(self) -> None:
        """Admit those that fit: first those that hold bytes, then in their order.

        No request passes an earlier one of its team, and none passes that of a team that has nothing.
        """
        held_up: set[str] = set()
        is_blocked = False
        for one in sorted(self._waiting, key=lambda one: not one.account.held):
            account = one.account
            if one.admitted.done():  # it has left
                continue
            if self._is_beyond(account, one.amount):
                one.admitted.set_exception(_too_many())
            elif is_blocked or account.team in held_up or not self._is_free(account, one.amount):
                held_up.add(account.team)
                is_blocked = is_blocked or account.team not in self._teams
            else:
                self._add(account, one.amount)
                one.is_admitted = True
                one.admitted.set_result(None)
        self._waiting = [one for one in self._waiting if not one.admitted.done()]


@dataclass(slots=True, eq=False)
class Account:
    """The bytes, and what else, that one request holds to its end."""

    budget: ByteBudget
    team: str
    held: int = 0
    is_closed: bool = False  # tasks that a request has started may outlive it
    at_end: ExitStack = field(default_factory=ExitStack)  # what else the request holds

    async def charge(self, size: int) -> int:
        """Wait for the memory of a text of `size` bytes; returns the charge. Raises MemoryBusyError."""
        return 0 if self.is_closed else await self.budget.take(self, size * _COPIES)

    def release(self, amount: int) -> None:
        self.budget.give_back(self, min(amount, self.held))

    def shrink(self) -> None:
        """Release all but one copy of each text: the others are stored."""
        self.release(self.held - self.held // _COPIES)

    def close(self) -> None:
        self.is_closed = True
        self.release(self.held)
        self.at_end.close()


@dataclass(slots=True, eq=False)
class _Waiter:
    account: Account
    amount: int
    admitted: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    is_admitted: bool = False


# Tasks outside of requests have none, and are not charged.
ACCOUNT: ContextVar[Account | None] = ContextVar("llm_account", default=None)


async def charge(size: int) -> int:
    """Charge the present request for a text of `size` bytes; returns the charge.

    Raises MemoryBusyError.
    """
    if size > FREE_BYTES and (account := ACCOUNT.get()) is not None:
        return await account.charge(size)
    return 0


def release(charge: int) -> None:
    if charge and (account := ACCOUNT.get()) is not None:
        account.release(charge)


def charge_to(team: str) -> None:
    """Take the present request, which holds nothing yet, for one of this team."""
    if (account := ACCOUNT.get()) is not None and not account.held:
        account.team = team


def shrink() -> None:
    if (account := ACCOUNT.get()) is not None:
        account.shrink()


@asynccontextmanager
async def charged(size: int) -> AsyncIterator[None]:
    """Charge the present request for the time of a block. Raises MemoryBusyError."""
    amount = await charge(size)
    try:
        yield
    finally:
        release(amount)


async def read_within(
    most: int, read: Callable[[], Awaitable[_Value]], size_of: Callable[[_Value], int]
) -> tuple[_Value, int]:
    """Charge for at most `most` bytes and read; returns the value, and the charge for its size.

    Raises MemoryBusyError.
    """
    amount = await charge(most)
    try:
        value = await read()
    except BaseException:
        release(amount)
        raise
    kept = min(amount, size_of(value) * _COPIES)
    release(amount - kept)
    return value, kept


def _busy() -> MemoryBusyError:
    return MemoryBusyError(
        "The texts of other requests fill the memory of this process (LLM_MAX_BYTES_IN_FLIGHT). Try "
        "again later, with fewer large requests at a time.",
        headers={"Retry-After": str(_RETRY_SECONDS)},
    )


def _too_many() -> MemoryBusyError:
    return MemoryBusyError(
        "The texts of this request need more than half of the memory for texts in this process "
        "(LLM_MAX_BYTES_IN_FLIGHT). Send it in parts."
    )
