"""Null in each member of a request where the official client's own types allow it."""

import types
from collections.abc import Iterator
from typing import (
    Annotated,
    Any,
    NotRequired,
    Required,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import orjson
import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_create_params as beta_params
from openai.types import batch_create_params, completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params
from pydantic import BaseModel

from app.api.anthropic.schemas import MessageRequest, TokenCountRequest
from app.api.json_codec import parse
from app.api.openai.batches_schemas import BatchCreate
from app.api.openai.chat_schemas import ChatRequest
from app.api.openai.completions_schemas import CompletionRequest
from app.api.openai.embeddings_schemas import EmbeddingRequest
from app.api.openai.responses_schemas import ResponseCreate
from app.api.pooling.schemas import RerankRequest
from app.core.errors import InvalidRequestError

HELLO = [{"role": "user", "content": "hi"}]
MESSAGE = {"model": "m", "messages": HELLO, "max_tokens": 1}
RERANK = {"model": "m", "query": "q", "documents": ["d"]}
# Cohere's client is not among the service's packages: the optional members of both of its versions.
COHERE = (
    "top_n", "max_tokens_per_doc", "relevant_spans", "priority", "rank_fields", "return_documents",
    "max_chunks_per_doc", "model",
)  # fmt: skip
# A request without a prompt is one for nothing: OpenAI's own begins a document with it.
REFUSED = {(CompletionRequest, "prompt")}


def nullable(declared: Any) -> Iterator[str]:
    """The members of a TypedDict that may be null."""
    for name, hint in get_type_hints(declared, include_extras=True).items():
        bare = hint
        while get_origin(bare) in (Required, NotRequired, Annotated):
            bare = get_args(bare)[0]
        if get_origin(bare) in (Union, types.UnionType) and type(None) in get_args(bare):
            yield name


REQUESTS: tuple[tuple[type[BaseModel], Any, dict[str, Any]], ...] = (
    (ChatRequest, chat_params.CompletionCreateParamsBase, {"messages": HELLO}),
    (CompletionRequest, completion_create_params.CompletionCreateParamsBase, {"prompt": "p"}),
    (ResponseCreate, response_create_params.ResponseCreateParamsBase, {"input": "i"}),
    (EmbeddingRequest, embedding_create_params.EmbeddingCreateParams, {"input": "i"}),
    (
        BatchCreate,
        batch_create_params.BatchCreateParams,
        {"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h"},
    ),
    (MessageRequest, message_create_params.MessageCreateParamsBase, MESSAGE),
    (MessageRequest, beta_params.MessageCreateParamsBase, MESSAGE),
    (TokenCountRequest, message_count_tokens_params.MessageCountTokensParams, MESSAGE),
)
CASES: list[tuple[type[BaseModel], str, dict[str, Any]]] = [
    *((schema, name, base) for schema, declared, base in REQUESTS for name in nullable(declared)),
    *((RerankRequest, name, RERANK) for name in COHERE),
]


@pytest.mark.parametrize(
    ("schema", "name", "base"), CASES, ids=[f"{one.__name__}-{name}" for one, name, _ in CASES]
)
def test_null_is_an_absent_member(schema: type[BaseModel], name: str, base: dict[str, Any]) -> None:
    without = {key: value for key, value in base.items() if key != name}
    if (schema, name) in REFUSED:
        with pytest.raises(InvalidRequestError):
            parse(schema, orjson.dumps(without | {name: None}))
        return
    given, absent = (
        parse(schema, orjson.dumps(body)).model_dump(exclude={"input"})  # items have ids of chance
        for body in (without | {name: None}, without)
    )
    assert given == absent
