"""P8: CPU per result while what the service holds grows: streams, waiters, rows, queue, workers.

Cost is the CPU time of API, workers and PostgreSQL together, over results that ended meanwhile. The
sizes of one kind take turns. Unless stated otherwise, 64 callers send prompts of one chunk with
`Prefer: wait`, and what grows is idle beside them: streams and long-polls of results that stay in
the queue. Live streams are read from a worker apart, ten chunks each, about 100 results a second
at any number. Rows are ended results of a month. The queue is kept at its length by lists
of 20, of the model that the worker drains it for. Workers share 24 places of a model that takes
0.2 s a result: it is the limit, not the cores.
"""

import asyncio
import contextlib
import math
import statistics
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import dataclass, replace

import asyncpg
import orjson

from bench import progress
from bench.cpu import Sample, measure, tree_seconds
from bench.fill import fill
from bench.idle import held, queue, stream_of, wait_for
from bench.load import Load, connect, post
from bench.plots import Lines, Series
from bench.report import Options, Report, median_ratio
from bench.servers import MODEL, House, Server
from bench.streams import HttpClient, Stream, http_clients, submission

_CALLERS = 64
_MOST_ROUNDS = 3  # there are many sizes
_HELD = (1, 20, 200, 2_000)
_LIVE = (1, 20, 200, 2_000)
_LIVE_A_SECOND = 500  # of a round: no more streams at a time, or opening them takes too long
_LIVE_RATE = 100  # results a second
_LIVE_CHUNKS = 10
_LEAST_ROWS = 1_000
_LEAST_QUEUED = 100
_LIST = 20
_WORKERS = (1, 2, 3, 4)
_PLACES = 24  # of all workers together
_PACED = "Write it. {{chunks=4 delay_ms=50}}"
_WARM_UP_SECONDS = 1.0
_FIRST_SECONDS = 60.0  # until a new worker's first result
_IDLE_SECONDS = 20.0  # longer than what idle streams do now and then
_FLAT = 1.3
_PARTS = ("api", "worker", "postgres")
_COST = "us of CPU per result"
_COLUMNS = ["API us", "worker us", "Postgres us", "together us", "results/s"]

Samples = dict[int, list[Sample]]  # by size


@dataclass(slots=True, frozen=True)
class _Service:
    """An API and its workers on a database of their own."""

    house: House
    database: str
    api: Server
    workers: Sequence[Server]

    async def measure(self, work: Awaitable[Load]) -> Sample:
        """Charge the work with the CPU time of API, all workers and PostgreSQL."""
        pids = {"api": self.api.pid, "postgres": self.house.postgres_pid}
        workers = {f"worker {number}": one.pid for number, one in enumerate(self.workers)}
        sample = await measure(pids | workers, work)
        spent = sum(sample.cpu.pop(name) for name in workers)
        return Sample(sample.load, sample.cpu | {"worker": spent})

    def spent(self) -> float:
        """CPU seconds of all of it until now."""
        pids = [self.api.pid, self.house.postgres_pid, *(one.pid for one in self.workers)]
        return sum(map(tree_seconds, pids))


@contextlib.asynccontextmanager
async def _service(
    house: House, database: str, workers: int = 1, **settings: str
) -> AsyncIterator[_Service]:
    environment = await house.environment(database) | settings
    async with house.api(environment) as api, contextlib.AsyncExitStack() as stack:
        started = [
            await stack.enter_async_context(house.worker(environment)) for _ in range(workers)
        ]
        yield _Service(house, database, api, started)


async def run(house: House, options: Options) -> Report:
    """Grow one thing after another."""
    report = Report("P8", "CPU per result, API and workers and PostgreSQL", _COLUMNS)
    options = replace(options, rounds=min(options.rounds, _MOST_ROUNDS))
    async with _service(house, "bench_p8") as service:
        ids = await queue(house, service.database, max(_HELD))
        streams, polls = [stream_of(one) for one in ids], [wait_for(one) for one in ids]
        lines = [
            _add(
                report, "idle streams", await _grow_held(options, service, "idle streams", streams)
            ),
            _add(report, "waiters", await _grow_held(options, service, "waiters", polls)),
        ]
        report.notes.append(await _idle_cost(service, streams, options))
    async with _service(house, "bench_p8_live", LLM_WORKER_SLOTS="4000") as service:
        live = _add(report, "live streams", await _grow_live(options, service))
    lines.append(_add(report, "rows", await _grow_rows(options, house)))
    lines.append(_add(report, "queued", await _grow_queue(options, house)))
    _add_workers(report, await _grow_workers(options, house))
    report.notes.append(f"{options.rounds} rounds of each size, {options.seconds:g} s each")
    for name, title, series in (
        ("cost", "Cost of a result as other things grow", lines),
        ("live", "Cost of a stream of ten chunks as more are read at a time", [live]),
    ):
        report.plots.append(Lines(name, title, "how many", _COST, series, is_log=True))
    return report


def _sizes(least: int, largest: int) -> list[int]:
    """Powers of ten times the least, and the largest."""
    sizes = [least]
    while sizes[-1] * 10 < largest:
        sizes.append(sizes[-1] * 10)
    return [size for size in sizes if size < largest] + [largest]


# --- idle streams and waiters -------------------------------------------------------------------


async def _grow_held(options: Options, service: _Service, name: str, paths: list[str]) -> Samples:
    samples: Samples = {count: [] for count in _HELD}
    progress.show(f"no {name}, warm-up")
    await _lives(service, _WARM_UP_SECONDS)
    for turn in range(options.rounds):
        for count, taken in samples.items():
            progress.show(f"{count:,} {name}", turn, options.rounds)
            async with held(service.api, paths[:count]):
                taken.append(await _lives(service, options.seconds))
    return samples


def _seconds(options: Options, turn: int) -> float:
    return options.seconds if turn >= 0 else min(options.seconds, _WARM_UP_SECONDS)


async def _lives(service: _Service, seconds: float, prompt: str = "{{chunks=1}} go") -> Sample:
    """Whole lives in a closed loop, as in P2."""
    request = submission(prompt, "Prefer: wait=30\r\n")
    async with connect(service.api.port, _CALLERS) as callers:
        return await service.measure(callers.run(lambda: request, seconds, (200,)))


async def _idle_cost(service: _Service, paths: list[str], options: Options) -> str:
    """Cost of open streams when nothing happens: keep-alives, announcements."""
    seconds = min(_IDLE_SECONDS, 2 * options.rounds * options.seconds)
    progress.show(f"{len(paths):,} idle streams and nothing else, 2 x {seconds:.0f} s")

    async def spent() -> float:
        before = service.spent()
        await asyncio.sleep(seconds)
        return (service.spent() - before) / seconds * 1e6

    nothing = await spent()
    async with held(service.api, paths):
        full = await spent()
    each = (full - nothing) / len(paths)
    return f"An idle stream costs {each:.1f} us of CPU a second (over {seconds:.0f} s)."


# --- live streams -------------------------------------------------------------------------------


async def _grow_live(options: Options, service: _Service) -> Samples:
    most = int(_LIVE_A_SECOND * options.seconds)
    samples: Samples = {min(count, most): [] for count in _LIVE}
    turns = 2 if options.rounds > 2 else 1
    rounds = math.ceil(options.rounds / turns)  # while the streams of a turn are open
    for turn in range(turns):
        for count, taken in samples.items():
            progress.show(f"{count:,} live streams, {rounds} rounds", turn, turns)
            taken += await _live(service, count, rounds, options.seconds)
    return samples


async def _live(service: _Service, count: int, rounds: int, seconds: float) -> list[Sample]:
    """Read so many streams at a time, each over and over; samples once all are open."""
    length = max(0.05, count / _LIVE_RATE)
    delay = length / _LIVE_CHUNKS * 1000
    prompt = f"{{{{clock chunks={_LIVE_CHUNKS} delay_ms={delay:.3f}}}}} go"
    done: list[Stream] = []
    is_over = asyncio.Event()

    async def read_on(number: int, client: HttpClient) -> None:
        await asyncio.sleep(number / count * length)
        while not is_over.is_set():
            done.append(await client.read(prompt, in_one_call=False))

    async def ended() -> Load:
        before = len(done)
        await asyncio.sleep(seconds)
        return Load(len(done) - before, (len(done) - before) / seconds)

    async with http_clients(service.api.port, count) as clients:
        reading = [
            asyncio.create_task(read_on(number, client)) for number, client in enumerate(clients)
        ]
        await asyncio.sleep(length + 1)
        samples = [await service.measure(ended()) for _ in range(rounds)]
        is_over.set()
        await asyncio.gather(*reading)
    return samples


# --- rows ---------------------------------------------------------------------------------------


async def _grow_rows(options: Options, house: House) -> Samples:
    samples: Samples = {count: [] for count in _sizes(_LEAST_ROWS, options.rows)}
    services = []
    async with contextlib.AsyncExitStack() as stack:
        for count in samples:
            progress.show(f"filling a table with {count:,} rows")
            service = await stack.enter_async_context(_service(house, f"bench_p8_rows_{count}"))
            connection = await house.connect(service.database)
            await fill(connection, count)
            await connection.close()
            services.append(service)
        for turn in range(-1, options.rounds):  # the first one warms up
            for service, (count, taken) in zip(services, samples.items(), strict=True):
                progress.show(f"{count:,} rows", turn, options.rounds)
                sample = await _lives(service, _seconds(options, turn))
                if turn >= 0:
                    taken.append(sample)
    return samples


# --- the queue ----------------------------------------------------------------------------------


async def _grow_queue(options: Options, house: House) -> Samples:
    samples: Samples = {count: [] for count in _sizes(_LEAST_QUEUED, options.rows // 10)}
    async with contextlib.AsyncExitStack() as stack:
        environments = {}
        apis = {}
        for count in samples:
            environment = await house.environment(f"bench_p8_queue_{count}")
            environments[count] = environment | {"LLM_WORKER_SLOTS": "32"}
            apis[count] = await stack.enter_async_context(house.api(environments[count]))
        for turn in range(options.rounds):  # each worker is new, and warms up
            for count, taken in samples.items():
                progress.show(f"{count:,} queued", turn, options.rounds)
                environment, api = environments[count], apis[count]
                taken.append(await _drain(house, environment, api, count, options.seconds))
    return samples


async def _drain(
    house: House, environment: dict[str, str], api: Server, count: int, seconds: float
) -> Sample:
    """Have a worker drain the queue while it is filled up to its length again."""
    database = environment["LLM_DATABASE_DB"]
    await _fill_up(house, database, count)
    async with (
        _ended(house, database) as ended,
        http_clients(api.port, 1) as (client,),
        house.worker(environment) as worker,
    ):
        feeding = asyncio.create_task(_feed(client, ended))
        await ended.first()
        await asyncio.sleep(_WARM_UP_SECONDS)

        async def drained() -> Load:
            before = ended.count
            await asyncio.sleep(seconds)
            return Load(ended.count - before, (ended.count - before) / seconds)

        sample = await _Service(house, database, api, [worker]).measure(drained())
        feeding.cancel()
        await asyncio.gather(feeding, return_exceptions=True)
        return sample


async def _fill_up(house: House, database: str, count: int) -> None:
    """The worker drained it further when it stopped."""
    connection = await house.connect(database)
    waiting = await connection.fetchval("SELECT count(*) FROM results WHERE state = 'pending'")
    await connection.close()
    await queue(house, database, count - waiting, MODEL)


async def _feed(client: HttpClient, ended: "_Ended") -> None:
    """Send as many as have ended."""
    item = {"model": MODEL, "content": "{{chunks=1}}", "parameters": {"max_tokens": 16}}
    items = post("/results/", orjson.dumps([item] * _LIST))
    sent = 0
    while True:
        if ended.count >= sent + _LIST:
            await client.ask(items)
            sent += _LIST
        else:
            await asyncio.sleep(0.002)


class _Ended:
    """The number of results that ended since it listens."""

    def __init__(self) -> None:
        self.count = 0
        self._has_begun = asyncio.Event()

    def record(self, *news: object) -> None:
        self.count += str(news[-1]).count(",") + 1
        self._has_begun.set()

    async def first(self) -> None:
        """Wait until one has; raises TimeoutError."""
        async with asyncio.timeout(_FIRST_SECONDS):
            await self._has_begun.wait()


@contextlib.asynccontextmanager
async def _ended(house: House, database: str) -> AsyncIterator[_Ended]:
    ended = _Ended()
    connection: asyncpg.Connection = await house.connect(database)
    await connection.add_listener("llm_ended", ended.record)
    try:
        yield ended
    finally:
        await connection.close()


# --- workers ------------------------------------------------------------------------------------


async def _grow_workers(options: Options, house: House) -> Samples:
    samples: Samples = {count: [] for count in _WORKERS}
    services = []
    async with contextlib.AsyncExitStack() as stack:
        for count in samples:
            progress.show(f"starting {count} workers")
            slots = str(_PLACES // count)
            start = _service(house, f"bench_p8_workers_{count}", count, LLM_WORKER_SLOTS=slots)
            services.append(await stack.enter_async_context(start))
        for turn in range(-1, options.rounds):  # the first one warms up
            for service, (count, taken) in zip(services, samples.items(), strict=True):
                progress.show(f"{count} workers", turn, options.rounds)
                sample = await _lives(service, _seconds(options, turn), _PACED)
                if turn >= 0:
                    taken.append(sample)
    return samples


def _add_workers(report: Report, samples: Samples) -> None:
    together = _add(report, "workers", samples)
    first, *_, last = samples
    rates = [[sample.load.rate for sample in samples[count]] for count in (last, first)]
    report.check(f"{last} workers: rate, of {first}'s", median_ratio(*rates), ">=", 0.9)
    names = {"worker": "workers", "api": "API", "postgres": "PostgreSQL"}
    series = [Series("together", together.x, together.y)]
    series += [Series(name, together.x, _medians(samples, part)) for part, name in names.items()]
    title = f"Cost of a result as more workers share {_PLACES} places"
    report.plots.append(Lines("workers", title, "worker processes", _COST, series))


# --- the report ---------------------------------------------------------------------------------


def _add(report: Report, kind: str, samples: Samples) -> Series:
    """Rows, raw numbers and the verdict of one kind; its line in a plot."""
    for count, taken in samples.items():
        figures = [_median(taken, part) for part in _PARTS]
        rate = statistics.median(sample.load.rate for sample in taken)
        report.rows.append((f"{count:,} {kind}", [*figures, _median(taken, *_PARTS), rate]))
        report.raw[f"{count:,} {kind}"] = [
            {"count": sample.load.count, "rate": sample.load.rate, "cpu": sample.cpu}
            for sample in taken
        ]
    *smaller, largest = samples
    cheapest = min(smaller, key=lambda count: _median(samples[count], *_PARTS))
    growth = median_ratio(
        *([one.microseconds(*_PARTS) for one in samples[count]] for count in (largest, cheapest))
    )
    report.check(f"{largest:,} {kind}, of {cheapest:,}", growth, "<=", _FLAT)
    return Series(kind, list(samples), _medians(samples, *_PARTS))


def _medians(samples: Samples, *parts: str) -> list[float]:
    return [_median(taken, *parts) for taken in samples.values()]


def _median(taken: list[Sample], *parts: str) -> float:
    return statistics.median(sample.microseconds(*parts) for sample in taken)
