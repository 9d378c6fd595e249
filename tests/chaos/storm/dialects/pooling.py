"""Orders of embeddings, rankings and scores."""

import array
import base64
from typing import Any

from tests.chaos.storm.client import Client


async def embeddings(client: Client) -> None:
    """Many texts in one request, as numbers or as base64."""
    order = client.order
    form = "base64" if order.number % 2 else "float"
    body = {"model": order.model, "input": order.prompts, "encoding_format": form}
    if answer := await client.awaited("/v1/embeddings", body):
        vectors = [one["embedding"] for one in _in_order(answer["data"])]
        order.numbers = [_decoded(one) if form == "base64" else one for one in vectors]


async def rerank(client: Client) -> None:
    """Documents, best first, at each of the paths."""
    order = client.order
    path, texts = (
        ("/rerank", "documents"), ("/rerank", "texts"),
        ("/v1/rerank", "documents"), ("/v2/rerank", "documents"),
    )[order.number % 4]  # fmt: skip
    body = {"model": order.model, "query": order.query, texts: order.prompts}
    if answer := await client.awaited(path, body):
        found, name = (
            (answer, "score") if texts == "texts" else (answer["results"], "relevance_score")
        )
        scores = [one[name] for one in found]
        assert scores == sorted(scores, reverse=True), found
        order.numbers = [[one[name]] for one in _in_order(found)]


async def score(client: Client) -> None:
    order = client.order
    body = {"model": order.model, "text_1": order.query, "text_2": order.prompts}
    if answer := await client.awaited(f"{'/v1' * (order.number % 2)}/score", body):
        order.numbers = [[one["score"]] for one in _in_order(answer["data"])]


def _in_order(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    items = sorted(items, key=lambda one: int(one["index"]))
    assert [one["index"] for one in items] == list(range(len(items))), items
    return items


def _decoded(vector: str) -> list[float]:
    return array.array("f", base64.b64decode(vector)).tolist()
