"""POST /jobs/{id}/rows: rows by their keys, whole pages of bytes, and what is refused."""

import asyncpg

from tests.conftest import Service
from tests.integration.results.jobs.support import (
    act,
    new_job,
    row,
    send_rows,
    until_ended,
    until_placed,
)
from tests.integration.support import UNKNOWN_ID, assert_problem


async def test_rows_are_read_in_the_order_of_the_keys(service: Service) -> None:
    job, other = await new_job(service), await new_job(service)
    contents = {"a": "{{chunks=1}}", "b": "{{fail_at=1}}", "slow": "{{delay_ms=100 chunks=1000}}"}
    sent = await send_rows(service, [row(job, key, text) for key, text in contents.items()])
    await send_rows(service, [row(other, "elsewhere")])
    ended = await until_placed(service, job, 2)
    keys = ["b", "none", "slow", "a", "elsewhere", "b"]
    answer = await service.client.post(f"/jobs/{job['id']}/rows", json={"keys": keys})
    assert answer.status_code == 200, answer.text
    rows = answer.json()
    assert [one["key"] for one in rows] == keys
    states = ["failed", None, "pending", "completed", None, "failed"]
    assert [one["state"] for one in rows] == states
    by_key = dict(zip(contents, sent, strict=True))
    assert [one["result_id"] for one in rows] == [
        by_key[key]["id"] if key in by_key else None for key in keys
    ]
    places = {one["key"]: one["place"] for one in ended}
    assert [one["place"] for one in rows] == [places.get(key) for key in keys]
    assert rows[3]["result"] == (await service.client.get(f"/results/{by_key['a']['id']}")).json()
    assert rows[1]["result"] is None
    await act(service, job, "cancel")
    # The result is gone, its row is not.
    await service.client.delete(f"/results/{by_key['a']['id']}")
    (gone,) = (await service.client.post(f"/jobs/{job['id']}/rows", json={"keys": ["a"]})).json()
    assert (gone["state"], gone["result"]) == ("completed", None)


async def test_a_list_ends_by_its_bytes(service: Service, connection: asyncpg.Connection) -> None:
    job = await new_job(service)
    keys = [f"k{number}" for number in range(5)]
    await send_rows(service, [row(job, key) for key in keys])
    await act(service, job, "close")
    await until_ended(service, job)
    await connection.execute("UPDATE results SET output = repeat('x', 1900000)")
    read: list[str] = []
    pages = 0
    while len(read) < len(keys):
        body = {"keys": keys[len(read) :]}
        page = (await service.client.post(f"/jobs/{job['id']}/rows", json=body)).json()
        assert 0 < len(page) < 5
        read += [one["key"] for one in page]
        pages += 1
    assert (read, pages) == (keys, 2)


async def test_what_is_refused(api: Service) -> None:
    job = await new_job(api)
    path = f"/jobs/{job['id']}/rows"
    for keys in ([], ["x"] * 1001, [""], ["x" * 256], ["a\nb"], "a"):
        assert_problem(await api.client.post(path, json={"keys": keys}), 422, "invalid_request")
    unknown = await api.client.post(f"/jobs/{UNKNOWN_ID}/rows", json={"keys": ["a"]})
    assert_problem(unknown, 404, "not_found")
