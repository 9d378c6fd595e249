"""P4: the first token and the tokens after it, through the service and from Triton directly.

The chunks of the script hold the times of the steps that made them. Direct: one gRPC stream. Through us: a POST and
the GET of its stream (or a POST that is the stream, where the service has it), with the worker in
the API's process and apart. All take turns.
"""

import contextlib
import math
import statistics
from collections.abc import AsyncIterator, Sequence
from functools import partial

from bench import progress
from bench.plots import Bar, Bars, Goal
from bench.report import Options, Report, median_ratio
from bench.servers import House
from bench.streams import (
    Read,
    Stream,
    at_database,
    direct_client,
    http_clients,
    posts_stream,
    repeat,
)

_DIRECT = "direct"
_FEW, _MANY = 1, 64
# Chunks, and milliseconds before each of them: where one stream is measured it is short.
_SCRIPTS = {_FEW: (10, 20), _MANY: (40, 50)}
_WARM_UP_SECONDS = 0.5
_IN_ONE_CALL = ", one call"
_PLACES = ("one process", "worker apart")
_ADDED = dict(zip(_PLACES, (1, 2), strict=True))  # ms to the first token, and to
_LATER = dict(zip(_PLACES, (0.5, 1), strict=True))  # a chunk's way
_COLUMNS = ["first token ms", "p99", "chunk's way ms", "p99 ", "between chunks ms", "tokens/s"]
_STAGES = [
    "POST answered",
    "claimed",
    "made by the model",
    "seen by the client",
]

Rounds = dict[str, list[list[Stream]]]  # by arm; streams by round


async def run(house: House, options: Options) -> Report:
    """Measure one stream at a time, and 64."""
    report = Report("P4", "streams, through the service and direct", _COLUMNS)
    async with _arms(house) as arms:
        for streams, (chunks, delay) in _SCRIPTS.items():
            prompt = f"{{{{clock chunks={chunks} delay_ms={delay}}}}} go"
            length = chunks * delay / 1000
            rounds: Rounds = {name: [] for name in arms}
            for turn in range(-1, options.rounds):  # the first one warms up
                seconds = options.seconds if turn >= 0 else _WARM_UP_SECONDS
                for name, arm in arms.items():
                    progress.show(f"{streams} streams, {name}", turn, options.rounds)
                    async with arm(streams, prompt) as reads:
                        done = await repeat(reads, seconds, length)
                    if turn >= 0:
                        rounds[name].append(done)
            _add(report, streams, delay, rounds)
    return report


class _Arm:
    """One way to the model: a context of so many readers of a prompt."""

    def __init__(self, house: House, port: int = 0, *, in_one_call: bool = False) -> None:
        self._house, self._port, self._in_one_call = house, port, in_one_call

    @contextlib.asynccontextmanager
    async def __call__(self, streams: int, prompt: str) -> AsyncIterator[list[Read]]:
        if self._port:
            async with http_clients(self._port, streams) as clients:
                yield [
                    partial(client.read, prompt, in_one_call=self._in_one_call)
                    for client in clients
                ]
        else:
            async with direct_client(self._house.triton) as client:
                yield [partial(client.read, prompt)] * streams


@contextlib.asynccontextmanager
async def _arms(house: House) -> AsyncIterator[dict[str, _Arm]]:
    together = await house.environment("bench_p4_together")
    apart = await house.environment("bench_p4_apart")
    async with (
        house.api(together, with_worker=True) as one,
        house.api(apart) as api,
        house.worker(apart),
    ):
        arms = {_DIRECT: _Arm(house)}
        for name, port in zip(_PLACES, (one.port, api.port), strict=True):
            arms[name] = _Arm(house, port)
            if await posts_stream(port):
                arms[f"{name}{_IN_ONE_CALL}"] = _Arm(house, port, in_one_call=True)
        yield arms


def _add(report: Report, streams: int, delay: float, rounds: Rounds) -> None:
    label = "1 stream" if streams == 1 else f"{streams} streams"
    figures = {name: [_figures(done) for done in rounds[name]] for name in rounds}
    for name, found in figures.items():
        medians = [statistics.median(values) for values in zip(*found, strict=True)]
        report.rows.append((f"{label}, {name}", medians))
        report.raw[f"{label}, {name}"] = [dict(zip(_COLUMNS, one, strict=True)) for one in found]
        report.raw[f"{label}, {name}: first tokens"] = [
            [round(_first(stream), 3) for stream in done] for done in rounds[name]
        ]
        stages = _stages([stream for done in rounds[name] for stream in done], delay)
        report.raw[f"{label}, {name}: stages ms"] = stages
        report.notes.append(f"{label}, {name}: " + _told(stages))
    report.plots.append(_plot(label, figures))
    direct = figures.pop(_DIRECT)
    for name, found in figures.items():
        what = f"{label}, {name}"
        place = name.removesuffix(_IN_ONE_CALL)
        added = statistics.median(a[0] - b[0] for a, b in zip(found, direct, strict=True))
        report.check(f"{what}: added to the first token", added, "<=", _ADDED[place], "ms")
        later = statistics.median(a[2] - b[2] for a, b in zip(found, direct, strict=True))
        report.check(f"{what}: added to a chunk's way", later, "<=", _LATER[place], "ms")
        if streams > 1:
            rate = median_ratio([one[5] for one in found], [one[5] for one in direct])
            report.check(f"{what}: tokens/s, of direct", rate, ">=", 0.95)


def _plot(label: str, figures: dict[str, list[list[float]]]) -> Bars:
    firsts = {name: statistics.median(one[0] for one in found) for name, found in figures.items()}
    direct = firsts[_DIRECT]
    added = _ADDED[_PLACES[0]]
    goal = Goal(direct + added, f"goal in {_PLACES[0]}: {added} ms above direct")
    bars = [Bar(name, value, is_ours=name != _DIRECT) for name, value in firsts.items()]
    name = f"first-token-{label.split()[0]}"
    return Bars(name, f"The first token, {label}", "ms from the request, median", bars, goal)


def _figures(done: list[Stream]) -> list[float]:
    """One round: see `_COLUMNS`."""
    firsts = sorted(_first(stream) for stream in done)
    ways = sorted(
        (seen - made) / 1e6
        for stream in done
        for made, seen in zip(stream.made[1:], stream.seen[1:], strict=True)
    )
    gaps = [
        (later - earlier) / 1e6
        for stream in done
        for earlier, later in zip(stream.seen, stream.seen[1:], strict=False)
    ]
    return [
        statistics.median(firsts),
        _percentile(firsts, 0.99),
        statistics.median(ways),
        _percentile(ways, 0.99),
        statistics.median(gaps),
        _tokens_per_second(done),
    ]


def _tokens_per_second(done: list[Stream]) -> float:
    """While all readers were at work: from the first end to the last beginning."""
    begins = min(stream.ended for stream in done)
    ends = max(stream.began for stream in done)
    if ends <= begins:
        return 0.0
    count = sum(begins < seen <= ends for stream in done for seen in stream.seen)
    return count / (ends - begins) * 1e9


def _first(stream: Stream) -> float:
    return (stream.seen[0] - stream.began) / 1e6


def _stages(done: list[Stream], delay: float) -> dict[str, float]:
    """Medians, in ms from the request to each stage; the script's own delay is left out."""
    found: dict[str, list[float]] = {stage: [] for stage in _STAGES}
    for stream in done:
        if stream.result:
            started = at_database(stream, "started_at")
            found["POST answered"].append((stream.accepted - stream.began) / 1e6)
            found["claimed"].append((started - stream.began) / 1e6)
        found["made by the model"].append((stream.made[0] - stream.began) / 1e6 - delay)
        found["seen by the client"].append(_first(stream) - delay)
    return {stage: statistics.median(values) for stage, values in found.items() if values}


def _told(stages: dict[str, float]) -> str:
    return ", ".join(f"{stage} {milliseconds:.2f} ms" for stage, milliseconds in stages.items())


def _percentile(ordered: Sequence[float], share: float) -> float:
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
