"""Work on foreign input leaves the processor to the event loop: its threads have a lower priority."""

import os
import sys
import threading
from collections.abc import Awaitable, Callable

import pytest

from app.core.background_threads import NICENESS, background_threads
from app.core.off_loop import MAX_INLINE_CHARACTERS, off_loop
from app.inference.bounded_threads import BoundedThreads
from app.inference.prompts import _read
from app.infini_gram.indexes import Indexes

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere a niceness is of the whole process"
)


def niceness_of_this_thread() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


async def _off_loop() -> int:
    return await off_loop(MAX_INLINE_CHARACTERS + 1, niceness_of_this_thread)


async def _rendering() -> int:
    threads = BoundedThreads("test", 1)
    return await threads.run(niceness_of_this_thread, seconds=5, queue_seconds=5)


async def _tokenizing() -> int:
    return await _read(1_000_000, niceness_of_this_thread)


async def _index_query() -> int:
    return Indexes((), threads=1)._pool.submit(niceness_of_this_thread).result()


@pytest.mark.parametrize("work", [_off_loop, _rendering, _tokenizing, _index_query])
async def test_work_on_foreign_input_runs_below_the_event_loop(
    work: Callable[[], Awaitable[int]],
) -> None:
    loop = niceness_of_this_thread()
    assert await work() == min(loop + NICENESS, 19)
    assert niceness_of_this_thread() == loop


def test_a_niceness_that_may_not_be_set_stops_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbid(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", forbid)
    with background_threads("test", 1) as pool:
        assert pool.submit(lambda: 7).result() == 7
