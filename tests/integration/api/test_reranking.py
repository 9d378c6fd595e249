"""Reranking, scores and TEI's embeddings, with a scripted cross encoder."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import asyncpg
import httpx
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from app.cli.up.triton import EmbeddedTriton
from app.core.settings import Settings
from tests.conftest import Service, make_settings, run_service, run_triton
from tests.conventions import check_model_span
from tests.integration.support import assert_openai_error, assert_problem, read, until
from tests.otlp import collecting
from tests.pooling_models import pooling_entries
from tests.postgres import PostgresServer

QUERY = "red green blue"
# The scripted score is the share of the query's words that a document has.
DOCUMENTS = ["a blue one", "none", "blue green red", "green and red"]
SCORES = [1 / 3, 0.0, 1.0, 2 / 3]
ORDER = [2, 3, 0, 1]
RANKED: dict[str, Any] = {"model": "ranking", "query": QUERY, "documents": DOCUMENTS}
PAIR = [{"role": "query", "content": QUERY}, {"role": "document", "content": DOCUMENTS[0]}]


@pytest.fixture(scope="module")
def pooling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedTriton]:
    entries = pooling_entries(tmp_path_factory.mktemp("models"))
    with run_triton(EmbeddedTriton, tmp_path_factory.mktemp("triton"), entries) as server:
        yield server


@pytest.fixture
async def service(
    postgres_server: PostgresServer, database_name: str, pooling: EmbeddedTriton
) -> AsyncIterator[Service]:
    repository = pooling.environment["LLM_MODEL_REPOSITORY"]
    settings: Settings = make_settings(
        postgres_server, database_name, pooling, model_repository=repository
    )
    async with run_service(settings, with_worker=True) as running:
        yield running


async def test_calls_follow_the_conventions_of_telemetry(
    postgres_server: PostgresServer, database_name: str, pooling: EmbeddedTriton
) -> None:
    repository = pooling.environment["LLM_MODEL_REPOSITORY"]
    with collecting() as collector:
        settings: Settings = make_settings(
            *(postgres_server, database_name, pooling),
            model_repository=repository,
            otlp_endpoint=collector.url,
        )
        async with run_service(settings, with_worker=True) as running:
            await post(running, "/v1/embeddings", {"model": "pooling", "input": QUERY})
            await post(running, "/rerank", RANKED | {"documents": DOCUMENTS[:1]})
    calls = [span for span in collector.spans if span.kind == Span.SPAN_KIND_CLIENT]
    assert [span.name for span in calls] == ["embeddings pooling", "score ranking"]
    vector, score = map(check_model_span, calls)
    assert vector["gen_ai.embeddings.dimension.count"] > 1
    assert vector["gen_ai.usage.input_tokens"] > 0 < score["gen_ai.usage.input_tokens"]


async def post(service: Service, path: str, body: Any) -> Any:
    answer = await service.client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def ranked(answer: dict[str, Any]) -> list[Any]:
    return [(one["index"], one["relevance_score"]) for one in answer["results"]]


BEST = [(place, pytest.approx(SCORES[place])) for place in ORDER]


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_documents_are_ranked(service: Service, path: str) -> None:
    answer = await post(service, path, RANKED)
    assert ranked(answer) == BEST
    assert (answer["model"], answer["usage"]["total_tokens"] > 12) == ("ranking", True)
    has_documents = path != "/v2/rerank"
    for one in answer["results"]:
        expected = {"text": DOCUMENTS[one["index"]]} if has_documents else None
        assert one.get("document") == expected
    best = await post(service, path, RANKED | {"top_n": 1, "return_documents": not has_documents})
    assert ranked(best) == BEST[:1]
    assert ("document" in best["results"][0]) != has_documents
    objects = [{"text": one} for one in DOCUMENTS]
    assert ranked(await post(service, path, RANKED | {"documents": objects, "top_n": 0})) == BEST


async def test_teis_shape_is_told_by_its_texts(service: Service) -> None:
    body = {"query": QUERY, "texts": DOCUMENTS}
    plain = [{"index": place, "score": pytest.approx(SCORES[place])} for place in ORDER]
    assert await post(service, "/rerank", body) == plain
    full = await post(service, "/rerank", body | {"return_text": True, "raw_scores": True})
    assert [one["text"] for one in full] == [DOCUMENTS[place] for place in ORDER]
    assert full[0]["score"] == pytest.approx(10)
    wrong = await service.client.post("/rerank", json=body | {"model": "pooling"})
    assert (wrong.status_code, wrong.json()["error_type"]) == (422, "validation")


async def test_pairs_are_scored_in_their_order(service: Service) -> None:
    answer = await post(service, "/score", {"text_1": QUERY, "text_2": DOCUMENTS})
    assert answer["object"] == "list"
    assert [(one["index"], one["object"]) for one in answer["data"]] == [
        (place, "score") for place in range(4)
    ]
    assert [one["score"] for one in answer["data"]] == pytest.approx(SCORES)
    pairs = {"text_1": ["a b", "a"], "text_2": ["b", "x"], "use_activation": False}
    answer = await post(service, "/v1/score", pairs | {"model": "ranking"})
    assert [one["score"] for one in answer["data"]] == pytest.approx([5, 0])
    one = await post(service, "/score", {"text_1": "a", "text_2": "a"})
    assert [item["score"] for item in one["data"]] == [1]


async def test_tei_embeds(service: Service) -> None:
    (first, second) = await post(service, "/embed", {"inputs": ["x", "y"]})
    assert first != second
    assert await post(service, "/embed", {"inputs": "x", "truncate": True}) == [first]
    assert len((await post(service, "/embed", {"inputs": "x", "dimensions": 3}))[0]) == 3
    raw = (await post(service, "/embed", {"inputs": "x", "normalize": False}))[0]
    assert raw != first


async def test_each_pair_is_a_result(service: Service, connection: asyncpg.Connection) -> None:
    answer = await service.client.post("/rerank", json=RANKED)
    ids = answer.headers["X-Result-Id"].split(", ")
    results = [await read(service, one) for one in ids]
    assert [one["result"]["score"] for one in results] == pytest.approx(SCORES)
    assert {one["kind"] for one in results} == {"score"}
    assert results[0]["parameters"] == {"task": "score", "truncate": True}
    context = (await service.client.get(f"/contexts/{results[0]['context_id']}")).json()
    assert context["messages"] == PAIR
    body = {"model": "ranking", "messages": PAIR, "score": {}}
    sent = (await service.client.post("/results/", json=body)).json()
    scored = await read(service, sent["id"], wait=30)
    assert scored["result"] == results[0]["result"]
    saved = await service.client.post(
        f"/models/send/ranking/{context['id']}", json={"score": {"raw": True}}
    )
    raw = await read(service, saved.json()["id"], wait=30)
    assert raw["result"]["score"] == pytest.approx(10 * SCORES[0])
    retried = (await service.client.post(f"/results/{raw['id']}/retry")).json()
    assert (await read(service, retried["id"], wait=30))["result"] == raw["result"]


RANKING = [PAIR[0], *({"role": "document", "content": one} for one in DOCUMENTS)]


async def test_a_query_with_its_documents_is_one_result(service: Service) -> None:
    async def scored(path: str, body: Any) -> Any:
        sent = await service.client.post(path, json=body)
        return await read(service, sent.json()["id"], wait=30)

    body: dict[str, Any] = {"model": "ranking", "messages": RANKING, "score": {"raw": True}}
    sent = await scored("/results/", body)
    assert (sent["kind"], sent["state"]) == ("score", "completed")
    assert sent["result"] == {"scores": pytest.approx([10 * one for one in SCORES])}
    assert sent["usage"]["prompt_tokens"] == 3 + sum(len(one.split()) for one in DOCUMENTS)
    path = f"/models/send/ranking/{sent['context_id']}"
    again = await scored(path, {"score": {}})
    assert again["result"] == {"scores": pytest.approx(SCORES)}
    assert (await scored(f"/results/{sent['id']}/retry", {}))["result"] == sent["result"]
    most = await scored("/results/", body | {"messages": [PAIR[0]] + [PAIR[1]] * 1000})
    assert most["result"]["scores"] == pytest.approx([10 * SCORES[0]] * 1000)


async def test_documents_are_bounded(service: Service) -> None:
    body: dict[str, Any] = {"model": "ranking", "score": {}}
    long = {"role": "query", "content": "x" * 2000}
    for messages, words in (
        ([PAIR[0]] + [PAIR[1]] * 1001, "1,001 documents"),
        ([long] + [PAIR[1]] * 1000, "2,010,000 characters"),
        ([PAIR[0], PAIR[1], PAIR[0]], "one or more"),
    ):
        sent = await service.client.post("/results/", json=body | {"messages": messages})
        assert_problem(sent, 422, "invalid_request", "messages")
        assert words in sent.json()["detail"]


@pytest.mark.parametrize("is_retried", [False, True])
async def test_each_document_counts_its_query(service: Service, is_retried: bool) -> None:
    """150 tokens by their bytes, but the model reads the query 50 times."""
    limits = service.services.limits

    async def send(documents: int) -> httpx.Response:
        query = {"role": "query", "content": "x" * 400}
        messages = [query, *[{"role": "document", "content": "y"}] * documents]
        body = {"model": "ranking", "score": {}, "messages": messages}
        return await service.client.post("/results/", json=body)

    ended = await read(service, (await send(50)).json()["id"], wait=30)
    path = f"/results/{ended['id']}/retry"
    await limits.set("default", "ranking", {"tokens_per_minute": 3000})

    async def is_known() -> bool:
        return limits.of("default", "ranking").tokens_per_minute == 3000

    await until(is_known)
    # The budget of a whole minute admits any request.
    first = await service.client.post(path) if is_retried else await send(50)
    assert first.status_code == 202, first.text
    assert_problem(await send(1), 429, "limit_reached")


async def test_pairs_are_erased(service: Service, connection: asyncpg.Connection) -> None:
    await post(service, "/rerank", RANKED | {"store": False})
    erased = "SELECT count(*) = 4 FROM results WHERE erased_at IS NOT NULL"
    await until(lambda: connection.fetchval(erased))
    left = "SELECT count(*) FROM results WHERE num_nonnulls(vector, output, prompt) > 0"
    assert await connection.fetchval(left) == 0
    assert await connection.fetchval("SELECT count(messages) FROM contexts") == 0


@pytest.mark.parametrize(
    "body",
    [
        {"query": "x"},
        {"query": "x", "documents": ["x"], "texts": ["x"]},
        {"query": "", "documents": ["x"]},
        {"query": "x", "documents": []},
        {"query": "x", "documents": [""]},
        {"query": "x", "documents": [{"body": "x"}]},
        {"query": "x", "documents": "x"},
        {"query": "x", "documents": ["x"] * 1001},
        {"query": "x", "documents": ["x"], "top_n": -1},
        {"query": "x", "documents": ["x"], "rank_fields": ["title"]},
        {"query": ["x"], "documents": ["x"]},
        {"query": "x\x00", "documents": ["x"]},
        {"query": "x", "documents": ["x"], "model": "pooling"},
    ],
)
async def test_wrong_rankings(service: Service, body: dict[str, Any]) -> None:
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        assert_openai_error(await service.client.post(path, json={"model": "ranking"} | body), 400)
    assert (await service.client.get("/results/")).json() == []


WRONG_SCORES: list[dict[str, Any]] = [
    {"text_1": "x"},
    {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]},
    {"text_1": [], "text_2": []},
    {"text_1": "x", "text_2": ["x"] * 1001},
    {"text_1": "x", "text_2": "x", "model": "pooling"},
    {"text_1": "x", "text_2": "x", "truncate_prompt_tokens": 3},
]
WRONG_INPUTS: list[dict[str, Any]] = [
    {"inputs": []}, {"inputs": ""}, {"inputs": [1]}, {"inputs": ["x"] * 1001}, {},
]  # fmt: skip


async def test_wrong_scores_and_texts(service: Service) -> None:
    for body in WRONG_SCORES:
        assert_openai_error(await service.client.post("/score", json=body), 400)
    for body in WRONG_INPUTS:
        answer = await service.client.post("/embed", json=body)
        assert (answer.status_code, answer.json()["error_type"]) == (422, "validation")
    native: dict[str, Any] = {"model": "ranking", "score": {}}
    for messages in (PAIR[:1], PAIR[::-1], [*PAIR, PAIR[0]]):
        sent = await service.client.post("/results/", json=native | {"messages": messages})
        assert_problem(sent, 422, "invalid_request", "messages")
    sent = await service.client.post("/results/", json=native | {"content": "x"})
    assert_problem(sent, 422, "invalid_request", "content")
    chat = {"model": "ranking", "messages": [{"role": "user", "content": "x"}]}
    error = assert_openai_error(await service.client.post("/v1/chat/completions", json=chat), 400)
    assert "scores" in error["message"]


async def test_a_failed_pair_fails_the_request(service: Service) -> None:
    body = RANKED | {"documents": ["{{fail}}", "x"]}
    error = assert_openai_error(await service.client.post("/rerank", json=body), 502)
    assert error["code"] == "model_error"
    tei = {"query": "x", "texts": ["{{fail}}"]}
    answer = await service.client.post("/rerank", json=tei)
    assert (answer.status_code, answer.json()["error_type"]) == (424, "generation")
