"""GET /results/?q=: the newest that match, whichever way they are found, of one's own team."""

from collections.abc import Sequence
from typing import Any
from uuid import UUID

import asyncpg
import orjson
import pytest

from app.core.settings import Settings
from app.results import export, search as result_search
from app.results.indexer import ResultIndexer
from app.results.search import ResultSearch
from tests.conftest import Service, run_service
from tests.integration.auth.test_auth import bearer, guarded
from tests.integration.results.test_indexer import add
from tests.integration.support import assert_problem
from tests.unit.auth.test_jwt import sign

__all__ = ["guarded"]


async def digest_all(service: Service) -> None:
    services = service.services
    digest = ResultIndexer(services.database, services.depth, services.settings)
    while await digest.index():
        pass


async def search(service: Service, q: str, **query: str | int) -> list[str]:
    answer = await service.client.get("/results/", params={"q": q, **query})
    assert answer.status_code == 200, answer.text
    return [result["id"] for result in answer.json()]


def newest_first(*ids: Sequence[UUID]) -> list[str]:
    return sorted((str(one) for some in ids for one in some), reverse=True)


@pytest.fixture
async def poem(api: Service, connection: asyncpg.Connection) -> list[UUID]:
    """Four results, digested: the oldest first."""
    texts = [
        ("the quick fox", "jumps over"),
        ("the lazy dog", "sleeps; def fox_trot(): return 1"),
        ("Über Füchse", "слово 狐狸 の"),
        ("the quick dog", "jumps back"),
    ]
    ids = [(await add(connection, prompt=p, output=o))[0] for p, o in texts]
    await digest_all(api)
    return ids


@pytest.mark.parametrize(
    ("q", "places"),
    [
        ("quick", [3, 0]), ("QUICK jumps", [3, 0]), ("quick fox", [0]), ("fox or lazy", [1, 0]),
        ("quick -dog", [0]), ('"quick dog"', [3]), ('"dog quick"', []), ("nothing", []),
        ("füchse", [2]), ("слово", [2]), ("狐狸", [2]), ("return", [1]), ("the", [3, 1, 0]),
        ("-the", [2]), ("quick' & | ! :* \\ dog", [3]), ("jumps over or back", [3, 0]),
        ("\u0001" + b"default".hex(), []),
    ],
)  # fmt: skip
@pytest.mark.parametrize("walks", [(1, 2), (1_000, 8_000)])
async def test_words_are_found_by_either_way(
    api: Service, poem: list[UUID], q: str, places: list[int], walks: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """By the walk and by the index the same."""
    monkeypatch.setattr(result_search, "_WALKS", walks)
    assert await search(api, q) == [str(poem[place]) for place in places]


@pytest.mark.parametrize("walks", [(1, 2), (5, 20), (1_000, 8_000)])
async def test_pages_and_filters(
    api: Service,
    connection: asyncpg.Connection,
    walks: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(result_search, "_WALKS", walks)
    monkeypatch.setattr(export, "_PAGE", 11)
    some = await add(connection, 30, output="common rare")
    await add(connection, 30, output="common")
    more = await add(connection, 5, output="common rare")
    await connection.execute("UPDATE results SET model_name = 'other' WHERE id = $1", some[3])
    await digest_all(api)
    expected = newest_first(some, more)
    for limit in (1, 7, 50):
        seen: list[str] = []
        url = f"/results/?q=rare&limit={limit}"
        while url:
            answer = await api.client.get(url)
            seen += [result["id"] for result in answer.json()]
            url = answer.links.get("next", {}).get("url", "")
        assert seen == expected
    assert await search(api, "rare", model_name="other") == [str(some[3])]
    context = await connection.fetchval("SELECT context_id FROM results WHERE id = $1", more[0])
    assert await search(api, "rare", context_id=str(context)) == newest_first(more)
    assert await search(api, "rare", state="failed") == []
    assert await search(api, "rare", state="completed", retryable="true") == []
    assert await search(api, "rare", created_before="2020-01-01T00:00:00Z") == []
    # Several pages, of which the last is full, cut by the limit, or empty.
    for query, first, end in (("", 0, None), ("&limit=22", 0, 22), ("&limit=33", 0, 33),
                              (f"&after={expected[1]}", 2, None)):  # fmt: skip
        exported = await api.client.get(f"/results/export?q=rare{query}")
        found = [orjson.loads(line)["id"] for line in exported.content.splitlines()]
        assert found == expected[first:end], query


@pytest.mark.parametrize("path", ["/results/export", "/results/?limit=3"])
@pytest.mark.parametrize("narrowed", ["q=common", "context_id={context}&model_name=m"])
@pytest.mark.parametrize("gone", [[0, 1, 2], [1, 5, 8]])
async def test_rows_that_vanish_between_two_reads_of_a_page_end_nothing(
    api: Service, connection: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch,
    path: str, narrowed: str, gone: Sequence[int],
) -> None:  # fmt: skip
    ids = sorted(await add(connection, 9, output="common"), reverse=True)
    await digest_all(api)
    context = await connection.fetchval("SELECT context_id FROM results WHERE id = $1", ids[0])
    find = ResultSearch.ids

    async def find_and_delete(*arguments: Any, **members: Any) -> Sequence[UUID]:
        found = await find(*arguments, **members)
        vanishing = [ids[place] for place in gone]
        await connection.execute("DELETE FROM results WHERE id = ANY($1::uuid[])", vanishing)
        return found

    monkeypatch.setattr(ResultSearch, "ids", find_and_delete)
    monkeypatch.setattr(export, "_PAGE", 3)
    seen: list[str] = []
    url = f"{path}{'&' if '?' in path else '?'}{narrowed.format(context=context)}"
    while url:
        answer = await api.client.get(url)
        lines = answer.content.splitlines() if "export" in url else map(orjson.dumps, answer.json())
        seen += [orjson.loads(line)["id"] for line in lines]
        url = answer.links.get("next", {}).get("url", "")
    assert seen == [str(one) for place, one in enumerate(ids) if place not in gone]


async def test_a_team_finds_its_own(guarded: Settings, connection: asyncpg.Connection) -> None:
    async with run_service(guarded, with_worker=False) as service:
        red = await add(connection, 3, team="red", output="mark")
        await add(connection, 3, team="blue", output="other")
        await digest_all(service)
        for team, expected in (("red", newest_first(red)), ("blue", []), ("redd", [])):
            token = sign({"team_id": team, "token_id": "t"})
            for q in ("mark", f"{result_search.team_word('red')} or mark"):
                answer = await service.client.get(
                    "/results/", params={"q": q}, headers=bearer(token)
                )
                assert [result["id"] for result in answer.json()] == expected


@pytest.mark.parametrize("q", ["", " ", "!?", '"" -', "\u0001"])
async def test_without_a_word_there_is_nothing_to_search_by(api: Service, q: str) -> None:
    answer = await api.client.get("/results/", params={"q": q})
    assert_problem(answer, 422, "invalid_request", "query.q")
    answer = await api.client.get("/results/export", params={"q": q})
    assert_problem(answer, 422, "invalid_request", "query.q")


@pytest.mark.parametrize(
    "query", ["-" * 499 + "a", "!--" * 50 + "a", "a -" * 150 + "a", '"-' * 240 + "a"]
)
async def test_operators_in_any_number_are_no_error_of_the_service(
    api: Service, query: str
) -> None:
    """PostgreSQL has a bound on operators that wait for their words, and an internal error beyond it."""
    answer = await api.client.get("/results/", params={"q": query})
    if answer.status_code != 200:
        assert_problem(answer, 422, "invalid_request", "query.q")


async def test_words_are_bounded(api: Service) -> None:
    for q in ("x" * 501, "a\x00b"):
        answer = await api.client.get("/results/", params={"q": q})
        assert_problem(answer, 422, "invalid_request", "query.q")
    assert await search(api, "x" * 500) == []


async def test_a_search_that_takes_too_long_is_told_so(
    api: Service, poem: list[UUID], connection: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time is the database's: a table that is locked is as slow as one that is too large."""
    monkeypatch.setattr(result_search, "_LIMITS", result_search._LIMITS.replace("= 2000", "= 50"))
    async with connection.transaction():
        await connection.execute("LOCK TABLE result_search IN ACCESS EXCLUSIVE MODE")
        for path in ("/results/?q=quick", "/results/export?q=quick"):
            problem = assert_problem(await api.client.get(path), 422, "search_too_slow", "query.q")
            assert "created_after" in problem["detail"]
    assert len(await search(api, "quick")) == 2
