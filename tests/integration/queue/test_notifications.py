"""The channels that a statement notifies, and those that it leaves alone."""

import asyncio

from app.core.ids import new_id
from app.core.listener import CANCELLED, ENDED, ENQUEUED, WEBHOOKS
from app.queue.finish import AttemptOutcome
from app.results.store import ResultStore
from tests.integration.queue.dispatcher import Dispatcher
from tests.integration.queue.queue_bench import MODEL, Bench, ended, make_result

LAST = "test_last"


class Events:
    """Notifications of the queue's channels since the last look."""

    def __init__(self, bench: Bench) -> None:
        self._connection = bench.connection
        self._events: asyncio.Queue[tuple[str, str]] = asyncio.Queue()

    async def listen(self) -> None:
        for channel in (ENDED, CANCELLED, ENQUEUED, WEBHOOKS, LAST):
            await self._connection.add_listener(
                channel, lambda *event: self._events.put_nowait((event[-2], event[-1]))
            )

    async def take(self) -> list[tuple[str, str]]:
        await self._connection.execute(f"NOTIFY {LAST}")
        events = []
        while (event := await asyncio.wait_for(self._events.get(), 30))[0] != LAST:
            events.append(event)
        return events


async def test_a_statement_notifies_only_what_it_changed(bench: Bench) -> None:
    """An empty notification would have all processes look for everything."""
    events = Events(bench)
    await events.listen()
    running, returned = await bench.add(2)
    assert await events.take() == [(ENQUEUED, MODEL)]
    worker = await bench.worker()
    _, second = await bench.claim(worker)
    assert await events.take() == []
    await bench.queue.cancel("default", id=running)
    assert await events.take() == [(CANCELLED, running.hex)]
    await bench.end(worker, ended(second, AttemptOutcome.RETURNED, output=""))
    assert await events.take() == []
    await bench.queue.cancel("default", id=returned)
    assert await events.take() == [(ENDED, returned.hex)]


async def test_a_statement_that_changes_nothing_notifies_nothing(bench: Bench) -> None:
    events = Events(bench)
    await events.listen()
    missing = make_result(new_context=None, context_id=new_id())
    assert await bench.queue.enqueue([missing]) == [False]
    assert await bench.queue.cancel("default", id=missing.id) == 0
    assert await bench.queue.release([await bench.worker(-1)]) == 0
    assert await bench.queue.expire() == 0
    assert await events.take() == []


async def test_a_deletion_stops_only_a_result_that_runs(bench: Bench) -> None:
    results = ResultStore(bench.database, bench.queue, bench.settings)
    completed, running = await bench.add(2)
    worker = await bench.worker()
    claims = {claim.id: claim for claim in await bench.claim(worker)}
    await bench.end(worker, ended(claims[completed]))
    events = Events(bench)
    await events.listen()
    for identifier in (completed, running):
        await results.delete("default", identifier, force=True)
    assert await events.take() == [(CANCELLED, running.hex), (ENDED, running.hex)]


async def test_only_results_that_wait_are_announced(bench: Bench) -> None:
    events = Events(bench)
    await events.listen()
    bench.queue.dispatcher = dispatcher = Dispatcher(await bench.worker(), room=1)
    await bench.add()
    assert await events.take() == []
    await bench.queue.enqueue([make_result(model_name="n"), make_result(model_name="waits")])
    assert await events.take() == [(ENQUEUED, "waits")]
    assert [claim.model_name for claim in dispatcher.started] == [MODEL, "n"]
