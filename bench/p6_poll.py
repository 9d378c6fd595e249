"""P6: GET /results/{id}, against a fixed answer and against one SELECT per poll."""

import random
import statistics
from collections.abc import Callable

from bench import progress
from bench.cpu import Sample, measure
from bench.fill import fill
from bench.load import connect, get
from bench.p1_submit import figures
from bench.report import Options, Report, median_ratio
from bench.servers import House, Server

CALLERS = 64
_ROWS = 10_000
_WARM_UP_SECONDS = 1.0


async def run(house: House, options: Options) -> Report:
    """Poll random results, most of them completed, with 300 characters of text each."""
    environment = await house.environment("bench_p6")
    connection = await house.connect("bench_p6")
    await fill(connection, _ROWS)
    ids = [row["id"] for row in await connection.fetch("SELECT id FROM results")]
    await connection.close()
    samples: dict[str, list[Sample]] = {"poll": [], "select": [], "fixed": []}
    async with house.api(environment) as api, house.baselines(environment) as bare:
        fixed = get("/fixed")
        arms: dict[str, tuple[Server, Callable[[], bytes]]] = {
            "poll": (api, _random([get(f"/results/{identifier}") for identifier in ids])),
            "select": (bare, _random([get(f"/select/{identifier}") for identifier in ids])),
            "fixed": (bare, lambda: fixed),
        }
        for turn in range(-1, options.rounds):  # the first one warms up
            seconds = options.seconds if turn >= 0 else _WARM_UP_SECONDS
            for name, (server, next_request) in arms.items():
                progress.show(name, turn, options.rounds)
                parts = {"server": server.pid, "postgres": house.postgres_pid}
                async with connect(server.port, CALLERS) as callers:
                    sample = await measure(parts, callers.run(next_request, seconds, (200,)))
                if turn >= 0:
                    samples[name].append(sample)
    return _report(samples)


def _random(requests: list[bytes]) -> Callable[[], bytes]:
    return lambda: random.choice(requests)


def _report(samples: dict[str, list[Sample]]) -> Report:
    report = Report(
        "P6",
        "polls by id",
        ["requests/s", "server us", "Postgres us", "p50 ms", "p99 ms"],
    )
    names = {"poll": "GET result", "select": "one SELECT each", "fixed": "fixed answer"}
    for name, text in names.items():
        report.rows.append((f"{text}, {CALLERS} callers", figures(samples[name])))
        report.raw[name] = [
            {"count": sample.load.count, "rate": sample.load.rate, "cpu": sample.cpu}
            for sample in samples[name]
        ]
    alone = [sample.microseconds("server") for sample in samples["poll"]]
    report.check("polls per CPU second of the API", 1e6 / statistics.median(alone), ">=", 12_000)
    both = [sample.microseconds("server", "postgres") for sample in samples["poll"]]
    each = [sample.microseconds("server", "postgres") for sample in samples["select"]]
    report.check("rate per CPU second of one SELECT each", median_ratio(each, both), ">=", 2.0)
    return report
