"""P8: CPU per result while what the service holds grows: streams, waiters, rows, the queue.

Cost is the CPU time of API, worker and PostgreSQL together, over results that ended meanwhile. The
sizes of one kind take turns. Where nothing else is told, 64 callers send prompts of one chunk with
`Prefer: wait`, and what grows is idle beside them: streams and long-polls of results that stay in
the queue. Live streams are read from a worker apart, ten chunks each, about 100 results a second
whatever their number. Rows are ended results of a month. The queue is kept at its length by lists
of 20, of the model that the worker drains it for.
"""

import asyncio
import contextlib
import statistics
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import asyncpg
import orjson

from bench.cpu import Sample, measure, tree_seconds
from bench.fill import fill
from bench.idle import held, queue, stream_of, wait_for
from bench.load import Load, connect, post
from bench.report import Options, Report, median_ratio
from bench.servers import MODEL, House, Server
from bench.streams import HttpClient, Stream, http_clients, submission

_CALLERS = 64
_HELD = (1, 200, 2_000)
_LIVE = (1, 200, 2_000)
_LIVE_RATE = 100  # results a second
_LIVE_CHUNKS = 10
_LIVE_TURNS = 2
_QUEUED = (100, 100_000)
_LIST = 20
_WARM_UP_SECONDS = 0.5
_IDLE_SECONDS = 20.0  # longer than what idle streams do now and then
_COLUMNS = ["API us", "worker us", "Postgres us", "together us", "results/s"]

Measure = Callable[[float], Awaitable[Sample]]


@dataclass(slots=True, frozen=True)
class _Pair:
    """An API and a worker on a database of their own."""

    house: House
    database: str
    api: Server
    worker: Server

    @property
    def parts(self) -> dict[str, int]:
        return {
            "api": self.api.pid,
            "worker": self.worker.pid,
            "postgres": self.house.postgres_pid,
        }


@contextlib.asynccontextmanager
async def _pair(house: House, database: str, **settings: str) -> AsyncIterator[_Pair]:
    environment = await house.environment(database) | settings
    async with house.api(environment) as api, house.worker(environment) as worker:
        yield _Pair(house, database, api, worker)


async def run(house: House, options: Options) -> Report:
    """Grow one thing after another."""
    report = Report("P8", "CPU per result, API and worker and PostgreSQL", _COLUMNS)
    async with _pair(house, "bench_p8") as pair:
        ids = await queue(house, pair.database, max(_HELD))
        await _grow_held(report, options, pair, "idle streams", [stream_of(one) for one in ids])
        await _grow_held(report, options, pair, "waiters", [wait_for(one) for one in ids])
        report.notes.append(await _idle_cost(pair, [stream_of(one) for one in ids], options))
    async with _pair(house, "bench_p8_live", LLM_WORKER_SLOTS="4000") as pair:
        await _grow_live(report, options, pair)
    await _grow_rows(report, options, house)
    await _grow_queue(report, options, house)
    return report


# --- idle streams and waiters -------------------------------------------------------------------


async def _grow_held(
    report: Report, options: Options, pair: _Pair, name: str, paths: list[str]
) -> None:
    samples: dict[str, list[Sample]] = {f"{count:,} {name}": [] for count in _HELD}
    for turn in range(-1, options.rounds):  # the first one warms up
        for taken, count in zip(samples.values(), _HELD, strict=True):
            async with held(pair.api, paths[:count]):
                sample = await _lives(pair, options.seconds)
            if turn >= 0:
                taken.append(sample)
    _add(report, samples)


async def _lives(pair: _Pair, seconds: float) -> Sample:
    """Whole lives in a closed loop, as in P2."""
    request = submission("{{chunks=1}} say", "Prefer: wait=30\r\n")
    async with connect(pair.api.port, _CALLERS) as callers:
        return await measure(pair.parts, callers.run(lambda: request, seconds, (200,)))


async def _idle_cost(pair: _Pair, paths: list[str], options: Options) -> str:
    """What open streams cost when nothing happens: keep-alives, announcements."""
    seconds = min(_IDLE_SECONDS, 5 * options.seconds)

    async def spent() -> float:
        before = sum(tree_seconds(pid) for pid in pair.parts.values())
        await asyncio.sleep(seconds)
        return (sum(tree_seconds(pid) for pid in pair.parts.values()) - before) / seconds * 1e6

    nothing = await spent()
    async with held(pair.api, paths):
        full = await spent()
    each = (full - nothing) / len(paths)
    return f"An idle stream costs {each:.1f} us of CPU a second (over {seconds:.0f} s)."


# --- live streams -------------------------------------------------------------------------------


async def _grow_live(report: Report, options: Options, pair: _Pair) -> None:
    counts = [min(count, int(700 * options.seconds)) for count in _LIVE]
    samples: dict[str, list[Sample]] = {f"{count:,} live streams": [] for count in counts}
    for _ in range(min(_LIVE_TURNS, options.rounds)):
        for taken, count in zip(samples.values(), counts, strict=True):
            taken += await _live(pair, count, options)
    _add(report, samples)


async def _live(pair: _Pair, count: int, options: Options) -> list[Sample]:
    """Read so many streams at a time, each over and over; samples once all are open."""
    length = max(0.05, count / _LIVE_RATE)
    delay = length / _LIVE_CHUNKS * 1000
    prompt = f"{{{{clock chunks={_LIVE_CHUNKS} delay_ms={delay:.3f}}}}} tell"
    done: list[Stream] = []
    is_over = asyncio.Event()

    async def read_on(number: int, client: HttpClient) -> None:
        await asyncio.sleep(number / count * length)
        while not is_over.is_set():
            done.append(await client.read(prompt, in_one_call=False))

    async def ended(seconds: float) -> Load:
        before = len(done)
        await asyncio.sleep(seconds)
        return Load(len(done) - before, (len(done) - before) / seconds)

    async with http_clients(pair.api.port, count) as clients:
        reading = [
            asyncio.create_task(read_on(number, client)) for number, client in enumerate(clients)
        ]
        await asyncio.sleep(length + 1)
        samples = [await measure(pair.parts, ended(options.seconds)) for _ in range(options.rounds)]
        is_over.set()
        await asyncio.gather(*reading)
    return samples


# --- rows ---------------------------------------------------------------------------------------


async def _grow_rows(report: Report, options: Options, house: House) -> None:
    counts = (1_000, options.rows)
    async with contextlib.AsyncExitStack() as stack:
        samples: dict[str, list[Sample]] = {}
        pairs = []
        for count in counts:
            samples[f"{count:,} rows"] = []
            pairs.append(await stack.enter_async_context(_pair(house, f"bench_p8_rows_{count}")))
            connection = await house.connect(pairs[-1].database)
            await fill(connection, count)
            await connection.close()
        for turn in range(-1, options.rounds):  # the first one warms up
            for pair, taken in zip(pairs, samples.values(), strict=True):
                sample = await _lives(pair, options.seconds)
                if turn >= 0:
                    taken.append(sample)
    _add(report, samples)


# --- the queue ----------------------------------------------------------------------------------


async def _grow_queue(report: Report, options: Options, house: House) -> None:
    counts = [min(count, options.rows // 10) for count in _QUEUED]
    samples: dict[str, list[Sample]] = {f"{count:,} queued": [] for count in counts}
    environments = {}
    for count in counts:
        environment = await house.environment(f"bench_p8_queue_{count}")
        environments[count] = environment | {"LLM_WORKER_SLOTS": "32"}
    for turn in range(-1, options.rounds):  # the first one warms up
        for taken, count in zip(samples.values(), counts, strict=True):
            sample = await _drain(house, environments[count], count, options.seconds)
            if turn >= 0:
                taken.append(sample)
    _add(report, samples)


async def _drain(house: House, environment: dict[str, str], count: int, seconds: float) -> Sample:
    """Have a worker drain the queue while it is filled up to its length again."""
    database = environment["LLM_DATABASE_DB"]
    await _fill_up(house, database, count)
    async with (
        house.api(environment) as api,
        _ended(house, database) as told,
        http_clients(api.port, 1) as (client,),
        house.worker(environment) as worker,
    ):
        feeding = asyncio.create_task(_feed(client, told))
        await asyncio.sleep(_WARM_UP_SECONDS)

        async def drained() -> Load:
            before = told.count
            await asyncio.sleep(seconds)
            return Load(told.count - before, (told.count - before) / seconds)

        sample = await measure(_Pair(house, database, api, worker).parts, drained())
        feeding.cancel()
        await asyncio.gather(feeding, return_exceptions=True)
        return sample


async def _fill_up(house: House, database: str, count: int) -> None:
    """The worker drained it further when it stopped."""
    connection = await house.connect(database)
    waiting = await connection.fetchval("SELECT count(*) FROM results WHERE state = 'pending'")
    await connection.close()
    await queue(house, database, count - waiting, MODEL)


async def _feed(client: HttpClient, told: "_Ended") -> None:
    """Send as many as have ended."""
    item = {"model": MODEL, "content": "{{chunks=1}}", "parameters": {"max_tokens": 16}}
    items = post("/results/", orjson.dumps([item] * _LIST))
    sent = 0
    while True:
        if told.count >= sent + _LIST:
            await client.ask(items)
            sent += _LIST
        else:
            await asyncio.sleep(0.002)


class _Ended:
    """How many results ended since it listens."""

    def __init__(self) -> None:
        self.count = 0

    def hear(self, *news: object) -> None:
        self.count += str(news[-1]).count(",") + 1


@contextlib.asynccontextmanager
async def _ended(house: House, database: str) -> AsyncIterator[_Ended]:
    ended = _Ended()
    connection: asyncpg.Connection = await house.connect(database)
    await connection.add_listener("llm_ended", ended.hear)
    try:
        yield ended
    finally:
        await connection.close()


# --- the report ---------------------------------------------------------------------------------


def _add(report: Report, samples: dict[str, list[Sample]]) -> None:
    parts = ("api", "worker", "postgres")
    costs = {
        label: [sample.microseconds(*parts) for sample in taken] for label, taken in samples.items()
    }
    for label, taken in samples.items():
        figures = [
            statistics.median(sample.microseconds(part) for sample in taken) for part in parts
        ]
        rate = statistics.median(sample.load.rate for sample in taken)
        report.rows.append((label, [*figures, statistics.median(costs[label]), rate]))
        report.raw[label] = [
            {"count": sample.load.count, "rate": sample.load.rate, "cpu": sample.cpu}
            for sample in taken
        ]
    *smaller, largest = costs
    cheapest = min(smaller, key=lambda label: statistics.median(costs[label]))
    growth = median_ratio(costs[largest], costs[cheapest])
    report.check(f"{largest}, of {cheapest}", growth, "<=", 1.3)
