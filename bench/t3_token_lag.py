"""T3: a token's way from the model to its reader, at 100, 250 and 500 live streams of one API process.

Each stream has 50 tokens a second, whose text is the time of the step that made them. Raw-socket
readers in processes of their own note the arrivals. Counted are the tokens that the model made
while all streams had begun and none had ended. The worker runs in the API's process, and apart; the
layouts and the numbers of streams take turns.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from bench import progress, token_load
from bench.plots import Goal, Lines, Series
from bench.report import Options, Report, medians
from bench.servers import House, Server
from bench.streams import Stream
from bench.token_load import TokenLoad
from bench.windows import Window, cut, record

_STREAMS = (100, 250, 500)
_READERS = 4  # processes
_SLOTS = {"LLM_WORKER_SLOTS": str(2 * max(_STREAMS))}
_TOGETHER, _APART = "one process", "worker apart"
_P99 = 100  # ms
_RATE_SHARE = 0.95  # of 50 tokens a second and stream
_COLUMNS = [
    "p50 ms", "p99 ms", "max ms", "tokens/s", "API us", "worker us", "Triton us", "Postgres us"
]  # fmt: skip


@dataclass(slots=True, frozen=True)
class Lags:
    """Milliseconds from the model to the reader, and the tokens that arrived per second."""

    median: float
    p99: float
    longest: float
    rate: float


@dataclass(slots=True, frozen=True)
class _Run:
    lags: Lags
    window: Window

    @property
    def figures(self) -> list[float | None]:
        """See `_COLUMNS`."""
        costs = (
            self.window.microseconds(name) if name in self.window.cpu else None
            for name in ("api", "worker", "triton", "postgres")
        )
        return [self.lags.median, self.lags.p99, self.lags.longest, self.lags.rate, *costs]


Runs = dict[tuple[int, str], list[_Run]]  # by streams and layout


async def run(house: House, options: Options) -> Report:
    """Measure each number of streams, both layouts in turn."""
    report = Report("T3", "lag of a token, live streams of one API process", _COLUMNS)
    together = await house.environment("bench_t3_together") | _SLOTS
    apart = await house.environment("bench_t3_apart") | _SLOTS
    runs: Runs = {}
    async with (
        house.api(together, with_worker=True) as both,
        house.api(apart) as api,
        house.worker(apart) as worker,
    ):
        others = {"triton": house.triton_pid, "postgres": house.postgres_pid}
        arms = {
            _TOGETHER: (both, {"api": both.pid} | others),
            _APART: (api, {"api": api.pid, "worker": worker.pid} | others),
        }
        for turn in range(options.rounds):
            for streams in _STREAMS:
                for name, (server, parts) in arms.items():
                    progress.show(f"{streams} streams, {name}", turn, options.rounds)
                    done = await _measure(server, parts, TokenLoad(streams, options.seconds))
                    runs.setdefault((streams, name), []).append(done)
    _add(report, runs)
    return report


async def _measure(api: Server, parts: Mapping[str, int], load: TokenLoad) -> _Run:
    streams, readings = await record(parts, token_load.streamed(api.port, load, _READERS))
    window = cut(readings, [one.made for one in streams], {})
    return _Run(lags_of(streams, window.began, window.ended), window)


def lags_of(streams: Sequence[Stream], began: int, ended: int) -> Lags:
    """Lags of the tokens made in this time, and the rate of those that arrived in it."""
    lags = sorted(
        (seen - made) / 1e6
        for one in streams
        for made, seen in zip(one.made, one.seen, strict=True)
        if began <= made < ended
    )
    arrived = sum(began <= seen < ended for one in streams for seen in one.seen)
    p99 = lags[math.ceil(0.99 * len(lags)) - 1]
    return Lags(statistics.median(lags), p99, lags[-1], arrived / (ended - began) * 1e9)


def _add(report: Report, runs: Runs) -> None:
    for (streams, name), done in runs.items():
        report.rows.append((f"{streams} streams, {name}", medians([one.figures for one in done])))
        report.raw[f"{streams} streams, {name}"] = [asdict(one) for one in done]
    most = max(_STREAMS)
    nominal = TokenLoad(most, 0).nominal_rate
    for name in (_TOGETHER, _APART):
        lags = [one.lags for one in runs[most, name]]
        p99 = statistics.median(one.p99 for one in lags)
        report.check(f"{most} streams, {name}: p99", p99, "<=", _P99, "ms")
        rate = statistics.median(one.rate for one in lags)
        what = f"{most} streams, {name}: tokens/s, of {nominal:,.0f}"
        report.check(what, rate / nominal, ">=", _RATE_SHARE)
    report.plots.append(_plot(runs))


def _plot(runs: Runs) -> Lines:
    series = []
    for name in (_TOGETHER, _APART):
        lags = {count: [one.lags for one in runs[count, name]] for count in _STREAMS}
        middle = [statistics.median(one.median for one in found) for found in lags.values()]
        high = [statistics.median(one.p99 for one in found) for found in lags.values()]
        series += [Series(f"{name}, p50", _STREAMS, middle), Series(f"{name}, p99", _STREAMS, high)]
    goal = Goal(_P99, f"goal for p99 at {max(_STREAMS)}: {_P99} ms")
    return Lines("lag", "A token's way to its reader", "live streams", "ms", series, goal)
