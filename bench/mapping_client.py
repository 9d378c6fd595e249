"""The programs of the goal `map`: python -m bench.mapping_client ARM URL ROWS OUT.

`client` maps rows with the Python client, and prints its CPU seconds, its seconds, and its memory at a fifth
of the rows and at the end, in MB. `bare` sends the same lists, made before, waits for the end of the job, and
prints the seconds.
"""

import json
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from llm_api_client import Client

_PROMPT = "{{{{chunks=1}}}} row {number}: {text}"
_TEXT = "a sentence of the data set " * 4
_LIST = 1000


def rows(count: int) -> Iterator[dict[str, object]]:
    """Rows of a data set, made as they are needed."""
    for number in range(count):
        yield {"number": number, "text": _TEXT}


def memory() -> float:
    """Resident memory of this process now, in MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def lists_of(job_id: str, count: int) -> Iterator[str]:
    """The lists that send the rows."""
    items = []
    for row in rows(count):
        content = _PROMPT.format(**row)
        items.append(
            {
                "job_id": job_id,
                "job_key": str(row["number"]),
                "model": "scripted",
                "content": content,
            }
        )
        if len(items) == _LIST or row["number"] == count - 1:
            yield json.dumps(items)
            items = []


def bare(url: str, count: int) -> list[float]:
    """Send the rows in lists that are made before, and wait for the end of the job; the seconds."""
    with httpx.Client(base_url=url, timeout=60) as http:
        job_id = http.post("/jobs", json={}).json()["id"]
        lists = list(lists_of(job_id, count))
        began = time.perf_counter()
        for body in lists:
            sent = http.post(
                "/results/", content=body, headers={"Content-Type": "application/json"}
            )
            sent.raise_for_status()
        http.post(f"/jobs/{job_id}/close")
        while http.get(f"/jobs/{job_id}").json()["state"] != "ended":
            time.sleep(0.1)
        return [time.perf_counter() - began]


def mapped(url: str, count: int, out: str) -> list[float]:
    """Map the rows; CPU seconds, seconds, memory at a fifth of the rows and at the end."""
    early, began = 0.0, time.perf_counter()
    before = time.process_time()
    with Client(url) as client:
        job = client.map(
            rows(count), _PROMPT, model="scripted", key="number", out=out, progress=False
        )
        for done, _ in enumerate(job, 1):
            if done == count // 5:
                early = memory()
        assert job.info().counts.completed == count
    return [time.process_time() - before, time.perf_counter() - began, early, memory()]


if __name__ == "__main__":
    arm, address, number, file = sys.argv[1:]
    found = mapped(address, int(number), file) if arm == "client" else bare(address, int(number))
    print(json.dumps(found))
