"""Responses of the reranking dialects, made of the results' rows."""

from collections.abc import Sequence
from typing import Any

from app.api.pooling.schemas import RerankRequest
from app.core.ids import unix_seconds
from app.results.rows import ResultRow


def ranking(
    request: RerankRequest, rows: Sequence[ResultRow], *, with_documents: bool
) -> dict[str, Any]:
    """Cohere's and Jina's: the best first, each with its place among the documents."""
    found = []
    for place, score in _best(request, rows):
        item: dict[str, Any] = {"index": place, "relevance_score": score}
        if with_documents:
            item["document"] = {"text": request.ranked[place]}
        found.append(item)
    return {
        "id": str(rows[0].id),
        "model": rows[0].model_name,
        "results": found,
        "usage": _usage(rows),
        "meta": {"billed_units": {"search_units": 1}},
    }


def tei_ranking(request: RerankRequest, rows: Sequence[ResultRow]) -> list[dict[str, Any]]:
    return [
        {"index": place, "score": score}
        | ({"text": request.ranked[place]} if request.return_text else {})
        for place, score in _best(request, rows)
    ]


def scores(rows: Sequence[ResultRow]) -> dict[str, Any]:
    """vLLM's: a score for each pair, in their order."""
    return {
        "id": f"score-{rows[0].id}",
        "object": "list",
        "created": int(unix_seconds(rows[0].id)),
        "model": rows[0].model_name,
        "data": [
            {"index": place, "object": "score", "score": row.numbers()[0]}
            for place, row in enumerate(rows)
        ],
        "usage": _usage(rows),
    }


def _best(request: RerankRequest, rows: Sequence[ResultRow]) -> list[tuple[int, float]]:
    ranked = sorted(enumerate(row.numbers()[0] for row in rows), key=lambda one: -one[1])
    return ranked[: request.top_n or None]


def _usage(rows: Sequence[ResultRow]) -> dict[str, int]:
    tokens = sum(row.prompt_tokens or 0 for row in rows)
    return {"prompt_tokens": tokens, "total_tokens": tokens}
