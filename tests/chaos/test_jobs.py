"""kill -9 of API and workers while a job runs: each row runs once, and each end is read once."""

import asyncio
import signal
from functools import partial
from typing import Any

import pytest

from tests.chaos.history import check_logs
from tests.chaos.http_client import Answer
from tests.chaos.stack import Stack, kept_running, until

ROWS = 600
LIST = 40
KILLS = 4


async def call(stack: Stack, path: str, body: object = None, *, is_post: bool = True) -> Answer:
    """Send a request until it is answered, as a client does that does not know what arrived."""
    while True:
        try:
            answer = await (stack.client.post(path, body) if is_post else stack.client.get(path))
        except (OSError, TimeoutError):
            await asyncio.sleep(0.1)
            continue
        if answer.status not in (429, 503):
            return answer
        await asyncio.sleep(0.2)


def row(job: str, number: int) -> dict[str, Any]:
    content = f"{number} {{{{chunks=3 delay_ms=20}}}}"
    return {"model": "scripted", "content": content, "job_id": job, "job_key": str(number)}


async def send(stack: Stack, job: str) -> None:
    for start in range(0, ROWS, LIST):
        rows = [row(job, number) for number in range(start, start + LIST)]
        answer = await call(stack, "/results/", rows)
        assert answer.status == 202, answer
        assert all("id" in one for one in answer.json), answer.json
        await asyncio.sleep(0.1)  # earlier rows end between the lists
    answer = await call(stack, f"/jobs/{job}/close", {})
    assert answer.status == 200, answer


async def follow(stack: Stack, job: str, found: list[dict[str, Any]]) -> None:
    """Read ends behind the last place until the job has ended."""
    while True:
        state = (await call(stack, f"/jobs/{job}", is_post=False)).json["state"]
        after = found[-1]["place"] if found else 0
        page = await call(stack, f"/jobs/{job}/results?after={after}&limit=50", is_post=False)
        assert page.status == 200, page
        found += page.json
        if state == "ended" and not page.json:
            return
        await asyncio.sleep(0.05)


@pytest.mark.timeout(300)
async def test_a_job_while_api_and_workers_die(stack: Stack) -> None:
    workers = [await stack.start_worker(name) for name in ("alice", "bob")]
    created = await call(stack, "/jobs", {"key": "chaos", "total": ROWS})
    job = created.json["id"]
    found: list[dict[str, Any]] = []

    async def has_read(count: int) -> bool:
        return len(found) >= count

    async with kept_running(stack.api), kept_running(workers[0]), kept_running(workers[1]):
        sending = asyncio.create_task(send(stack, job))
        following = asyncio.create_task(follow(stack, job, found))
        for number in range(KILLS):
            await until(partial(has_read, 1 + number * ROWS // (KILLS + 1)), 120, "rows end")
            stack.api.send_signal(signal.SIGKILL)
            workers[number % 2].send_signal(signal.SIGKILL)
        await asyncio.gather(sending, following)
        again = await call(stack, "/jobs", {"key": "chaos"})
    assert sorted(int(one["key"]) for one in found) == list(range(ROWS))
    assert {one["state"] for one in found} == {"completed"}
    assert [one["place"] for one in found] == list(range(1, ROWS + 1))
    assert len({one["result_id"] for one in found}) == ROWS
    assert await stack.count("true") == ROWS
    assert (again.status, again.json["id"]) == (200, job)
    assert again.json["counts"] == {"rows": ROWS, "pending": 0, "completed": ROWS, "failed": 0}
    check_logs(stack)
