"""Short ways to make jobs, send their rows, and read their ends."""

from collections.abc import Sequence
from typing import Any

from tests.conftest import Service
from tests.integration.support import until

Headers = dict[str, str] | None


async def new_job(service: Service, headers: Headers = None, **members: Any) -> dict[str, Any]:
    answer = await service.client.post("/jobs", json=members, headers=headers)
    assert answer.status_code == 201, answer.text
    job: dict[str, Any] = answer.json()
    assert answer.headers["location"] == f"/jobs/{job['id']}"
    return job


def row(
    job: dict[str, Any], key: str, content: str = "{{chunks=1}}", **members: Any
) -> dict[str, Any]:
    """A request of the scripted model as a row of a job."""
    request = {"model": "scripted", "content": content, "job_id": job["id"], "job_key": key}
    return request | members


async def send_rows(
    service: Service, rows: Sequence[dict[str, Any]], headers: Headers = None
) -> list[dict[str, Any]]:
    answer = await service.client.post("/results/", json=list(rows), headers=headers)
    assert answer.status_code == 202, answer.text
    results: list[dict[str, Any]] = answer.json()
    return results


async def read_job(
    service: Service, job: dict[str, Any], headers: Headers = None
) -> dict[str, Any]:
    answer = await service.client.get(f"/jobs/{job['id']}", headers=headers)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def act(service: Service, job: dict[str, Any], action: str, **body: Any) -> dict[str, Any]:
    """Close, cancel or retry a job."""
    answer = await service.client.post(f"/jobs/{job['id']}/{action}", json=body or None)
    assert answer.status_code in (200, 202), answer.text
    found: dict[str, Any] = answer.json()
    return found


async def until_ended(service: Service, job: dict[str, Any]) -> dict[str, Any]:
    async def has_ended() -> dict[str, Any] | None:
        found = await read_job(service, job)
        return found if found["state"] == "ended" else None

    ended: dict[str, Any] = await until(has_ended)
    return ended


async def until_placed(service: Service, job: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """The ended rows once there are so many."""

    async def are_placed() -> list[dict[str, Any]] | None:
        rows = await ended_rows(service, job)
        return rows if len(rows) >= count else None

    found: list[dict[str, Any]] = await until(are_placed)
    assert len(found) == count
    return found


async def ended_rows(
    service: Service, job: dict[str, Any], after: int = 0, **query: str | int | bool
) -> list[dict[str, Any]]:
    """All ended rows behind a place, page by page."""
    rows: list[dict[str, Any]] = []
    url, parameters = f"/jobs/{job['id']}/results", {"after": after} | query
    while True:
        answer = await service.client.get(url, params=parameters)
        assert answer.status_code == 200, answer.text
        page = answer.json()
        rows += page
        if "link" not in answer.headers:
            return rows
        parameters["after"] = page[-1]["place"]
