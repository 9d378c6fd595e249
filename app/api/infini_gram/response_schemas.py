"""Responses of infini-gram API, in its camelCase."""

from typing import Any

from app.api.infini_gram.schemas import CamelModel
from app.infini_gram.engine import Engine
from app.infini_gram.engine_types import Distribution, Document, Prob
from app.infini_gram.tokenizer import Tokenizer


class IndexRead(CamelModel):
    """An index, returned with `details`."""

    name: str
    description: str
    tokens: int
    documents: int
    shards: int
    vocab_size: int


class _QueryRead(CamelModel):
    index: str
    token_ids: list[int]
    tokens: list[str]


class _CnfRead(CamelModel):
    index: str
    token_ids: list[list[list[int]]]
    tokens: list[list[list[str]]]


class FindRead(_QueryRead):
    cnt: int
    segment_by_shard: list[tuple[int, int]]


class FindCnfRead(_CnfRead):
    cnt: int
    approx: bool
    ptrs_by_shard: list[list[int]]


class CountRead(_QueryRead):
    count: int
    approx: bool


class CountCnfRead(_CnfRead):
    count: int
    approx: bool


class ProbRead(_QueryRead):
    prompt_cnt: int
    cont_cnt: int
    prob: float


class NextTokenRead(CamelModel):
    cont_cnt: int
    prob: float
    token: str


class NtdRead(_QueryRead):
    prompt_cnt: int
    result_by_token_id: dict[str, NextTokenRead]
    approx: bool


class InfgramProbRead(ProbRead):
    suffix_len: int
    longest_suffix: str


class InfgramNtdRead(NtdRead):
    suffix_len: int
    longest_suffix: str


class DocumentRead(CamelModel):
    document_index: int
    document_length: int
    display_length: int
    needle_offset: int
    metadata: dict[str, Any]
    token_ids: list[int]
    text: str
    blocked: bool


class OneDocumentRead(DocumentRead):
    index: str


class DocumentsRead(CamelModel):
    index: str
    documents: list[DocumentRead]


class PageRead(DocumentsRead):
    page: int
    page_size: int
    page_count: int
    total_documents: int


def read_index(engine: Engine) -> IndexRead:
    return IndexRead(
        name=engine.declaration.name,
        description=engine.declaration.description,
        tokens=engine.total_tokens,
        documents=engine.total_documents,
        shards=engine.shard_count,
        vocab_size=engine.vocab_size,
    )


def of_query(engine: Engine, ids: list[int]) -> dict[str, Any]:
    """The first members of a query's response; tokens as the vocabulary spells them."""
    tokens = engine.tokenizer.tokens(ids)
    return {"index": engine.declaration.name, "token_ids": ids, "tokens": tokens}


def of_cnf(engine: Engine, cnf: list[list[list[int]]]) -> dict[str, Any]:
    tokens = [[engine.tokenizer.tokens(term) for term in clause] for clause in cnf]
    return {"index": engine.declaration.name, "token_ids": cnf, "tokens": tokens}


def of_prob(found: Prob) -> dict[str, Any]:
    """The probability is -1 where the prompt never occurs."""
    return {
        "prompt_cnt": found.prompt_count,
        "cont_cnt": found.continuation_count,
        "prob": found.prob,
    }


def of_distribution(tokenizer: Tokenizer, found: Distribution) -> dict[str, Any]:
    by_token = {
        str(token_id): NextTokenRead(cont_cnt=count, prob=prob, token=tokenizer.token(token_id))
        for token_id, (count, prob) in found.by_token.items()
    }
    return {
        "prompt_cnt": found.prompt_count,
        "result_by_token_id": by_token,
        "approx": found.approx,
    }


def of_suffix(tokenizer: Tokenizer, prompt: list[int], length: int) -> dict[str, Any]:
    """The longest suffix of the prompt that occurs; empty if none does."""
    suffix = prompt[len(prompt) - length :]
    return {"suffix_len": length, "longest_suffix": tokenizer.decode(suffix)}


def of_document(tokenizer: Tokenizer, document: Document) -> dict[str, Any]:
    return {
        "document_index": document.index,
        "document_length": document.length,
        "display_length": document.display_length,
        "needle_offset": document.needle_offset,
        "metadata": document.metadata,
        "token_ids": document.token_ids,
        "text": tokenizer.decode(document.token_ids),
        "blocked": document.blocked,
    }
