"""infini-gram API's routes over indexes written by hand: their members, bounds and errors."""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.routing import RouteContext, iter_route_contexts
from pydantic import BaseModel

from app.api import app
from app.api.infini_gram import response_schemas as answers
from app.api.native import exports
from app.core.settings import Settings
from app.infini_gram.declarations import RESERVED_NAMES
from app.infini_gram.engine import Engine
from app.infini_gram.tokenizer import ByteTokenizer, FileTokenizer
from tests.conftest import ROOT, Service, run_service
from tests.index_files import Text, write_index
from tests.integration.auth.test_auth import bearer, guarded
from tests.integration.support import assert_problem
from tests.unit.auth.test_jwt import sign

__all__ = ["guarded"]

DEMO_TOKENIZER = ROOT / "models" / "demo" / "1" / "tokenizer.json"
TEXTS = (
    "def count(words):\n    return len(words)\n",
    "class Count:\n    def total(self):\n        return None\n",
    "def total(numbers):\n    return sum(numbers)\n",
)
POSTS: dict[str, type[BaseModel]] = {
    "find": answers.FindRead,
    "find_cnf": answers.FindCnfRead,
    "count": answers.CountRead,
    "count_cnf": answers.CountCnfRead,
    "prob": answers.ProbRead,
    "ntd": answers.NtdRead,
    "infgram_prob": answers.InfgramProbRead,
    "infgram_ntd": answers.InfgramNtdRead,
    "get_document_by_rank": answers.OneDocumentRead,
    "get_document_by_pointer": answers.OneDocumentRead,
    "get_document_by_index": answers.OneDocumentRead,
    "get_documents_by_index": answers.DocumentsRead,
}
QUERIES = [name for name in POSTS if not name.startswith("get_")]


@pytest.fixture(scope="module")
def indexes_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`corpus`: two shards of the demo model's tokens; `raw`: bytes; `broken`: one file is cut."""
    directory = tmp_path_factory.mktemp("indexes")
    tokenizer = FileTokenizer(DEMO_TOKENIZER)
    shards = [
        [Text(tokenizer.encode(text), {"metadata": {"n": n}}) for n, text in enumerate(TEXTS[:2])],
        [Text(tokenizer.encode(text), {"metadata": {"n": 2}}) for text in TEXTS[2:]],
    ]
    write_index(directory / "corpus", shards, tokenizer)
    write_index(directory / "raw", [[Text(list(b"banana bandana"))]], ByteTokenizer())
    write_index(directory / "broken", [[Text(list(b"banana"))]], ByteTokenizer())
    (directory / "broken" / "table.0").write_bytes(b"")
    file = directory / "indexes.toml"
    file.write_text(
        f"""
        [indexes.corpus]
        path = "corpus"
        tokenizer = "{DEMO_TOKENIZER}"
        description = "Three functions."
        [indexes.raw]
        path = "raw"
        tokenizer = "bytes"
        [indexes.broken]
        path = "broken"
        tokenizer = "bytes"
        """
    )
    return file


@pytest.fixture
async def indexed(settings: Settings, indexes_file: Path) -> AsyncIterator[Service]:
    """An API with the indexes."""
    changed = settings.model_copy(update={"indexes_file": indexes_file})
    async with run_service(changed, with_worker=False) as service:
        yield service


async def post(service: Service, path: str, body: Any) -> Any:
    answer = await service.client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


# -- Indexes, and the members of each answer


async def test_the_list_of_indexes(indexed: Service, api: Service) -> None:
    """Those that could be opened; names alone, as the original's clients expect, or with details."""
    assert (await indexed.client.get("/indexes")).json() == ["corpus", "raw"]
    corpus, raw = (await indexed.client.get("/indexes?details=true")).json()
    assert corpus.keys() == {one.alias for one in answers.IndexRead.model_fields.values()}
    assert (corpus["name"], corpus["description"]) == ("corpus", "Three functions.")
    assert (corpus["documents"], corpus["shards"]) == (3, 2)
    assert (raw["tokens"], raw["vocabSize"]) == (15, 255)
    # If there are none: an empty list, and no index of any name.
    assert (await api.client.get("/indexes")).json() == []
    for name in POSTS:
        answer = await api.client.post(f"/corpus/{name}", json=BODIES[name])
        assert_problem(answer, 404, "unknown_index")


BODIES: dict[str, Any] = {
    **{name: {"query": "return"} for name in QUERIES},
    "get_document_by_rank": {
        "shard": 0, "rank": 9, "needleLength": 1, "maximumContextLength": 5
    },
    "get_document_by_pointer": {
        "shard": 0, "pointer": 8, "needleLength": 1, "maximumContextLength": 5
    },
    "get_document_by_index": {"documentIndex": 1, "maximumContextLength": 5},
    "get_documents_by_index": [{"documentIndex": 1, "maximumContextLength": 5}] * 2,
}  # fmt: skip


@pytest.mark.parametrize("name", POSTS)
async def test_members_of_answers(indexed: Service, name: str) -> None:
    """Exactly those of the description; the same for snake_case, and unknown members are ignored."""
    answer = await post(indexed, f"/corpus/{name}", BODIES[name])
    model = POSTS[name]
    model.model_validate(answer, strict=name != "find")  # JSON has no tuples
    assert answer.keys() == {one.alias for one in model.model_fields.values()}
    assert answer["index"] == "corpus"
    body = BODIES[name]
    if isinstance(body, dict):
        snake = {re.sub("[A-Z]", lambda m: f"_{m[0].lower()}", key): body[key] for key in body}
        assert await post(indexed, f"/corpus/{name}", snake | {"unknown": [1]}) == answer


async def test_examples_of_the_document_are_accepted(indexed: Service) -> None:
    document = (await indexed.client.get("/openapi.json")).json()
    for name in POSTS:
        operation = document["paths"][f"/{{index}}/{name}"]["post"]
        example = operation["requestBody"]["content"]["application/json"]["example"]
        await post(indexed, f"/corpus/{name}", example)


# -- Answers


async def test_counting(indexed: Service) -> None:
    counted = await post(indexed, "/raw/count", {"query": "an"})
    assert counted == {
        "index": "raw", "tokenIds": [97, 110], "tokens": ["a", "n"], "count": 4, "approx": False,
    }  # fmt: skip
    assert (await post(indexed, "/raw/count", {"query": [97, 110]})) == counted
    found = await post(indexed, "/raw/find", {"query": "an"})
    ((start, end),) = found["segmentByShard"]
    assert (found["cnt"], end - start) == (4, 4)
    clauses = await post(indexed, "/raw/count_cnf", {"query": "ban AND na OR da"})
    assert clauses["tokens"] == [[["b", "a", "n"]], [["n", "a"], ["d", "a"]]]
    assert (clauses["count"], clauses["approx"]) == (2, False)
    ids = {"query": clauses["tokenIds"]}
    assert await post(indexed, "/raw/count_cnf", ids) == clauses
    found = await post(indexed, "/raw/find_cnf", ids)
    assert (found["cnt"], len(found["ptrsByShard"]), len(found["ptrsByShard"][0])) == (2, 1, 2)
    close = await post(
        indexed, "/raw/count_cnf", {"query": "banana AND bandana", "maxDiffTokens": 6}
    )
    assert close["count"] == 0


async def test_what_follows(indexed: Service) -> None:
    after = await post(indexed, "/raw/ntd", {"query": "an"})
    assert after["promptCnt"] == 4
    assert after["resultByTokenId"] == {
        "97": {"contCnt": 3, "prob": 0.75, "token": "a"},
        "100": {"contCnt": 1, "prob": 0.25, "token": "d"},
    }
    assert after["approx"] is False
    prob = await post(indexed, "/raw/prob", {"query": "and"})
    assert (prob["promptCnt"], prob["contCnt"], prob["prob"]) == (4, 1, 0.25)
    never = await post(indexed, "/raw/prob", {"query": "xyz"})
    assert (never["promptCnt"], never["contCnt"], never["prob"]) == (0, 0, -1.0)
    backed = await post(indexed, "/raw/infgram_prob", {"query": "xand"})
    assert (backed["promptCnt"], backed["prob"]) == (4, 0.25)
    assert (backed["suffixLen"], backed["longestSuffix"]) == (2, "an")
    backed = await post(indexed, "/raw/infgram_ntd", {"query": "xan", "maxSupport": 10})
    assert backed["resultByTokenId"] == after["resultByTokenId"]
    assert (backed["suffixLen"], backed["longestSuffix"]) == (2, "an")


async def test_no_suffix_that_occurs(indexed: Service) -> None:
    """Its text is empty; the original returns the whole prompt."""
    for name in ("infgram_ntd", "infgram_prob"):
        answer = await post(indexed, f"/raw/{name}", {"query": "xyz"})
        assert (answer["suffixLen"], answer["longestSuffix"]) == (0, "")


async def test_documents(indexed: Service) -> None:
    tokenizer = FileTokenizer(DEMO_TOKENIZER)
    needle = tokenizer.encode("return")
    found = await post(indexed, "/corpus/find", {"query": needle})
    assert found["cnt"] == 3
    for shard, (start, end) in enumerate(found["segmentByShard"]):
        for rank in range(start, end):
            body = {"shard": shard, "rank": rank, "needleLength": 1, "maximumContextLength": 3}
            one = await post(indexed, "/corpus/get_document_by_rank", body)
            text = TEXTS[one["documentIndex"]]
            whole = tokenizer.encode(text)
            place = whole.index(needle[0])
            assert one["tokenIds"] == whole[place - 3 : place + 4]
            assert one["tokenIds"][one["needleOffset"]] == needle[0]
            assert one["text"] in text
            assert (one["documentLength"], one["displayLength"]) == (
                len(whole),
                len(one["tokenIds"]),
            )
            assert one["metadata"] == {"metadata": {"n": one["documentIndex"]}}
            assert one["blocked"] is False
            assert one["index"] == "corpus"
    pointers = await post(indexed, "/corpus/find_cnf", {"query": [[needle]]})
    for shard, places in enumerate(pointers["ptrsByShard"]):
        for pointer in places:
            body = {
                "shard": shard,
                "pointer": pointer,
                "needleLength": 1,
                "maximumContextLength": 0,
            }
            one = await post(indexed, "/corpus/get_document_by_pointer", body)
            assert one["tokenIds"] == needle
    by_index = [
        await post(
            indexed,
            "/corpus/get_document_by_index",
            {"documentIndex": n, "maximumContextLength": 99},
        )
        for n in range(3)
    ]
    assert [one["text"] for one in by_index] == list(TEXTS)
    several = await post(
        indexed,
        "/corpus/get_documents_by_index",
        [{"documentIndex": n, "maximumContextLength": 99} for n in (2, 0)],
    )
    assert [{**one, "index": "corpus"} for one in several["documents"]] == [
        by_index[2],
        by_index[0],
    ]
    assert (await post(indexed, "/corpus/get_documents_by_index", []))["documents"] == []


async def test_searching(indexed: Service) -> None:
    async def search(**query: str | int) -> Any:
        answer = await indexed.client.get("/corpus/documents/", params=query)
        assert answer.status_code == 200, answer.text
        return answer.json()

    page = await search(search="return")
    assert page.keys() == {one.alias for one in answers.PageRead.model_fields.values()}
    numbers = [one["documentIndex"] for one in page["documents"]]
    assert sorted(numbers) == [0, 1, 2]
    assert (page["page"], page["pageSize"], page["pageCount"], page["totalDocuments"]) == (
        0,
        10,
        1,
        3,
    )
    walked = []
    for number in range(4):
        one = await search(search="return", page=number, pageSize=2, maximumDocumentDisplayLength=1)
        assert (one["pageCount"], one["totalDocuments"]) == (2, 3)
        assert all(document["displayLength"] == 3 for document in one["documents"])
        walked += [document["documentIndex"] for document in one["documents"]]
    assert walked == numbers
    assert (await search(search="absent"))["documents"] == []
    # The path without its slash redirects there.
    answer = await indexed.client.get("/corpus/documents?search=x", follow_redirects=True)
    assert answer.json()["pageSize"] == 10


async def test_every_team_is_told_the_same(guarded: Settings, indexes_file: Path) -> None:
    """An index holds nothing of any team; other teams may read it."""
    changed = guarded.model_copy(update={"indexes_file": indexes_file})
    async with run_service(changed, with_worker=False) as service:
        requests = [("POST", f"/corpus/{name}", BODIES[name]) for name in POSTS]
        for method, path, body in [
            *requests,
            ("GET", "/indexes", None),
            ("GET", "/corpus/documents/?search=x", None),
            ("POST", "/absent/count", {"query": "x"}),
        ]:
            received = []
            for team in ("red", "blue"):
                token = sign({"team_id": team, "token_id": team, "scopes": ["use"]})
                answer = await service.client.request(
                    method, path, json=body, headers=bearer(token)
                )
                received.append((answer.status_code, answer.content))
            assert received[0] == received[1], path
            assert_problem(
                await service.client.request(method, path, json=body), 401, "unauthenticated"
            )


# -- Bad input


BAD: list[tuple[str, Any, str]] = [
    # (route, body, field that the message names)
    ("count", {}, "query"),
    ("count", {"query": ""}, "query"),
    ("count", {"query": []}, "query"),
    ("count", {"query": None}, "query"),
    ("count", {"query": 5}, "query"),
    ("count", {"query": {"text": "x"}}, "query"),
    ("count", {"query": True}, "query"),
    ("count", {"query": "x" * 1001}, "query"),
    ("count", {"query": [5] * 501}, "query"),
    ("count", {"query": [5, -1]}, "query.tokens.1"),
    ("count", {"query": [5, 2**24 + 1]}, "query.tokens.1"),
    ("count", {"query": [5, 65_535]}, "query.1"),  # separates documents
    ("count", {"query": [5, 60_000]}, "query.1"),  # beyond the vocabulary
    ("count", {"query": [10**30]}, "query.tokens.0"),
    ("count", {"query": [1.5]}, "query.tokens.0"),
    ("count", {"query": [5.5]}, "query.tokens.0"),
    ("count", {"query": ["5"]}, "query.tokens.0"),
    ("count", {"query": [True]}, "query.tokens.0"),
    ("count", {"query": [None]}, "query.tokens.0"),
    ("count", {"query": [[5]]}, "query.tokens.0"),
    ("count", [], "body"),
    ("count", "text", "body"),
    ("count", None, "body"),
    ("count", {"query": "a\u0000b"}, "body.query"),
    ("count_cnf", {"query": ""}, "query"),
    ("count_cnf", {"query": []}, "query"),
    ("count_cnf", {"query": [[]]}, "query.tokens.0"),
    ("count_cnf", {"query": [[[]]]}, "query.tokens.0.0"),
    ("count_cnf", {"query": [5]}, "query.tokens.0"),
    ("count_cnf", {"query": [[5]]}, "query.tokens.0.0"),
    ("count_cnf", {"query": "a AND b AND c AND d AND e"}, "query"),
    ("count_cnf", {"query": "a OR b OR c OR d OR e"}, "query"),
    ("count_cnf", {"query": [[[5]]] * 5}, "query"),
    ("count_cnf", {"query": [[[5]] * 5]}, "query.tokens.0"),
    ("count_cnf", {"query": [[[5] * 250, [6] * 250], [[7]]]}, "query"),
    ("count_cnf", {"query": [[[5, 60_000]]]}, "query.0.0.1"),
    ("count_cnf", {"query": "a AND "}, "query.1.0"),
    ("count_cnf", {"query": "a OR  OR b"}, "query.0.1"),
    ("count_cnf", {"query": "x" * 1001}, "query"),
    *[
        (route, {"query": "a", member: value}, member)
        for route, member, most in (
            ("find_cnf", "maxClauseFreq", 500_000),
            ("count_cnf", "maxClauseFreq", 500_000),
            ("find_cnf", "maxDiffTokens", 1000),
            ("ntd", "maxSupport", 10_000),
            ("infgram_ntd", "maxSupport", 10_000),
        )
        for value in (0, -1, most + 1, 10**30, 1.5, "many", [1], 1e400)
    ],
    *[
        (route, BODIES[route] | {member: value}, member)
        for route, member in (
            ("get_document_by_rank", "shard"),
            ("get_document_by_rank", "rank"),
            ("get_document_by_rank", "needleLength"),
            ("get_document_by_rank", "maximumContextLength"),
            ("get_document_by_pointer", "shard"),
            ("get_document_by_pointer", "pointer"),
            ("get_document_by_index", "documentIndex"),
            ("get_document_by_index", "maximumContextLength"),
        )
        for value in (-1, 2**63, 10**30, 1.5, "x", None)
    ],
    ("get_document_by_rank", BODIES["get_document_by_rank"] | {"needleLength": 10_001}, "needleLength"),
    ("get_document_by_index", {"documentIndex": 0}, "maximumContextLength"),
    ("get_documents_by_index", {"documentIndex": 0, "maximumContextLength": 5}, "body"),
    ("get_documents_by_index", [BODIES["get_document_by_index"]] * 101, "body"),
    ("get_documents_by_index", [{"documentIndex": 0, "maximumContextLength": 9000}] * 23,
     "maximumContextLength"),
]  # fmt: skip


async def test_bad_bodies_of_queries(indexed: Service) -> None:
    for name, body, field in BAD:
        answer = await indexed.client.post(
            f"/corpus/{name}",
            content=json.dumps(body),
            headers={"Content-Type": "application/json"},
        )
        problem = assert_problem(answer, 422, "invalid_request")
        assert any(
            error["field"] == field or error["field"].startswith(f"{field}.")
            for error in problem["errors"]
        ), (name, body, problem)
    assert (await post(indexed, "/corpus/count", {"query": "return"}))["count"]


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("get_document_by_rank", {"shard": 2}),
        ("get_document_by_rank", {"rank": 100_000}),
        ("get_document_by_rank", {"rank": 2**62}),
        ("get_document_by_pointer", {"shard": 2}),
        ("get_document_by_pointer", {"pointer": 7}),  # within a token
        ("get_document_by_pointer", {"pointer": 0}),  # where documents are separated
        ("get_document_by_pointer", {"pointer": 2**62}),
        ("get_document_by_index", {"documentIndex": 3}),
        ("get_document_by_index", {"documentIndex": 2**62}),
    ],
)
async def test_what_an_index_does_not_have(indexed: Service, name: str, body: Any) -> None:
    answer = await indexed.client.post(f"/corpus/{name}", json=BODIES[name] | body)
    problem = assert_problem(answer, 422, "invalid_query")
    assert re.search("must be|begins there", problem["detail"])


async def test_bodies_that_are_no_json(indexed: Service) -> None:
    headers = {"Content-Type": "application/json"}
    for content in (
        *(
            b"",
            b"{",
            b"\xff\xfe",
            b'{"query": "\\ud800"}',
            b'{"query": NaN}',
            b'{"query": Infinity}',
        ),
        b'{"query":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"query": ' + b"9" * 100_000 + b"}",
        b'{"query": [' + b"9" * 5000 + b"]}",
    ):
        for name in ("count", "count_cnf"):
            answer = await indexed.client.post(f"/corpus/{name}", content=content, headers=headers)
            assert_problem(answer, 422, "invalid_request")
    answer = await indexed.client.post("/corpus/count", content=b"query=x")
    assert_problem(answer, 415, "unsupported_media_type")


async def test_too_many_tokens_of_few_characters(indexed: Service) -> None:
    answer = await indexed.client.post("/raw/count", json={"query": "\N{SNOWMAN}" * 167})
    problem = assert_problem(answer, 422, "invalid_request", "query")
    assert "501 tokens, and 500 are most" in problem["detail"]
    assert (await post(indexed, "/raw/count", {"query": "\N{SNOWMAN}" * 166 + "ab"}))["count"] == 0


async def test_the_bounds_themselves_are_taken(indexed: Service) -> None:
    for name, body in (
        ("count", {"query": "x" * 500}),
        ("count", {"query": [5] * 500}),
        ("count_cnf", {"query": [[[5]] * 4] * 4, "maxClauseFreq": 500_000, "maxDiffTokens": 1000}),
        ("ntd", {"query": "return", "maxSupport": 10_000}),
        ("ntd", {"query": "return", "maxSupport": None}),
        ("get_document_by_index", {"documentIndex": 0, "maximumContextLength": 10_000}),
        ("get_document_by_index", {"documentIndex": 0, "maximumContextLength": 0}),
    ):
        await post(indexed, f"/corpus/{name}", body)


async def test_bad_searches(indexed: Service) -> None:
    for query, field in (
        ("", "search"),
        ("search=", "search"),
        (f"search={'x' * 1001}", "search"),
        ("search=x&page=-1", "page"),
        ("search=x&page=1e9", "page"),
        (f"search=x&page={10**30}", "page"),
        ("search=x&page_size=0", "page_size"),
        ("search=x&pageSize=101", "pageSize"),
        ("search=x&maximum_document_display_length=0", "maximum_document_display_length"),
        ("search=x&maximum_document_display_length=9000&page_size=100", "page_size"),
        ("search=%00", "item.search"),
    ):
        answer = await indexed.client.get(f"/corpus/documents/?{query}")
        assert_problem(answer, 422, "invalid_request", field)
    last = await indexed.client.get(f"/corpus/documents/?search=def&page={2**40}")
    assert (last.status_code, last.json()["documents"]) == (200, [])


async def test_names_that_are_none(indexed: Service) -> None:
    for name in (
        *(
            "absent",
            "CORPUS",
            "corpus ",
            " corpus",
            "corpus%00",
            "..",
            "%2e%2e",
            "%2e%2e%2f",
            "a%2fb",
        ),
        *("%ff", "%F0%9F%A6%99", "'; DROP TABLE results", "*", "null", "x" * 5000, "corpus;", "v1"),
    ):
        answer = await indexed.client.post(f"/{name}/count", json={"query": "x"})
        assert answer.status_code == 404, (name, answer.text)
        assert len(answer.content) < 2000
        if answer.headers["content-type"] == "application/problem+json":
            assert answer.json()["code"] in ("unknown_index", "not_found")
    problem = assert_problem(
        await indexed.client.post("/absent/count", json={"query": "x"}), 404, "unknown_index"
    )
    assert problem["known_indexes"] == ["corpus", "raw"]


async def test_an_index_that_was_not_opened(indexed: Service) -> None:
    """The response has the reason; the others are not affected."""
    answer = await indexed.client.post("/broken/count", json={"query": "x"})
    problem = assert_problem(answer, 503, "index_unavailable")
    assert "table.0" in problem["detail"]
    assert (await post(indexed, "/raw/count", {"query": "an"}))["count"] == 4


async def test_other_methods(indexed: Service) -> None:
    for method in ("GET", "PUT", "DELETE", "PATCH"):
        answer = await indexed.client.request(method, "/corpus/count")
        assert_problem(answer, 405, "method_not_allowed")
    assert_problem(await indexed.client.post("/corpus/other", json={}), 404, "not_found")


# -- Next to the other routes


def _all(service: Service) -> list[RouteContext]:
    """The routes that have methods, those of included routers too."""
    routes = [route for route in iter_route_contexts(service.app.routes) if route.methods]
    assert len(routes) > 90
    return routes


async def test_no_route_hides_another(indexed: Service) -> None:
    """Each path, with a value that no other route has in it, is answered by its own route."""
    raw = [route for module in (*app._RAW, *app._OF_INDEXES) for route in module.raw.routes]
    in_order = list(iter_route_contexts([*exports.router.routes, *raw, *indexed.app.routes]))
    for route in _all(indexed):
        assert route.path_format is not None
        path = re.sub(r"{\w+}", "some-name", route.path_format)
        for method in route.methods or ():
            first = next(
                one
                for one in in_order
                if method in (one.methods or ()) and one.path_regex.match(path)
            )
            assert first.path_format == route.path_format, path


async def test_no_index_is_called_as_another_route_begins(indexed: Service) -> None:
    paths = [route.path_format or "" for route in _all(indexed)]
    first = {path.split("/")[1] for path in paths} - {"", "{index}"}
    assert first <= RESERVED_NAMES


# -- Off the event loop


async def test_the_loop_goes_on_while_queries_run(indexed: Service) -> None:
    """A slow query holds a thread; the loop ticks, and other requests are answered."""
    begun, may_end = asyncio.Event(), time.monotonic() + 30
    loop = asyncio.get_running_loop()
    gate: list[bool] = []

    def slow(_: Engine) -> str:
        loop.call_soon_threadsafe(begun.set)
        while not gate and time.monotonic() < may_end:
            time.sleep(0.001)
        return "ended" if gate else "gave up"

    running = asyncio.create_task(indexed.services.indexes.run("corpus", slow))
    await begun.wait()
    for _ in range(20):
        assert (await indexed.client.get("/health")).status_code == 200
        assert (await post(indexed, "/corpus/count", {"query": "return"}))["count"]
    assert not running.done()
    gate.append(True)
    assert await running == "ended"


async def test_too_many_at_once(settings: Settings, indexes_file: Path) -> None:
    """Beyond the threads and the queue: 503, with the message of the original."""
    changed = settings.model_copy(
        update={"indexes_file": indexes_file, "index_threads": 1, "index_queue": 1}
    )
    async with run_service(changed, with_worker=False) as service:
        gate: list[bool] = []

        def slow(_: Engine) -> None:
            while not gate:
                time.sleep(0.001)

        held = [asyncio.create_task(service.services.indexes.run("raw", slow)) for _ in range(2)]
        await asyncio.sleep(0)
        answer: httpx.Response = await service.client.post("/raw/count", json={"query": "x"})
        gate.append(True)
        await asyncio.gather(*held)
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) > 0
        problem = answer.json()
        assert problem["type"] == "server-overloaded"
        assert problem["title"] == "Server overloaded"
        assert problem["detail"]
        assert (await post(service, "/raw/count", {"query": "an"}))["count"] == 4
