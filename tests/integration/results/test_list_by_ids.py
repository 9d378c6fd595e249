"""`ids` of lists, searches and exports: few results, looked up together."""

import asyncpg
import orjson
import pytest

from app.core.ids import new_id
from tests.conftest import Service
from tests.integration.auth.test_auth import guarded
from tests.integration.queue.test_teams import BLUE, RED, Rows, both, red
from tests.integration.results.test_result_export import fill
from tests.integration.support import UNKNOWN_ID, assert_problem, finish

__all__ = ["both", "guarded", "red"]

MOST = 100


async def listed(service: Service, ids: list[str], **filters: str | int | bool) -> list[str]:
    query: dict[str, str | int | bool] = {"ids": ",".join(ids), **filters}
    answer = await service.client.get("/results/", params=query)
    assert answer.status_code == 200, answer.text
    exported = await service.client.get("/results/export", params=query)
    found = [row["id"] for row in answer.json()]
    if "limit" not in filters:
        assert [orjson.loads(line)["id"] for line in exported.content.splitlines()] == found
    return found


async def test_results_are_listed_newest_first_and_once(
    api: Service, connection: asyncpg.Connection
) -> None:
    newest = await fill(connection, 5)
    wanted = [newest[3], newest[0], newest[3].upper(), newest[1]]
    assert await listed(api, wanted) == [newest[0], newest[1], newest[3]]
    assert await listed(api, [newest[2], str(new_id())]) == [newest[2]]
    assert await listed(api, [str(new_id())]) == []


async def test_they_combine_with_the_other_filters(service: Service) -> None:
    done = await finish(service, "a walrus")
    failed = await finish(service, "x", deadline_seconds=0.001)
    ids = [done["id"], failed["id"]]
    assert await listed(service, ids, state="failed") == [failed["id"]]
    assert await listed(service, ids, retryable=False, state="completed") == []
    assert await listed(service, ids, model_name="scripted") == [failed["id"], done["id"]]
    assert await listed(service, ids, context_id=done["context_id"]) == [done["id"]]
    assert await listed(service, ids, created_after="2200-01-01T00:00:00Z") == []
    assert await listed(service, ids, created_before="2200-01-01T00:00:00Z") == ids[::-1]


async def test_a_search_takes_them(service: Service, connection: asyncpg.Connection) -> None:
    newest = await fill(connection, 3)
    for identifier, words in zip(newest, ("walrus", "walrus", "seal"), strict=True):
        await connection.execute(
            "INSERT INTO result_search VALUES ($1, 'default', to_tsvector('simple', $2))",
            identifier, words,
        )  # fmt: skip
    assert await listed(service, [newest[1], newest[2]], q="walrus") == [newest[1]]


async def test_their_pages_have_links(api: Service, connection: asyncpg.Connection) -> None:
    newest = await fill(connection, 5)
    answer = await api.client.get("/results/", params={"ids": ",".join(newest[1:4]), "limit": 2})
    assert [row["id"] for row in answer.json()] == newest[1:3]
    following = await api.client.get(answer.links["next"]["url"])
    assert [row["id"] for row in following.json()] == newest[3:4]
    assert "next" not in following.links


async def test_a_hundred_are_the_most(api: Service, connection: asyncpg.Connection) -> None:
    newest = await fill(connection, MOST)
    assert await listed(api, newest, limit=MOST) == newest
    for path in ("/results/", "/results/export"):
        query = {"ids": ",".join([*newest, newest[0]])}
        problem = assert_problem(await api.client.get(path, params=query), 422, "invalid_request")
        assert "100" in problem["detail"]


@pytest.mark.parametrize("ids", ["", ",", "x", "1,2", f"{UNKNOWN_ID},", "0" * 10_000, "\x00"])
async def test_other_texts_are_refused(api: Service, ids: str) -> None:
    for path in ("/results/", "/results/export"):
        assert_problem(await api.client.get(path, params={"ids": ids}), 422, "invalid_request")


async def test_results_of_other_teams_are_not_on_the_page(both: Service, red: Rows) -> None:
    own = await both.client.get("/results/", params={"ids": red.pending}, headers=RED)
    assert [row["id"] for row in own.json()] == [red.pending]
    for path in ("/results/", "/results/export"):
        foreign = await both.client.get(path, params={"ids": red.pending}, headers=BLUE)
        assert foreign.status_code == 200
        assert red.pending not in foreign.text
