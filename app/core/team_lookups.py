"""Lookups of names for calls to clients' URLs, on threads that are divided by team."""

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import httpx

from app.core.url_guard import Lookup, UrlRules, resolve

_T = TypeVar("_T")
_THREADS = 32
# A lookup cannot be stopped: its thread may outlast its call by a minute.
_LOOKUPS_OF_TEAM = 4


class TeamLookups:
    """Resolves names to checked addresses, four at a time for a team."""

    def __init__(self, name: str, lookup: Lookup) -> None:
        self._lookup = lookup
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix=name)
        # By team, as long as one of its calls or lookups runs.
        self._permits: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def resolve(self, team_id: str, url: httpx.URL, rules: UrlRules) -> list[str]:
        """Look the name up, with a permit of the team that returns when the lookup's thread is free.

        Raises what `url_guard.resolve` raises.
        """
        permits = self._permits.get(team_id)
        if permits is None:
            permits = self._permits[team_id] = asyncio.Semaphore(_LOOKUPS_OF_TEAM)
        await permits.acquire()
        executor = _Permitted(self._threads, permits, asyncio.get_running_loop())
        return await resolve(url, self._lookup, executor, rules)

    def close(self) -> None:
        """Drop the lookups in line, and wait for none."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def join(self) -> None:
        self._threads.shutdown()


@dataclass(slots=True, frozen=True)
class _Permitted(Executor):
    """Runs one piece of work, and releases its permit when the thread has ended it, or drops it."""

    pool: Executor
    permits: asyncio.Semaphore
    loop: asyncio.AbstractEventLoop

    def submit(self, fn: Callable[..., _T], /, *args: Any, **kwargs: Any) -> Future[_T]:
        running = self.pool.submit(fn, *args, **kwargs)
        running.add_done_callback(self._release)
        return running

    def _release(self, _: object) -> None:
        with contextlib.suppress(RuntimeError):  # the process stops: its event loop is closed
            self.loop.call_soon_threadsafe(self.permits.release)
