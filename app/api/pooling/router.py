"""/rerank, /score and /embed: routes of Cohere, Jina, vLLM and TEI (docs/embeddings.md)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from app.api.dependencies import services_of
from app.api.disconnects import ON_DISCONNECT_HEADER
from app.api.errors import tgi_errors
from app.api.group_responses import respond_complete
from app.api.idempotency_header import KEY_HEADER
from app.api.json_codec import json_response, parse
from app.api.pooling.responses import ranking, scores, tei_ranking
from app.api.pooling.schemas import EmbedRequest, RerankRequest, ScoreRequest
from app.api.raw_routes import body_of, describe
from app.core import metrics
from app.core.errors import FieldError, InvalidRequestError, ServiceError
from app.inference.pooling import Task
from app.results.drafts import GroupRequest
from app.results.pooling import choose_model
from app.results.rows import ResultRow

raw = APIRouter(tags=["embeddings"])

_HEADERS: dict[str, Any] = KEY_HEADER | ON_DISCONNECT_HEADER
_RANKED = {"query": "What is a tensor?", "documents": ["An array of numbers.", "A muscle."]}
_SCORED = {"text_1": "What is a tensor?", "text_2": ["An array of numbers.", "A muscle."]}
_EMBEDDED = {"inputs": ["What is a tensor?"]}
_RERANK = describe(header=_HEADERS, body=RerankRequest, example=_RANKED)
_SCORE = describe(header=_HEADERS, body=ScoreRequest, example=_SCORED)
_TEI, _V2 = "/rerank", "/v2/rerank"


@raw.post(_TEI, operation_id="rerank", openapi_extra=_RERANK)
@raw.post("/v1/rerank", operation_id="rerank_v1", openapi_extra=_RERANK)
@raw.post(_V2, operation_id="rerank_v2", openapi_extra=_RERANK)
async def rerank(request: Request) -> Response:
    """Rank documents by a query: Cohere's and Jina's `documents`, or TEI's `texts`."""
    body = parse(RerankRequest, await body_of(request))
    path = request.scope["path"]
    if body.is_tei:
        try:
            return await _respond(request, body, lambda rows: tei_ranking(body, rows))
        except ServiceError as error:
            if path != _TEI:
                raise
            metrics.REFUSALS.of(error.code).inc()
            return tgi_errors.respond(error)
    with_documents = body.return_documents
    if with_documents is None:
        with_documents = path != _V2
    return await _respond(
        request, body, lambda rows: ranking(body, rows, with_documents=with_documents)
    )


@raw.post("/score", operation_id="score", openapi_extra=_SCORE)
@raw.post("/v1/score", operation_id="score_v1", openapi_extra=_SCORE)
async def score(request: Request) -> Response:
    """Score pairs of texts, as vLLM's server does."""
    return await _respond(request, parse(ScoreRequest, await body_of(request)), scores)


@raw.post(
    "/embed",
    operation_id="embed",
    openapi_extra=describe(header=_HEADERS, body=EmbedRequest, example=_EMBEDDED),
)
async def embed(request: Request) -> Response:
    """Compute the vectors of texts, as TEI does."""
    body = parse(EmbedRequest, await body_of(request))
    return await _respond(
        request, body, lambda rows: [row.encoded_numbers() for row in rows], task="embed"
    )


_FIELDS: Mapping[type, str] = {
    RerankRequest: "documents",
    ScoreRequest: "text_2",
    EmbedRequest: "inputs",
}


async def _respond(
    request: Request,
    body: RerankRequest | ScoreRequest | EmbedRequest,
    render: Callable[[Sequence[ResultRow]], object],
    *,
    task: Task = "score",
) -> Response:
    """Send a result for each text or pair; render them once all are completed."""
    try:
        model = await choose_model(services_of(request).registry, body.model, task)
        group = GroupRequest(
            model.name,
            body.to_prompts(),
            body.to_send_options(),
            store=body.store is not False,
        )
        return await respond_complete(request, group, lambda rows: json_response(render(rows)))
    except InvalidRequestError as error:
        name = _FIELDS[type(body)]
        error.errors = [
            FieldError(name if one.field in ("content", "messages") else one.field, one.message)
            for one in error.errors
        ]
        raise
