"""Embeddings and scores on real vLLM: its own numbers, to the last bit."""

import array
import json
import math
import subprocess
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from app.cli.up.triton import EmbeddedTriton
from app.inference.model_repository import write_entry
from app.inference.triton_errors import RefusedError
from tests.conftest import TRITON_VENV, Service, make_settings, run_triton
from tests.e2e.test_recipes import RESULTS, count_results, run
from tests.integration.support import assert_openai_error, openai_client, read, serve
from tests.postgres import PostgresServer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

TEXTS = ["hello world", "x", "a longer text, with marks!"]
IDS = [2, 5, 6, 3]  # of `ab`, with the tokens around it
QUERY, DOCUMENTS = "what is it", ["it is this", "no", "hello world"]
LONG = "a b c " * 100


@dataclass
class Pooling:
    triton: EmbeddedTriton
    expected: dict[str, Any]  # vLLM's own results


@pytest.fixture(scope="module")
def pooling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pooling]:
    """Triton with two tiny models, and the numbers that vLLM computes with them by itself."""
    made = tmp_path_factory.mktemp("pooling")
    given = {"texts": TEXTS, "ids": IDS, "query": QUERY, "documents": DOCUMENTS}
    (made / "texts.json").write_text(json.dumps(given))
    maker = Path(__file__).with_name("make_pooling_models.py")
    subprocess.run([TRITON_VENV / "bin" / "python", "-I", maker, made], check=True, cwd=made)
    entries = {name: made / "repository" / name for name in ("embed", "rank")}
    for name, entry in entries.items():
        entry.parent.mkdir(exist_ok=True)
        write_entry(entry, made / name, engine={"dtype": "float32"})
        assert json.loads((entry / "1" / "model.json").read_text())["runner"] == "pooling"
    with run_triton(EmbeddedTriton, tmp_path_factory.mktemp("triton"), entries) as server:
        yield Pooling(server, json.loads((made / "expected.json").read_text()))


@pytest.fixture
async def port(
    postgres_server: PostgresServer, database_name: str, pooling: Pooling
) -> AsyncIterator[Service]:
    """The service behind a real port."""
    repository = pooling.triton.environment["LLM_MODEL_REPOSITORY"]
    settings = make_settings(
        postgres_server,
        database_name,
        pooling.triton,
        model_repository=repository,
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


async def test_vectors_are_vllms_own(port: Service, pooling: Pooling) -> None:
    expected = pooling.expected
    assert await vectors(port, TEXTS) == expected["vectors"]
    assert await vectors(port, TEXTS, encoding_format="float") == expected["vectors"]
    assert await vectors(port, TEXTS, dimensions=16) == expected["short"]
    assert await vectors(port, TEXTS, extra_body={"normalize": False}) == expected["raw"]
    assert await vectors(port, [IDS]) == [expected["ids"]]


async def test_many_at_once_are_close_to_them(port: Service, pooling: Pooling) -> None:
    """The last digits depend on what else the engine computes in the same step."""
    async with openai_client(port) as client:
        answer = await client.embeddings.create(model="embed", input=TEXTS * 20)
    for place, item in enumerate(answer.data):
        expected = pooling.expected["vectors"][place % len(TEXTS)]
        assert item.embedding == pytest.approx(expected, abs=1e-5)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 60


async def test_a_vector_is_stored_and_read_as_any_result(port: Service, pooling: Pooling) -> None:
    body = {"model": "embed", "content": TEXTS[0], "embedding": {}}
    sent = (await port.client.post("/results/", json=body)).json()
    result = await read(port, sent["id"], wait=60)
    numbers = array.array("f", result["result"]["embedding"]).tolist()
    assert numbers == pooling.expected["vectors"][0]
    assert result["usage"]["prompt_tokens"] == len("helloworld") + 2


async def test_scores_are_vllms_own(port: Service, pooling: Pooling) -> None:
    expected = pooling.expected["scores"]
    found = []
    for document in DOCUMENTS:  # one by one
        body = {"model": "rank", "text_1": QUERY, "text_2": document}
        (item,) = (await port.client.post("/score", json=body)).json()["data"]
        found.append(item["score"])
    assert found == expected


async def test_documents_of_one_query(port: Service, pooling: Pooling) -> None:
    """One result of one request to Triton: the numbers of the pairs, and the sum of their tokens."""

    async def score(*documents: str, **options: bool) -> dict[str, Any]:
        texts = [{"role": "document", "content": one} for one in documents]
        messages = [{"role": "query", "content": QUERY}, *texts]
        body = {"model": "rank", "messages": messages, "score": options}
        sent = (await port.client.post("/results/", json=body)).json()
        return await read(port, sent["id"], wait=60)

    result = await score(*DOCUMENTS)
    assert result["result"]["scores"] == pytest.approx(pooling.expected["scores"], abs=1e-5)
    body = {"model": "rank", "query": QUERY, "documents": DOCUMENTS}
    pairs = (await port.client.post("/rerank", json=body)).json()["usage"]["total_tokens"]
    assert result["usage"]["prompt_tokens"] == pairs
    refused = await score(*DOCUMENTS, LONG)
    assert (refused["state"], refused["error"]["code"]) == ("failed", "invalid_request")
    cut = await score(*DOCUMENTS, LONG, truncate=True)
    assert cut["result"]["scores"][:-1] == pytest.approx(result["result"]["scores"], abs=1e-5)


async def test_rankings_in_each_shape(port: Service, pooling: Pooling) -> None:
    best = sorted(enumerate(pooling.expected["scores"]), key=lambda one: -one[1])
    order = [place for place, _ in best]
    body: dict[str, Any] = {"query": QUERY, "documents": DOCUMENTS}
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):  # the only cross encoder needs no name
        answer = (await port.client.post(path, json=body)).json()
        assert [one["index"] for one in answer["results"]] == order
        found = [one["relevance_score"] for one in answer["results"]]
        assert found == pytest.approx([score for _, score in best], abs=1e-5)
    tei = {"query": QUERY, "texts": DOCUMENTS, "return_text": True}
    items = (await port.client.post("/rerank", json=tei)).json()
    assert [one["text"] for one in items] == [DOCUMENTS[place] for place in order]
    raw = (await port.client.post("/rerank", json=tei | {"raw_scores": True})).json()
    assert [one["index"] for one in raw] == order
    activated = [1 / (1 + math.exp(-one["score"])) for one in raw]
    assert activated == pytest.approx([one["score"] for one in items], abs=1e-5)


async def test_tei_embeds(port: Service, pooling: Pooling) -> None:
    for text, expected in zip(TEXTS, pooling.expected["vectors"], strict=True):
        (numbers,) = (await port.client.post("/embed", json={"inputs": text})).json()
        assert numbers == expected


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
        assert float(score) == pytest.approx(scores[place], abs=1e-5)
    assert output[2] == "model_not_found"
