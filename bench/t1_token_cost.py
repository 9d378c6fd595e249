"""T1: CPU of one token of a running result, against a bare client with one gRPC stream a result.

256 results that no client reads, and 64 that a client in another process reads as event streams;
each makes 50 tokens a second. A token costs the CPU time of a part in the middle of the run, less
what that part uses when idle, divided by the tokens that the model made meanwhile. The worker runs in
the API's process, and apart; both and the bare client take turns.
"""

import statistics
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial

from bench import progress, token_load
from bench.plots import Bar, Bars
from bench.report import Options, Report, medians
from bench.servers import House, Server
from bench.streams import Stream, at_database
from bench.token_load import TokenLoad
from bench.windows import Window, cut, idle_shares, record

_UNREAD, _READ = "256 unread", "64 read"
_RESULTS = {_UNREAD: 256, _READ: 64}
_BARE = "bare client"
_TOGETHER, _APART = "one process", "worker apart"
_IDLE_SECONDS = 5.0
# us per token: the process with the worker, Triton with its stub, and API and worker with the streams written
_WORKER = {_UNREAD: 5, _READ: 15}
_TRITON = 10
_WITH_STREAMS = 40
_COLUMNS = [
    "client us", "API us", "worker us", "Triton us", "Postgres us", "tokens/s", "behind ms"
]  # fmt: skip


@dataclass(slots=True, frozen=True)
class _Run:
    """One load: its window, and how long after the model's last token the last result ended."""

    window: Window
    behind: float  # ms

    @property
    def figures(self) -> list[float | None]:
        """See `_COLUMNS`."""
        names = ("client", "api", "worker", "triton", "postgres")
        costs = (
            self.window.microseconds(name) if name in self.window.cpu else None for name in names
        )
        return [*costs, self.window.rate, self.behind]


Arm = Callable[[str, TokenLoad], Awaitable[_Run]]
Runs = dict[tuple[str, str], list[_Run]]  # by load and arm


async def run(house: House, options: Options) -> Report:
    """Measure both loads, arm by arm in turn."""
    report = Report("T1", "CPU of a token of a running result", _COLUMNS)
    together = await house.environment("bench_t1_together")
    apart = await house.environment("bench_t1_apart")
    runs: Runs = {}
    async with (
        house.api(together, with_worker=True) as both,
        house.api(apart) as api,
        house.worker(apart) as worker,
    ):
        others = {"triton": house.triton_pid, "postgres": house.postgres_pid}
        parts = {
            _TOGETHER: {"api": both.pid} | others,
            _APART: {"api": api.pid, "worker": worker.pid} | others,
        }
        progress.show("idle")
        idle = {name: await idle_shares(pids, _IDLE_SECONDS) for name, pids in parts.items()}
        arms: dict[str, Arm] = {
            _BARE: partial(_bare, house, idle[_TOGETHER]),
            _TOGETHER: partial(_ours, both, parts[_TOGETHER], idle[_TOGETHER]),
            _APART: partial(_ours, api, parts[_APART], idle[_APART]),
        }
        for turn in range(options.rounds):
            for kind, results in _RESULTS.items():
                for name, arm in arms.items():
                    progress.show(f"{kind}, {name}", turn, options.rounds)
                    done = await arm(kind, TokenLoad(results, options.seconds))
                    runs.setdefault((kind, name), []).append(done)
    _add(report, runs)
    report.notes += [_idle_text(name, shares) for name, shares in idle.items()]
    return report


async def _bare(house: House, idle: Mapping[str, float], _: str, load: TokenLoad) -> _Run:
    streams, readings = await token_load.bare(house, load)
    window = cut(readings, [one.made for one in streams], idle)
    return _Run(window, _behind(streams, [one.ended for one in streams]))


async def _ours(
    api: Server, parts: Mapping[str, int], idle: Mapping[str, float], kind: str, load: TokenLoad
) -> _Run:
    if kind == _READ:
        streams, readings = await record(parts, token_load.streamed(api.port, load, processes=1))
        ends = [one.ended for one in streams]
    else:
        streams, readings = await record(parts, token_load.unread(api.port, load))
        ends = [at_database(one, "finished_at") for one in streams]
    return _Run(cut(readings, [one.made for one in streams], idle), _behind(streams, ends))


def _behind(streams: list[Stream], ends: list[int]) -> float:
    """Milliseconds from a stream's last token to its end, the longest."""
    return max(end - one.made[-1] for one, end in zip(streams, ends, strict=True)) / 1e6


def _add(report: Report, runs: Runs) -> None:
    for (kind, name), done in runs.items():
        report.rows.append((f"{kind}, {name}", medians([one.figures for one in done])))
        report.raw[f"{kind}, {name}"] = [asdict(one) for one in done]
    for kind in _RESULTS:
        for name in (_TOGETHER, _APART):
            _judge(report, kind, name, [one.window for one in runs[kind, name]])
        report.plots.append(_plot(kind, runs))


def _judge(report: Report, kind: str, name: str, windows: list[Window]) -> None:
    """Add the checks of one load; the API's process has no figure of its worker alone."""
    what = f"{kind}, {name}"
    if name == _APART:
        report.check(f"{what}: worker", _cost(windows, "worker"), "<=", _WORKER[kind], "us")
        ours = _cost(windows, "api", "worker")
    else:
        ours = _cost(windows, "api")
    bound = _WORKER[kind] if kind == _UNREAD else _WITH_STREAMS
    report.check(f"{what}: API and worker", ours, "<=", bound, "us")
    if kind == _UNREAD:
        report.check(f"{what}: Triton", _cost(windows, "triton"), "<=", _TRITON, "us")


def _cost(windows: list[Window], *parts: str) -> float:
    return statistics.median(window.microseconds(*parts) for window in windows)


def _plot(kind: str, runs: Runs) -> Bars:
    bars = []
    for name, label in ((_BARE, "client"), (_TOGETHER, "API"), (_APART, "API, worker")):
        windows = [one.window for one in runs[kind, name]]
        own = [part for part in windows[0].cpu if part in ("client", "api", "worker")]
        bars.append(Bar(f"{name}: {label}", _cost(windows, *own), is_ours=name != _BARE))
        bars.append(Bar(f"{name}: Triton", _cost(windows, "triton"), is_ours=name != _BARE))
    title = f"CPU of a token, {kind.replace(' ', ' results, ')}"
    return Bars(kind.replace(" ", "-"), title, "us of CPU per token", bars)


def _idle_text(name: str, shares: Mapping[str, float]) -> str:
    used = ", ".join(f"{part} {1000 * share:.1f}" for part, share in shares.items())
    return f"{name}, idle, ms of CPU per second (subtracted above): {used}"
