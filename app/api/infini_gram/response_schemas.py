"""Responses of infini-gram API, in its camelCase.

The `...Read` models describe them in the OpenAPI document; the functions build them as plain
dictionaries: a response may hold half a million numbers.
"""

from math import ceil
from typing import Any

from app.api.infini_gram.schemas import CamelModel, SearchRequest
from app.infini_gram.engine import Engine
from app.infini_gram.engine_types import Count, Distribution, Document, Found, FoundCnf, Prob
from app.infini_gram.tokenizer import Tokenizer

Wire = dict[str, Any]


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


def engine_to_wire(engine: Engine) -> Wire:
    return {
        "name": engine.declaration.name,
        "description": engine.declaration.description,
        "tokens": engine.total_tokens,
        "documents": engine.total_documents,
        "shards": engine.shard_count,
        "vocabSize": engine.vocab_size,
    }


def query_to_wire(engine: Engine, ids: list[int]) -> Wire:
    """The first members of a query's response; tokens as the vocabulary spells them."""
    return {
        "index": engine.declaration.name,
        "tokenIds": ids,
        "tokens": engine.tokenizer.tokens(ids),
    }


def cnf_to_wire(engine: Engine, cnf: list[list[list[int]]]) -> Wire:
    return {
        "index": engine.declaration.name,
        "tokenIds": cnf,
        "tokens": [[engine.tokenizer.tokens(term) for term in clause] for clause in cnf],
    }


def found_to_wire(found: Found) -> Wire:
    return {"cnt": found.count, "segmentByShard": found.segment_by_shard}


def found_cnf_to_wire(found: FoundCnf) -> Wire:
    return {"cnt": found.count, "approx": found.approx, "ptrsByShard": found.ptrs_by_shard}


def count_to_wire(count: Count) -> Wire:
    return {"count": count.count, "approx": count.approx}


def prob_to_wire(prob: Prob) -> Wire:
    """The probability is -1 where the prompt never occurs."""
    return {
        "promptCnt": prob.prompt_count,
        "contCnt": prob.continuation_count,
        "prob": prob.prob,
    }


def distribution_to_wire(tokenizer: Tokenizer, found: Distribution) -> Wire:
    return {
        "promptCnt": found.prompt_count,
        "resultByTokenId": {
            str(token_id): {"contCnt": count, "prob": prob, "token": tokenizer.token(token_id)}
            for token_id, (count, prob) in found.by_token.items()
        },
        "approx": found.approx,
    }


def suffix_to_wire(tokenizer: Tokenizer, prompt: list[int], length: int) -> Wire:
    """The longest suffix of the prompt that occurs; empty if none does."""
    suffix = prompt[len(prompt) - length :]
    return {"suffixLen": length, "longestSuffix": tokenizer.decode(suffix)}


def document_to_wire(tokenizer: Tokenizer, document: Document) -> Wire:
    return {
        "documentIndex": document.index,
        "documentLength": document.length,
        "displayLength": document.display_length,
        "needleOffset": document.needle_offset,
        "metadata": document.metadata,
        "tokenIds": document.token_ids,
        "text": tokenizer.decode(document.token_ids),
        "blocked": document.blocked,
    }


def one_to_wire(engine: Engine, document: Document) -> Wire:
    return {"index": engine.declaration.name, **document_to_wire(engine.tokenizer, document)}


def documents_to_wire(engine: Engine, documents: list[Document]) -> Wire:
    return {
        "index": engine.declaration.name,
        "documents": [document_to_wire(engine.tokenizer, document) for document in documents],
    }


def page_to_wire(
    engine: Engine, documents: list[Document], wanted: SearchRequest, total: int
) -> Wire:
    """A page of a search. `totalDocuments` counts occurrences, as in the original."""
    return {
        **documents_to_wire(engine, documents),
        "page": wanted.page,
        "pageSize": wanted.page_size,
        "pageCount": ceil(total / wanted.page_size),
        "totalDocuments": total,
    }


def places_of_page(found: Found, page: int, page_size: int) -> list[tuple[int, int]]:
    """The (shard, rank) of a page's occurrences, counted through the shards in their order."""
    places: list[tuple[int, int]] = []
    skip = page * page_size
    for shard, (start, end) in enumerate(found.segment_by_shard):
        first = min(start + skip, end)
        skip -= first - start
        last = min(first + page_size - len(places), end)
        places += [(shard, rank) for rank in range(first, last)]
    return places
