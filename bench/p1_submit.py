"""P1: durable submissions, against a route that only validates and against one INSERT each."""

import statistics
from itertools import cycle

import httpx

from bench import progress
from bench.cpu import Sample, measure
from bench.load import HOST, connect, post
from bench.plots import Bar, Bars, Goal
from bench.report import Options, Report, median_ratio
from bench.servers import MODEL, House, Server

CALLERS = 64
BODY = b'{"parameters": {"max_tokens": 16, "temperature": 0}}'
_CONTEXTS = 100
_SHARE = 0.6  # of the validating route's rate per CPU second
_WARM_UP_SECONDS = 1.0


async def run(house: House, options: Options) -> Report:
    """Measure; no worker runs, so the queue only grows."""
    environment = await house.environment("bench_p1")
    async with house.api(environment) as api, house.baselines(environment) as bare:
        contexts = await save_contexts(api, _CONTEXTS)
        paths = {
            "send": (api, f"/models/send/{MODEL}/"),
            "validate": (bare, "/validate/"),
            "insert": (bare, "/insert/"),
        }
        arms = {
            name: (server, cycle([post(path + context, BODY) for context in contexts]))
            for name, (server, path) in paths.items()
        }
        many: dict[str, list[Sample]] = {name: [] for name in arms}
        lone: dict[str, list[Sample]] = {name: [] for name in arms}
        for turn in range(-1, options.rounds):  # the first one warms up
            seconds = options.seconds if turn >= 0 else _WARM_UP_SECONDS
            for samples, callers in ((many, CALLERS), (lone, 1)):
                for name, (server, requests) in arms.items():
                    progress.show(f"{name}, {callers} callers", turn, options.rounds)
                    parts = {"server": server.pid, "postgres": house.postgres_pid}
                    async with connect(server.port, callers) as open_callers:
                        load = open_callers.run(requests.__next__, seconds, (202,))
                        sample = await measure(parts, load)
                    if turn >= 0:
                        samples[name].append(sample)
    return _report(many, lone)


async def save_contexts(api: Server, count: int) -> list[str]:
    """Save so many prompts of one chunk each; their ids."""
    url = f"http://{HOST}:{api.port}/contexts/"
    async with httpx.AsyncClient(trust_env=False) as client:
        answers = [
            await client.post(url, json={"content": f"prompt {number} {{{{chunks=1}}}}"})
            for number in range(count)
        ]
    return [answer.json()["id"] for answer in answers]


def _report(many: dict[str, list[Sample]], lone: dict[str, list[Sample]]) -> Report:
    report = Report(
        "P1",
        "accepted durable submissions",
        ["requests/s", "server us", "Postgres us", "p50 ms", "p99 ms"],
    )
    names = {"send": "POST send", "validate": "validate only", "insert": "one INSERT each"}
    for callers, samples in ((CALLERS, many), (1, lone)):
        for name, text in names.items():
            report.rows.append((f"{text}, {callers} callers", figures(samples[name])))
            report.raw[f"{name} {callers}"] = [
                {"count": sample.load.count, "rate": sample.load.rate, "cpu": sample.cpu}
                for sample in samples[name]
            ]
    send, validate = (
        [sample.microseconds("server") for sample in many[name]] for name in ("send", "validate")
    )
    report.check("rate per CPU second of validate only", median_ratio(validate, send), ">=", _SHARE)
    postgres = statistics.median(sample.microseconds("postgres") for sample in many["send"])
    report.check("Postgres CPU per row", postgres, "<=", 25, "us")
    ours, theirs = (
        [sample.load.median_milliseconds() for sample in lone[name]] for name in ("send", "insert")
    )
    costs = {
        name: statistics.median(one.microseconds("server") for one in many[name]) for name in names
    }
    report.plots.append(
        Bars(
            "cpu",
            f"The server's CPU of a submission, {CALLERS} callers",
            "us of CPU per request",
            [Bar(text, costs[name], is_ours=name == "send") for name, text in names.items()],
            Goal(costs["validate"] / _SHARE, f"goal for ours: validate only / {_SHARE}"),
        )
    )
    # Differences under a fifth are no findings on a shared machine.
    report.check("p50 at 1 caller, of one INSERT each", median_ratio(ours, theirs), "<=", 1.2)
    return report


def figures(samples: list[Sample]) -> list[float]:
    """Medians over the rounds: rate, CPU of server and Postgres per request, p50, p99."""
    return [
        statistics.median(values)
        for values in zip(
            *(
                (
                    sample.load.rate,
                    sample.microseconds("server"),
                    sample.microseconds("postgres"),
                    sample.load.milliseconds(0.5),
                    sample.load.milliseconds(0.99),
                )
                for sample in samples
            ),
            strict=True,
        )
    ]
