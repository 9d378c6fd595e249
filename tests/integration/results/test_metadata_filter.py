"""Lists by the metadata of results: every way to store one, every value, every way to delete one."""

import asyncio
from datetime import timedelta
from typing import Any

import asyncpg
import orjson
import pytest

from app.core.database import Database
from app.core.ids import created_at
from app.core.settings import Settings
from app.results.retention.retention import Retention
from app.results.tags import tag_of
from tests.conftest import Service
from tests.integration.auth.test_auth import guarded
from tests.integration.queue.test_teams import BLUE, RED, both
from tests.integration.support import assert_problem, finish, send, until

__all__ = ["both", "guarded"]

RUN = {"run": "7"}
GREEDY = {"max_tokens": 4, "temperature": 0}
TAGS = "SELECT count(*) FROM result_tags"
WITHOUT_RESULT = """
SELECT count(*) FROM result_tags t WHERE NOT EXISTS (SELECT FROM results WHERE id = t.result_id)
"""


async def listed(service: Service, **filters: Any) -> list[str]:
    """Ids of a page; an export has the same."""
    pairs = filters.pop("metadata", {})
    query = filters | {f"metadata[{key}]": value for key, value in pairs.items()}
    answer = await service.client.get("/results/", params=query)
    assert answer.status_code == 200, answer.text
    exported = await service.client.get("/results/export", params=query)
    found = [row["id"] for row in answer.json()]
    if "limit" not in filters:
        assert [orjson.loads(line)["id"] for line in exported.content.splitlines()] == found
    return found


async def post(service: Service, path: str, body: object) -> Any:
    answer = await service.client.post(path, json=body)
    assert answer.is_success, answer.text
    return answer.json()


async def test_every_way_to_send_stores_the_tags(service: Service) -> None:
    client, ids = service.client, list[str]()
    content = "x {{chunks=1}}"
    body = {"model": "scripted", "content": content, "parameters": GREEDY, "metadata": RUN}
    one = await finish(service, content, parameters=GREEDY, metadata=RUN, reuse=True)
    ids += [one["id"]]
    ids += [row["id"] for row in await post(service, "/results/", [body, body])]
    reused = await post(service, "/results/", body | {"reuse": True})
    assert reused["reused_from"] in ids
    ids += [reused["id"]]
    context = await post(service, "/contexts/", {"content": "x", "metadata": {"run": "context"}})
    sent = await post(service, f"/models/send/scripted/{context['id']}", {"metadata": RUN})
    ids += [sent["id"]]
    keyed = await client.post("/results/", json=body, headers={"Idempotency-Key": "k"})
    ids += [keyed.json()["id"]]
    job = await post(service, "/jobs", {"metadata": RUN})
    row = {"job_id": job["id"], "job_key": "k"}
    ids += [one["id"] for one in await post(service, "/results/", [body | row])]
    failed = await finish(service, "x {{fail=0}}", metadata=RUN)
    assert failed["state"] == "failed"
    ids += [failed["id"], (await post(service, f"/results/{failed['id']}/retry", {}))["id"]]
    messages = [{"role": "user", "content": content}]
    chat = {"model": "scripted", "messages": messages, "metadata": RUN}
    choices = await post(service, "/v1/chat/completions", chat | {"n": 2})
    assert len(choices["choices"]) == 2
    await post(service, "/v1/responses", {"model": "scripted", "input": "x", "metadata": RUN})
    by_run = await listed(service, metadata=RUN)
    assert set(ids) < set(by_run)
    assert len(by_run) == len(ids) + 3
    everything = (await client.get("/results/")).json()
    assert by_run == [row["id"] for row in everything if row["metadata"] == RUN]
    await post(service, "/v1/messages", {
        "model": "scripted", "max_tokens": 4, "messages": messages,
        "metadata": {"user_id": "u"},
    })  # fmt: skip
    assert len(await listed(service, metadata={"user_id": "u"})) == 1
    assert await listed(service, metadata={"run": "context"}) == []


async def test_results_without_metadata_have_no_tags(
    service: Service, connection: asyncpg.Connection
) -> None:
    await finish(service, "x {{chunks=1}}")
    members = {"list": ["run"], "none": None, "in": RUN}
    other = await finish(service, "x {{chunks=1}}", metadata=members)
    assert await connection.fetchval(TAGS) == 0
    for key, value in (("list", '["run"]'), ("none", "null"), ("in", '{"run": "7"}')):
        for more in ({}, {"ids": other["id"]}, {"model_name": "scripted"}):
            assert await listed(service, metadata={key: value}, **more) == []


VALUES: list[tuple[str, object, str]] = [
    ("run", "a b", "a b"),
    ("", "no key", ""),
    ("run", "", ""),
    ("[x]", "]", "]"),
    ("a.b", "1=2&3", "1=2&3"),
    ("é\u0301", "日本\U0001f40d", "日本\U0001f40d"),
    ("n", 7, "7"),
    ("n", -0.5, "-0.5"),
    ("n", 1e300, "1" + "0" * 300),
    ("n", 2**63 - 1, str(2**63 - 1)),
    ("is", True, "true"),
    ("is", False, "false"),
    ("long", "x" * 10_000, "x" * 10_000),
]


@pytest.mark.parametrize(("key", "value", "text"), VALUES)
async def test_every_value_is_found_as_its_json_has_it(
    api: Service, connection: asyncpg.Connection, key: str, value: object, text: str
) -> None:
    sent = await send(api, "x", metadata={key: value, "other": 1})
    await send(api, "x", metadata={key: "no", f"{key}{text}"[:9] + "?": "", "other": text})
    tags = await connection.fetch("SELECT tag FROM result_tags WHERE result_id = $1", sent["id"])
    if key:  # metadata[]= has no key
        assert tag_of(key, text) in {row["tag"] for row in tags}
        assert await listed(api, metadata={key: text}) == [sent["id"]]
        assert await listed(api, metadata={key: text, "other": "1"}) == [sent["id"]]
        assert await listed(api, metadata={key: text, "other": "2"}) == []
        assert await listed(api, metadata={key: text}, ids=sent["id"]) == [sent["id"]]
        assert await listed(api, metadata={key: f"{text} "}) == []


async def test_several_pairs_and_other_filters(service: Service) -> None:
    done = await finish(service, "a walrus {{chunks=1}}", metadata={"run": "7", "part": 1})
    failed = await finish(service, "x {{fail=0}}", metadata={"run": "7", "part": 2})
    other = await finish(service, "a walrus {{chunks=1}}", metadata={"run": "8", "part": 1})
    both_of_run = [failed["id"], done["id"]]
    assert await listed(service, metadata=RUN) == both_of_run
    assert await listed(service, metadata={"part": 1}) == [other["id"], done["id"]]
    assert await listed(service, metadata={"run": "7", "part": 1}) == [done["id"]]
    assert await listed(service, metadata=RUN, state="failed") == [failed["id"]]
    assert await listed(service, metadata=RUN, retryable=True) == []
    assert await listed(service, metadata=RUN, model_name="scripted") == both_of_run
    assert await listed(service, metadata=RUN, model_name="none") == []
    assert await listed(service, metadata=RUN, context_id=done["context_id"]) == [done["id"]]
    assert await listed(service, metadata=RUN, created_after="2200-01-01T00:00:00Z") == []
    assert await listed(service, metadata=RUN, created_before="2200-01-01T00:00:00Z") == both_of_run
    assert await listed(service, metadata=RUN, ids=f"{done['id']},{other['id']}") == [done["id"]]

    async def is_indexed() -> bool:
        answer = await service.client.get("/results/", params={"q": "walrus"})
        return len(answer.json()) == 2

    await until(is_indexed)
    assert await listed(service, metadata=RUN, q="walrus") == [done["id"]]
    assert await listed(service, metadata=RUN, q="walrus", state="failed") == []
    in_context = {"q": "walrus", "context_id": other["context_id"]}
    assert await listed(service, metadata=RUN, **in_context) == []
    assert await listed(service, metadata={"part": 1}, **in_context) == [other["id"]]


async def test_a_search_that_asks_the_index_of_words(
    api: Service, connection: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.results.search._WALKS", (1, 2))
    ids = [
        (await send(api, f"x {place}", metadata={"run": str(place % 2), "all": 1}))["id"]
        for place in range(8)
    ]
    await connection.execute(
        """INSERT INTO result_search (result_id, team_id, words)
           SELECT id, team_id, to_tsvector('simple', CASE WHEN id = ANY($1::uuid[]) THEN 'walrus' ELSE 'seal' END)
             || array_to_tsvector(ARRAY[E'\\x01' || encode(convert_to(team_id, 'UTF8'), 'hex')])
           FROM results""",
        ids[:4],
    )  # fmt: skip
    assert await listed(api, metadata={"all": 1}, q="walrus") == ids[3::-1]
    assert await listed(api, metadata={"run": "1", "all": 1}, q="walrus") == [ids[3], ids[1]]
    assert await listed(api, metadata={"run": "1"}, q="walrus", limit=1) == [ids[3]]


async def test_their_pages_have_links(api: Service) -> None:
    sent = [(await send(api, "x", metadata={"a b&": "c=d"}))["id"] for _ in range(5)]
    pair = {"metadata[a b&]": "c=d"}
    page = await api.client.get("/results/", params=pair | {"limit": 2})
    ids = [row["id"] for row in page.json()]
    while "next" in page.links:
        page = await api.client.get(page.links["next"]["url"])
        ids += [row["id"] for row in page.json()]
    assert ids == sent[::-1]


@pytest.mark.parametrize(
    ("query", "detail"),
    [
        ("metadata=x", "metadata[KEY]=VALUE"),
        ("metadata[]=x", "metadata[KEY]=VALUE"),
        ("metadata[a=x", "metadata[KEY]=VALUE"),
        ("metadata[a]b=x", "metadata[KEY]=VALUE"),
        ("metadata[a]=x&metadata[a]=y", "twice"),
        ("metadata[a]=%00", "character"),
        ("metadata[%00]=a", "character"),
        ("&".join(f"metadata[{place}]=x" for place in range(17)), "16 pairs"),
    ],
)
async def test_other_forms_are_refused(api: Service, query: str, detail: str) -> None:
    for path in ("/results/", "/results/export"):
        answer = await api.client.get(f"{path}?{query}")
        problem = assert_problem(answer, 422, "invalid_request")
        assert detail in problem["detail"]
        assert problem["errors"][0]["field"] == "query.metadata"


async def test_sixteen_pairs_are_taken(api: Service) -> None:
    pairs = {str(place): place for place in range(16)}
    sent = await send(api, "x", metadata=pairs)
    assert await listed(api, metadata=pairs) == [sent["id"]]


async def test_results_of_other_teams_are_not_found(both: Service) -> None:
    body = {"model": "scripted", "content": "x", "metadata": RUN}
    sent = await both.client.post("/results/", json=body, headers=RED)
    for headers, ids in ((RED, [sent.json()["id"]]), (BLUE, [])):
        for more in ("", "&metadata[run]=7&model_name=scripted", f"&ids={sent.json()['id']}"):
            query = "metadata[run]=7" if "metadata" not in more else more[1:]
            answer = await both.client.get(f"/results/?{query}", headers=headers)
            assert [row["id"] for row in answer.json()] == ids


async def test_deletions_leave_no_tags(
    service: Service, connection: asyncpg.Connection, settings: Settings
) -> None:
    many = {f"key {place}": place for place in range(63)}
    kept = await finish(service, "x {{chunks=1}}", metadata=RUN)
    one, other = [await finish(service, "x {{chunks=1}}", metadata=many | RUN) for _ in range(2)]
    await service.client.delete(f"/results/{one['id']}")
    assert await listed(service, metadata=RUN) == [other["id"], kept["id"]]
    await service.client.delete(f"/contexts/{other['context_id']}")
    assert await connection.fetchval(TAGS) == 1
    assert await listed(service, metadata=RUN) == [kept["id"]]
    old = [await finish(service, "x {{chunks=1}}", metadata=many) for _ in range(3)]
    index = "SELECT count(*) FROM result_search"
    await until(lambda: is_equal(connection, index, 4))
    clock = created_at(asyncpg.pgproto.pgproto.UUID(old[-1]["id"])) + timedelta(days=2)
    one_day = settings.model_copy(update={"results_retention_seconds": 86_400.0})

    async def later() -> Any:
        return clock

    await connection.execute("UPDATE retention_state SET looked_at = NULL, trusted_at = NULL")
    async with Database(settings, "test") as database:
        await Retention(database, one_day, clock=later, share=1).look()
    assert await connection.fetchval("SELECT count(*) FROM results") == 0
    assert await connection.fetchval(TAGS) == 0


async def is_equal(connection: asyncpg.Connection, query: str, count: int) -> bool:
    return bool(await connection.fetchval(query) == count)


async def test_a_deletion_and_its_result_sent_again(
    service: Service, connection: asyncpg.Connection
) -> None:
    """Results come and go at once: each tag has its result."""

    async def come_and_go() -> None:
        sent = await send(service, "x {{chunks=1}}", metadata=RUN)
        await service.client.delete(f"/results/{sent['id']}", params={"force": True})

    await asyncio.gather(*(come_and_go() for _ in range(40)))
    assert await connection.fetchval(WITHOUT_RESULT) == 0
    assert await connection.fetchval(TAGS) == 0
