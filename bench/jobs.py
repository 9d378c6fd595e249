"""The goal `jobs`: rows of a job, against the same rows without a job, each under an idempotency key."""

import asyncio
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import httpx

from bench import progress
from bench.cpu import exact_seconds, tree_seconds
from bench.report import Options, Report, median_ratio
from bench.servers import House

_ROWS = 20_000  # of an arm
_LIST = 1_000
_PROMPT = "{{chunks=1}} a sentence of the data set"
_POLL_SECONDS = 0.1
_ARMS = ("rows of a job", "the same rows without a job")


@dataclass(slots=True, frozen=True)
class _Sample:
    """Seconds, and CPU seconds of each part, from the first list to the last end."""

    seconds: float
    cpu: Mapping[str, float]

    def microseconds(self, part: str, rows: int) -> float:
        return self.cpu[part] / rows * 1e6


async def run(house: House, options: Options) -> Report:
    """Both arms in turn, on one database; each row is sent, generated, stored and counted."""
    count = min(options.rows, _ROWS)
    report = Report(
        "JOBS",
        f"{count:,} rows in lists of {_LIST:,}, from the first list to the last end",
        ["rows/s", "API us", "worker us", "Postgres us"],
    )
    environment = await house.environment("bench_jobs")
    samples: list[list[_Sample]] = [[], []]
    async with (
        house.api(environment) as api,
        house.worker(environment) as worker,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{api.port}", timeout=60) as http,
    ):
        parts = {"api": api.pid, "worker": worker.pid, "postgres": house.postgres_pid}
        for turn in range(-1, options.rounds):  # the first one warms up
            for arm, taken in enumerate(samples):
                progress.show(_ARMS[arm], max(turn, 0), options.rounds)
                rows = _LIST if turn < 0 else count
                sample = await _measure(http, parts, rows, f"{turn}", is_job=arm == 0)
                if turn >= 0:
                    taken.append(sample)
    for label, taken in zip(_ARMS, samples, strict=True):
        figures: list[float | None] = [statistics.median(count / one.seconds for one in taken)]
        figures += [
            statistics.median(one.microseconds(part, count) for one in taken) for part in parts
        ]
        report.rows.append((label, figures))
    jobs, plain = samples
    ratio = median_ratio([one.seconds for one in jobs], [one.seconds for one in plain])
    report.check("wall time of a job, of the same rows without one", ratio, "<=", 1.1)
    ratio = median_ratio(*([one.cpu["postgres"] for one in taken] for taken in samples))
    report.check("Postgres CPU of a job, of the same rows without one", ratio, "<=", 1.25)
    return report


async def _measure(
    http: httpx.AsyncClient, parts: Mapping[str, int], count: int, name: str, *, is_job: bool
) -> _Sample:
    job_id = (await http.post("/jobs", json={})).json()["id"] if is_job else None
    lists = list(_lists(count, name, job_id))
    before, began = _spent(parts), time.perf_counter()
    for items in lists:
        (await http.post("/results/", json=items)).raise_for_status()
    if job_id:
        (await http.post(f"/jobs/{job_id}/close")).raise_for_status()
    await _until_ended(http, job_id)
    seconds, after = time.perf_counter() - began, _spent(parts)
    return _Sample(seconds, {part: after[part] - before[part] for part in parts})


def _lists(count: int, name: str, job_id: str | None) -> Iterator[list[dict[str, object]]]:
    for start in range(0, count, _LIST):
        items = []
        for number in range(start, min(start + _LIST, count)):
            item: dict[str, object] = {"model": "scripted", "content": f"{_PROMPT} {number}"}
            key = f"{name}.{number}"
            item |= {"job_id": job_id, "job_key": key} if job_id else {"idempotency_key": key}
            items.append(item)
        yield items


async def _until_ended(http: httpx.AsyncClient, job_id: str | None) -> None:
    while True:
        if job_id:
            has_ended = (await http.get(f"/jobs/{job_id}")).json()["state"] == "ended"
        else:
            has_ended = (await http.get("/results/?state=pending&limit=1")).json() == []
        if has_ended:
            return
        await asyncio.sleep(_POLL_SECONDS)


def _spent(parts: Mapping[str, int]) -> dict[str, float]:
    return {
        part: exact_seconds(pid) if part == "postgres" else tree_seconds(pid)
        for part, pid in parts.items()
    }
