"""Embeddings and scores on real vLLM: its own numbers to the last bit, and nearly those of transformers."""

import array
import json
import math
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from app.inference.triton_errors import RefusedError
from tests.conftest import Service, make_settings
from tests.e2e.small_models import DOCUMENTS, IDS, QUERY, TEXTS, SmallModels
from tests.e2e.test_recipes import RESULTS, count_results, run
from tests.integration.support import assert_openai_error, openai_client, read, serve
from tests.postgres import PostgresServer

pytestmark = pytest.mark.timeout(600)

LONG = "a b c " * 100
DIGITS = 1e-5  # vLLM's arithmetic and that of transformers agree to about the sixth digit


@dataclass
class Pooling:
    triton: SmallModels
    expected: dict[str, Any]  # by transformers


@pytest.fixture(scope="module")
def pooling(
    small_models: SmallModels, entries: dict[str, Path], computed: dict[str, Any]
) -> Iterator[Pooling]:
    """Triton with two tiny models."""
    for name in ("embed", "rank"):
        assert json.loads((entries[name] / "1" / "model.json").read_text())["runner"] == "pooling"
    with small_models.serving(entries, "embed", "rank"):
        yield Pooling(small_models, computed)


@pytest.fixture
async def port(
    postgres_server: PostgresServer, database_name: str, pooling: Pooling
) -> AsyncIterator[Service]:
    """The service behind a real port."""
    settings = make_settings(
        postgres_server,
        database_name,
        pooling.triton,
        model_repository=pooling.triton.repository,
        lease_seconds=30.0,
    )
    async with serve(settings, with_worker=True) as running:
        yield running


async def vectors(port: Service, texts: list[Any], **members: Any) -> list[list[float]]:
    """The vectors of texts that are sent one by one, by the official client."""
    found = []
    async with openai_client(port) as client:
        for text in texts:
            answer = await client.embeddings.create(model="embed", input=text, **members)
            found.append(answer.data[0].embedding)
    return found


async def compute(pooling: Pooling, model: str, prompt: str, **parameters: Any) -> list[float]:
    """The engine's own numbers, which Triton returns."""
    async with pooling.triton.client() as client:
        (delta,) = [one async for one in client.generate(model, prompt, parameters)]
    assert delta.vector is not None
    return array.array("f", delta.vector).tolist()


async def test_vectors_are_the_engines_own(port: Service, pooling: Pooling) -> None:
    """To the last bit; and those of another implementation, nearly."""
    expected = pooling.expected
    for members, parameters, known in (
        ({}, {}, expected["vectors"]),
        ({"encoding_format": "float"}, {}, expected["vectors"]),
        ({"dimensions": 16}, {"dimensions": 16}, expected["short"]),
        ({"extra_body": {"normalize": False}}, {"normalize": False}, expected["raw"]),
    ):
        found = await vectors(port, TEXTS, **members)
        own = [await compute(pooling, "embed", one, task="embed", **parameters) for one in TEXTS]
        assert found == own, members
        for vector, reference in zip(found, known, strict=True):
            assert vector == pytest.approx(reference, abs=DIGITS), members
    (of_ids,) = await vectors(port, [IDS])
    assert of_ids == pytest.approx(expected["ids"], abs=DIGITS)


async def test_many_at_once_are_close_to_them(port: Service, pooling: Pooling) -> None:
    """The last digits depend on what else the engine computes in the same step."""
    async with openai_client(port) as client:
        answer = await client.embeddings.create(model="embed", input=TEXTS * 20)
    for place, item in enumerate(answer.data):
        expected = pooling.expected["vectors"][place % len(TEXTS)]
        assert item.embedding == pytest.approx(expected, abs=DIGITS)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 60


async def test_a_vector_is_stored_and_read_as_any_result(port: Service, pooling: Pooling) -> None:
    body = {"model": "embed", "content": TEXTS[0], "embedding": {}}
    sent = (await port.client.post("/results/", json=body)).json()
    result = await read(port, sent["id"], wait=60)
    numbers = array.array("f", result["result"]["embedding"]).tolist()
    assert numbers == await compute(pooling, "embed", TEXTS[0], task="embed")
    assert result["usage"]["prompt_tokens"] == len("helloworld") + 2


async def test_scores_are_the_engines_own(port: Service, pooling: Pooling) -> None:
    found, own = [], []
    for document in DOCUMENTS:  # one by one
        body = {"model": "rank", "text_1": QUERY, "text_2": document}
        (item,) = (await port.client.post("/score", json=body)).json()["data"]
        found.append(item["score"])
        own += await compute(pooling, "rank", json.dumps([QUERY, document]), task="score")
    assert found == own
    assert found == pytest.approx(pooling.expected["scores"], abs=DIGITS)


async def test_documents_of_one_query(port: Service, pooling: Pooling) -> None:
    """One result of one request to Triton: the numbers of the pairs, and the sum of their tokens."""

    async def score(*documents: str, **options: bool) -> dict[str, Any]:
        texts = [{"role": "document", "content": one} for one in documents]
        messages = [{"role": "query", "content": QUERY}, *texts]
        body = {"model": "rank", "messages": messages, "score": options}
        sent = (await port.client.post("/results/", json=body)).json()
        return await read(port, sent["id"], wait=60)

    result = await score(*DOCUMENTS)
    assert result["result"]["scores"] == pytest.approx(pooling.expected["scores"], abs=DIGITS)
    body = {"model": "rank", "query": QUERY, "documents": DOCUMENTS}
    pairs = (await port.client.post("/rerank", json=body)).json()["usage"]["total_tokens"]
    assert result["usage"]["prompt_tokens"] == pairs
    refused = await score(*DOCUMENTS, LONG)
    assert (refused["state"], refused["error"]["code"]) == ("failed", "invalid_request")
    cut = await score(*DOCUMENTS, LONG, truncate=True)
    assert cut["result"]["scores"][:-1] == pytest.approx(result["result"]["scores"], abs=DIGITS)


async def test_rankings_in_each_shape(port: Service, pooling: Pooling) -> None:
    best = sorted(enumerate(pooling.expected["scores"]), key=lambda one: -one[1])
    order = [place for place, _ in best]
    body: dict[str, Any] = {"query": QUERY, "documents": DOCUMENTS}
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):  # the only cross encoder needs no name
        answer = (await port.client.post(path, json=body)).json()
        assert [one["index"] for one in answer["results"]] == order
        found = [one["relevance_score"] for one in answer["results"]]
        assert found == pytest.approx([score for _, score in best], abs=DIGITS)
    tei = {"query": QUERY, "texts": DOCUMENTS, "return_text": True}
    items = (await port.client.post("/rerank", json=tei)).json()
    assert [one["text"] for one in items] == [DOCUMENTS[place] for place in order]
    raw = (await port.client.post("/rerank", json=tei | {"raw_scores": True})).json()
    assert [one["index"] for one in raw] == order
    activated = [1 / (1 + math.exp(-one["score"])) for one in raw]
    assert activated == pytest.approx([one["score"] for one in items], abs=DIGITS)


async def test_tei_embeds(port: Service, pooling: Pooling) -> None:
    for text in TEXTS:
        (numbers,) = (await port.client.post("/embed", json={"inputs": text})).json()
        assert numbers == await compute(pooling, "embed", text, task="embed")


async def test_lengths(port: Service) -> None:
    long = {"model": "embed", "input": LONG}
    error = assert_openai_error(await port.client.post("/v1/embeddings", json=long), 400)
    assert error["code"] == "context_length_exceeded"
    cut = await port.client.post("/v1/embeddings", json=long | {"truncate_prompt_tokens": -1})
    assert cut.json()["usage"]["prompt_tokens"] == 128
    ranked = {"query": QUERY, "documents": [LONG]}
    whole = await port.client.post("/rerank", json=ranked | {"truncate": False})
    assert "128" in assert_openai_error(whole, 400)["message"]
    assert (await port.client.post("/rerank", json=ranked)).json()["usage"]["total_tokens"] == 128


async def test_requests_that_the_model_refuses(port: Service) -> None:
    wrong = {"model": "embed", "input": "x", "dimensions": 17}
    error = assert_openai_error(await port.client.post("/v1/embeddings", json=wrong), 400)
    assert "dimensions" in error["message"]
    assert_openai_error(
        await port.client.post("/v1/embeddings", json={"model": "embed", "input": [9_999]}), 400
    )


async def test_a_generation_is_refused_by_the_engine(pooling: Pooling) -> None:
    """Health checks are generations: the refusal shows that the engine works."""
    async with pooling.triton.client() as client:
        for model in ("embed", "rank"):
            with pytest.raises(RefusedError, match="pooling model"):
                async for _ in client.generate(model, "a", {"max_tokens": 1}):
                    pass


async def test_coheres_client_ranks_documents(
    port: Service, connection: asyncpg.Connection, tmp_path: Path
) -> None:
    """The program of docs/recipes.md, unmodified; its scores are those of the other dialects."""
    output = (await run(port, "Cohere", tmp_path)).splitlines()
    assert await count_results(connection) == RESULTS["Cohere"]
    documents = ["An array of numbers.", "A muscle.", "A tensor is an array."]
    body = {"model": "rank", "text_1": "What is a tensor?", "text_2": documents}
    answer = await port.client.post("/v1/score", json=body)
    scores = [one["score"] for one in answer.json()["data"]]
    ranked = sorted(range(3), key=lambda place: -scores[place])[:2]
    found = [line.rpartition(" ") for line in output[:2]]
    assert [text for text, _, _ in found] == [documents[place] for place in ranked]
    for (_, _, score), place in zip(found, ranked, strict=True):
        assert float(score) == pytest.approx(scores[place], abs=DIGITS)
    assert output[2] == "model_not_found"
