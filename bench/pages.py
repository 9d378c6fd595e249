"""Pages: how long each page of the web page takes to be made, with a table of a million results.

One visitor asks for one page after another, each several times, in turn; the time is that of the whole
answer, so it holds the API's calls. The database is that of P7, its words digested.
"""

import statistics
import time

import httpx

from bench import progress
from bench.fill import digest, fill
from bench.report import Options, Report
from bench.servers import House

_MOST_MILLISECONDS = 300  # of server time, for any page
_PER_ROUND = 10


async def run(house: House, options: Options) -> Report:
    """Open every page."""
    environment = await house.environment("bench_pages")
    connection = await house.connect("bench_pages")
    progress.show(f"filling a table with {options.rows:,} rows, and making it searchable")
    await fill(connection, options.rows)
    await digest(connection)
    deep = await connection.fetchval(
        "SELECT id FROM results ORDER BY id DESC OFFSET $1 LIMIT 1", options.rows * 9 // 10
    )
    one = await connection.fetchrow(
        "SELECT id, output FROM results WHERE state = 'completed' ORDER BY id DESC OFFSET 999 LIMIT 1"
    )
    assert one is not None
    await connection.close()
    report = Report(
        "PAGES",
        f"the web page over {options.rows:,} results",
        ["p50 ms", "p99 ms", "max ms", "kB"],
    )
    paths = _paths(str(deep), str(one["id"]), one["output"].split()[0])
    async with (
        house.api(environment, with_worker=True) as api,
        house.ui(environment, api) as ui,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{ui.port}", timeout=30) as client,
    ):
        times: dict[str, list[float]] = {path: [] for path in paths}
        sizes: dict[str, int] = {}
        for turn in range(-1, options.rounds):  # the first one warms up
            progress.show(f"{len(paths)} pages", turn, options.rounds)
            for path in paths:
                for _ in range(_PER_ROUND if turn >= 0 else 1):
                    begun = time.perf_counter()
                    answer = await client.get(path)
                    milliseconds = (time.perf_counter() - begun) * 1000
                    answer.raise_for_status()
                    sizes[path] = len(answer.content)
                    if turn >= 0:
                        times[path].append(milliseconds)
    for path, taken in times.items():
        taken.sort()
        name = path if len(path) < 60 else f"{path[:57]}..."
        p99 = taken[min(len(taken) - 1, round(len(taken) * 0.99))]
        figures = [statistics.median(taken), p99, taken[-1], sizes[path] / 1000]
        report.rows.append((name, figures))
    slowest = max(taken[-1] for taken in times.values())
    report.check("the slowest answer of any page", slowest, "<=", _MOST_MILLISECONDS, "ms")
    return report


def _paths(deep: str, one: str, rare_word: str) -> list[str]:
    """Every page, with what makes it heavy."""
    return [
        "/playground",
        f"/playground/{one}",
        "/compare",
        "/history",
        f"/history?after={deep}",
        "/history?state=failed&model_name=rare",
        "/history?q=prompt",
        f"/history?q={rare_word}",
        "/history?q=absent",
        f"/history?q=prompt&after={deep}",
        f"/history/{one}",
        "/bulk",
        "/models",
        "/launches",
        "/system",
    ]
