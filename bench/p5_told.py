"""P5: from Triton's answer to a waiting client that holds the terminal result, commit included.

The script's last chunk is the time of the step that made it. A client's time runs from there to its holding
the terminal result; what a direct gRPC client needs to see the same chunk is taken off: Triton has
answered then. Baseline: one bare durable commit, an UPDATE of one row, as often as results end.
"""

import asyncio
import contextlib
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import asyncpg
import orjson

from bench import progress
from bench.idle import held, queue, wait_for
from bench.load import get
from bench.plots import Bar, Bars, Goal
from bench.report import Options, Report
from bench.servers import House
from bench.streams import (
    HttpClient,
    Stream,
    at_database,
    direct_client,
    http_clients,
    repeat,
    submission,
)

WAITERS = 2_000
_ACTIVE = 64  # of them, whose results end
_DELAY = 0.025  # seconds before a chunk
_LONE = "{{clock chunks=4 delay_ms=25}}"
_CALM = "{{clock chunks=4 delay_ms=250}}"
_CALM_SECONDS = 1.0
_WARM_UP_SECONDS = 0.5
_PLACES = ("one process", "worker apart")
_ABOVE = dict(zip(_PLACES, (1.0, 1.5), strict=True))  # ms, of a commit

Wait = Callable[[HttpClient, str], Awaitable[Stream]]
Rounds = dict[str, list[list[float]]]  # milliseconds, by arm and round


async def run(house: House, options: Options) -> Report:
    """One caller in turn by every way of waiting, then 2,000 waiters at once."""
    report = Report("P5", "from Triton's answer to its client", ["p50 ms", "p99 ms"])
    databases = dict(zip(_PLACES, ("bench_p5_together", "bench_p5_apart"), strict=True))
    together, apart = [await house.environment(name) for name in databases.values()]
    async with (
        house.api(together, with_worker=True) as one,
        house.api(apart) as api,
        house.worker(apart),
        _commits(house, databases[_PLACES[1]]) as commit,
    ):
        written: dict[str, list[float]] = {}  # ms from the last chunk to the end in the table
        arms: dict[str, Callable[[float], Awaitable[list[float]]]] = {
            "Triton to a direct client": partial(_direct, house),
            "bare commit": commit,
        }
        for place, server in zip(_PLACES, (one, api), strict=True):
            for name, wait in _WAYS.items():
                ends = written.setdefault(f"{name}, {place}", [])
                arms[f"{name}, {place}"] = partial(_lone, server.port, wait, ends)
        rounds: Rounds = {name: [] for name in arms}
        for turn in range(-1, options.rounds):  # the first one warms up
            for name, arm in arms.items():
                progress.show(name, turn, options.rounds)
                found = await arm(options.seconds if turn >= 0 else _WARM_UP_SECONDS)
                if turn >= 0:
                    rounds[name].append(found)
        _add(report, rounds)
        report.notes += [
            f"{name}: {statistics.median(ends):.2f} ms after the last chunk was made its end was "
            "written, not yet committed"
            for name, ends in written.items()
        ]
        for place, server in zip(_PLACES, (one, api), strict=True):
            idle = await queue(house, databases[place], WAITERS - _ACTIVE)
            progress.show(f"{WAITERS:,} waiters, {place}, {options.rounds} rounds")
            many = [await _many(server, idle, options.seconds) for _ in range(options.rounds)]
            _add_many(report, f"{WAITERS:,} waiters, {place}", many)
    return report


async def _long_poll(client: HttpClient, prompt: str) -> Stream:
    stream = Stream(time.monotonic_ns())
    identifier = orjson.loads((await client.ask(submission(prompt))).body)["id"]
    return _held(stream, (await client.ask(get(wait_for(identifier)))).body)


async def _prefer_wait(client: HttpClient, prompt: str) -> Stream:
    stream = Stream(time.monotonic_ns())
    return _held(stream, (await client.ask(submission(prompt, "Prefer: wait=60\r\n"))).body)


async def _events(client: HttpClient, prompt: str) -> Stream:
    return await client.read(prompt, in_one_call=False)


_WAYS: dict[str, Wait] = {
    "long-poll": _long_poll,
    "Prefer: wait": _prefer_wait,
    "events": _events,
}


def _held(stream: Stream, body: bytes) -> Stream:
    """The terminal result is here."""
    stream.ended = time.monotonic_ns()
    result: dict[str, Any] = orjson.loads(body)
    if result["state"] != "completed":
        raise RuntimeError(f"not completed: {result}")
    stream.result = result
    stream.made = [int(chunk) for chunk in result["result"].split()]
    return stream


async def _lone(port: int, wait: Wait, written: list[float], seconds: float) -> list[float]:
    async with http_clients(port, 1) as (client,):
        done = await repeat([partial(wait, client, _LONE)], seconds, 0)
    written += [(at_database(one, "finished_at") - one.made[-1]) / 1e6 for one in done]
    return [_told(stream) for stream in done]


async def _direct(house: House, seconds: float) -> list[float]:
    async with direct_client(house.triton) as client:
        done = await repeat([partial(client.read, _LONE)], seconds, 0)
    return [(stream.seen[-1] - stream.made[-1]) / 1e6 for stream in done]


def _told(stream: Stream) -> float:
    return (stream.ended - stream.made[-1]) / 1e6


@contextlib.asynccontextmanager
async def _commits(
    house: House, database: str
) -> AsyncIterator[Callable[[float], Awaitable[list[float]]]]:
    """A client that commits an UPDATE of one row now and then; milliseconds of each."""
    connection: asyncpg.Connection = await house.connect(database)
    await connection.execute("CREATE TABLE bench_commit (id int PRIMARY KEY, n int)")
    await connection.execute("INSERT INTO bench_commit VALUES (1, 0)")
    update = await connection.prepare("UPDATE bench_commit SET n = n + 1 WHERE id = 1 RETURNING n")

    async def commit(seconds: float) -> list[float]:
        taken = []
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            await asyncio.sleep(_DELAY)  # as cold as those of the service
            began = time.monotonic_ns()
            await update.fetchval()
            taken.append((time.monotonic_ns() - began) / 1e6)
        return taken

    try:
        yield commit
    finally:
        await connection.close()


async def _many(server: Any, idle: list[str], seconds: float) -> list[float]:
    """Results end one after another, while all others wait on."""
    async with (
        held(server, [wait_for(identifier) for identifier in idle]),
        http_clients(server.port, _ACTIVE) as clients,
    ):
        reads = [partial(_long_poll, client, _CALM) for client in clients]
        return [_told(stream) for stream in await repeat(reads, seconds, _CALM_SECONDS)]


def _add(report: Report, rounds: Rounds) -> None:
    medians = {name: [statistics.median(found) for found in rounds[name]] for name in rounds}
    for name, found in rounds.items():
        _row(report, name, found)
    answers, commits = medians["Triton to a direct client"], medians["bare commit"]
    bars = [Bar("bare commit", statistics.median(commits), is_ours=False)]
    for place in _PLACES:
        for way in _WAYS:
            above = statistics.median(
                notified - answer - commit
                for notified, answer, commit in zip(
                    medians[f"{way}, {place}"], answers, commits, strict=True
                )
            )
            report.check(f"{way}, {place}: p50 above one commit", above, "<=", _ABOVE[place], "ms")
            bars.append(Bar(f"{way}, {place}", bars[0].value + above))
    report.plots.append(
        Bars(
            "told",
            "From Triton's answer to the waiting client",
            "ms, median",
            bars,
            Goal(bars[0].value + _ABOVE[_PLACES[0]], f"goal in {_PLACES[0]}: 1 ms above a commit"),
        )
    )
    for way in _WAYS:
        pairs = zip(medians[f"{way}, worker apart"], medians[f"{way}, one process"], strict=True)
        more = statistics.median(two - one for two, one in pairs)
        report.check(f"{way}: two processes above one", more, "<=", 1, "ms")


def _add_many(report: Report, name: str, found: list[list[float]]) -> None:
    _row(report, name, found)
    report.check(f"{name}: p99", report.rows[-1][1][1] or 0.0, "<=", 10, "ms")


def _row(report: Report, name: str, found: list[list[float]]) -> None:
    figures = [
        (statistics.median(one), statistics.quantiles(one, n=100, method="inclusive")[98])
        for one in found
    ]
    report.rows.append((name, [statistics.median(values) for values in zip(*figures, strict=True)]))
    report.raw[name] = [[round(value, 3) for value in one] for one in found]
