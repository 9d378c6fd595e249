"""SCALING: what limits at 1, 10 and 100 hosts: simulated, by a model that is held to this machine first.

The cost of the service's statements is measured one by one; the other cost of a request and a generation,
at two closed loops (2 and 32 callers, worker apart). The simulation then runs further loops, next to the
real ones: other numbers of callers, one process, two workers, one and two Triton servers of eight places.
Only then it runs layouts that this machine does not have: more hosts before one PostgreSQL. Its
cores are assumed to be as fast as these, and PostgreSQL to use all of its own equally well.
"""

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import asdict, replace

from bench.calibration import CHUNKS, Loops, Measured, calibrate
from bench.fleet import second_server
from bench.report import Options, Report
from bench.servers import House
from bench.service_model import Costs, Layout, Outcome, simulate
from bench.statements import Notified, Statement, Stored, measure_notifications, measure_statements

_CALLERS = (1, 8, 64, 256)
_SIMULATED_SECONDS = 2.0
_TURNS = 3
_PLACES = 8
_SLOW_PROMPT = "Write it. {{chunks=10 delay_ms=50}}"
_SLOW_SECONDS = 4.0
_LONE = "one process, 1 callers"
_LEAST, _MOST = 0.75, 1.33
_DAY = 86_400
_DIGESTING = 0.5  # of the time, as `app.results.indexer` does it
_PER_DAY = 1e9
_COLUMNS = [
    "results/s", "simulated", "p50 ms", "simulated ", "a process", "cores", "PostgreSQL", "lock", "log",
]  # fmt: skip

# Hosts, cores and processes of each, cores of PostgreSQL's host, callers of a process.
_HOSTS = (
    (1, 2, 2, 64),
    (1, 16, 4, 64),
    (1, 16, 16, 64),
    (10, 2, 16, 64),
    (10, 16, 16, 32),
    (10, 16, 64, 32),
    (10, 16, 16, 128),
    (100, 2, 64, 32),
)


async def run(house: House, options: Options) -> Report:
    """Measure, fit, compare, extrapolate."""
    report = Report("SCALING", "measured, simulated; shares of the capacity", _COLUMNS)
    statements, stored = await measure_statements(house, min(options.rounds, _TURNS))
    notified = await measure_notifications(house)
    costs, pairs = await _measure(house, options, statements, notified, report)
    with _no_collections():
        ratios = [_hold(report, name, costs, *pair) for name, pair in pairs.items()]
        _extrapolate(report, costs)
    for what, place in (("results/s", 0), ("p50", 1)):
        found = [ratio[place] for ratio in ratios]
        report.check(f"{what}, simulated : measured, the least", min(found), ">=", _LEAST)
        report.check(f"{what}, simulated : measured, the largest", max(found), "<=", _MOST)
    _describe(report, costs, stored)
    report.raw["costs"] = asdict(costs)
    report.raw["stored"] = asdict(stored)
    return report


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """A simulation makes millions of objects, and no cycles that are worth looking for."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


# --- what is here ---------------------------------------------------------------------------------

_Pair = tuple[Measured, Layout, float]  # and how long it was measured


async def _measure(
    house: House,
    options: Options,
    statements: dict[str, Statement],
    notified: Notified,
    report: Report,
) -> tuple[Costs, dict[str, _Pair]]:
    """The costs, and loops that they were not made of, with their layouts."""
    apart, together = [await house.environment(f"bench_scaling_{name}") for name in ("2", "1")]
    pairs: dict[str, _Pair] = {}
    async with (
        house.api(apart) as api,
        house.worker(apart) as worker,
        house.api(together, with_worker=True) as both,
    ):
        loops, of_one = Loops(house, api, [worker], options), Loops(house, both, [], options)
        await loops.rest()
        await of_one.rest()
        costs, fitted = await calibrate(loops, statements, notified)
        report.raw["fitted"] = {name: asdict(loop) for name, loop in fitted.items()}
        for callers in _CALLERS:
            for name, found, workers in (("worker apart", loops, 1), ("one process", of_one, 0)):
                layout = Layout(callers=callers, workers=workers)
                measured = await found.measure(callers)
                pairs[f"{name}, {callers} callers"] = (measured, layout, _SIMULATED_SECONDS)
        slow = await of_one.measure(1, _SLOW_PROMPT)
        async with house.worker(apart) as other:
            measured = await Loops(house, api, [worker, other], options, loops.idle).measure(64)
        layout = Layout(callers=64, workers=2)
        pairs["two workers, 64 callers"] = (measured, layout, _SIMULATED_SECONDS)
    # A lone caller's longer wait is the script's own time.
    pairs |= await _measure_places(house, options, slow.p50 - pairs[_LONE][0].p50)
    return costs, pairs


async def _measure_places(house: House, options: Options, seconds: float) -> dict[str, _Pair]:
    """One and two Triton servers of eight places, which are the limit; each result takes so long."""
    pairs: dict[str, _Pair] = {}
    async with second_server(house) as second:
        for count, servers in ((1, house.triton_address), (2, f"{house.triton_address},{second}")):
            environment = await house.environment(f"bench_scaling_places_{count}")
            environment |= {"LLM_WORKER_SLOTS": str(_PLACES), "TRITON_GRPC_SERVICE": servers}
            async with house.api(environment, with_worker=True) as api:
                loops = Loops(house, api, [], replace(options, rounds=1))
                measured = await loops.measure(64, _SLOW_PROMPT, _SLOW_SECONDS, warm_up=False)
            layout = Layout(callers=64, slots=count * _PLACES, service_seconds=seconds)
            window = min(options.seconds, _SLOW_SECONDS)
            pairs[f"{count} x {_PLACES} places, 64 callers"] = (measured, layout, window)
    return pairs


def _hold(
    report: Report, name: str, costs: Costs, measured: Measured, layout: Layout, seconds: float
) -> tuple[float, float]:
    """Simulate what was measured, beside the same other programs; the ratios of rate and p50."""
    found = simulate(costs, replace(layout, others=measured.others), seconds)
    _add(report, name, found, measured)
    return found.rate / measured.rate, found.p50 / measured.p50


def _add(report: Report, name: str, found: Outcome, measured: Measured | None = None) -> None:
    names = ("one process", "cores", "PostgreSQL's cores", "lock of notifying commits", "log")
    real = (measured.rate, measured.p50 * 1000) if measured else (None, None)
    shares = [found.busy.get(part) for part in names]
    report.rows.append((name, [real[0], found.rate, real[1], found.p50 * 1000, *shares]))
    report.raw[name] = {"measured": asdict(measured) if measured else None} | {
        part: getattr(found, part)
        for part in ("rate", "p50", "busy", "used", "batches", "spent", "woken", "notifying")
    }


# --- extrapolation --------------------------------------------------------------------------------


def _extrapolate(report: Report, costs: Costs) -> None:
    """Hosts of API processes with a worker in each, one for each core, before one PostgreSQL."""
    for hosts, cores, postgres_cores, callers in _HOSTS:
        name = f"{hosts} x {cores} cores, PostgreSQL {postgres_cores}, {callers} callers a process"
        _add(report, name, _simulate_hosts(costs, hosts, cores, postgres_cores, callers))
    hosts, cores, postgres_cores, callers = 10, 16, 16, 32
    found = _simulate_hosts(costs, hosts, cores, postgres_cores, callers, has_relay=True)
    name = f"{hosts} x {cores} cores, PostgreSQL {postgres_cores}, {callers} callers, a listener a host"
    _add(report, name, found)


def _simulate_hosts(
    costs: Costs,
    hosts: int,
    cores: int,
    postgres_cores: int,
    callers: int,
    *,
    has_relay: bool = False,
) -> Outcome:
    processes = hosts * cores
    layout = Layout(
        callers=processes * callers,
        apis=processes,
        api_cores=cores,
        apis_of_host=cores,
        postgres_cores=postgres_cores,
        is_one_host=False,
        has_relay=has_relay,
    )
    return simulate(costs, layout, *_WINDOWS[processes > _MANY_PROCESSES])


_MANY_PROCESSES = 100
_WINDOWS = {False: (0.5, 0.5), True: (0.5, 1.0)}  # simulated seconds, and those before


def _describe(report: Report, costs: Costs, stored: Stored) -> None:
    """Figures outside the columns: those of a day, and the cost of a result."""
    rate = _PER_DAY / _DAY
    report.notes += [
        f"The input of the model: {_microseconds(costs)}.",
        "CPU time of statements, process and PostgreSQL, us: "
        + "; ".join(_of_statement(name, one) for name, one in costs.statements.items()),
        f"A notification costs PostgreSQL {costs.notified.postgres * 1e6:.1f} us for each connection that "
        f"listens, and the notified process {costs.notified.process.each * 1e6:.1f} us and "
        f"{costs.notified.process.row * 1e6:.2f} us an id. Sixteen connections commit "
        f"{costs.notified.commits:,.0f} times a second while they notify, "
        f"{costs.notified.unlocked_commits:,.0f} while they insert a row.",
        f"Each further chunk of text (a token of a real model) costs its worker {costs.chunk * 1e6:.0f} us "
        f"(mean of {CHUNKS - 1}): at 1e9 results a day, {rate * costs.chunk:.1f} cores for each token "
        "that an answer has.",
        f"A prompt of 1,000 characters with an answer of 2,000: {stored.table_bytes:,.0f} bytes of tables and "
        f"indexes; of log {stored.log_bytes:,.0f} bytes until it has ended and "
        f"{stored.digest_log_bytes:,.0f} to make it searchable, which takes PostgreSQL "
        f"{stored.digest * 1e6:,.0f} us: at most {_DIGESTING / stored.digest:,.0f} results a second for each "
        "process with a worker, which rests as long as it works. 1e9 a day: "
        f"{stored.table_bytes * _PER_DAY / 1e12:.1f} TB of tables, "
        f"{(stored.log_bytes + stored.digest_log_bytes) * rate / 1e6:,.0f} MB of log a second.",
    ]


def _microseconds(costs: Costs) -> str:
    named = {
        "request": costs.request,
        "generation": costs.generation,
        "Triton": costs.triton,
        "load generator": costs.caller,
        "PostgreSQL without statements": costs.digest,
        "commit": costs.commit,
        "the lock's change of hands": costs.turn,
        "hand-over": costs.hand_over,
    }
    wakes = ", ".join(f"{part} {seconds * 1e6:.0f}" for part, seconds in costs.wake.items())
    costs_text = ", ".join(f"{name} {seconds * 1e6:.0f} us" for name, seconds in named.items())
    return f"{costs_text}; a wake-up, us: {wakes}"


def _of_statement(name: str, statement: Statement) -> str:
    process, postgres = statement.process, statement.postgres
    return (
        f"{name} {process.each * 1e6:.0f} + {process.row * 1e6:.1f} a row, "
        f"{postgres.each * 1e6:.0f} + {postgres.row * 1e6:.1f} a row, "
        f"{statement.log_bytes.each + statement.log_bytes.row:,.0f} bytes of log"
    )
