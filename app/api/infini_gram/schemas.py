"""Requests of infini-gram API, validated and converted to token ids.

https://github.com/allenai/infinigram-api, the routes of its branch other-endpoints. Members may be in
camelCase or snake_case; unknown ones are ignored. Bounds are the original's where it has any; ours
are those on documents (`MAX_CONTEXT` and below), which it leaves open.
"""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Discriminator, Field, RootModel, Tag
from pydantic.alias_generators import to_camel

from app.core.errors import invalid_field
from app.core.whole_numbers import WHOLE
from app.infini_gram.declarations import MAX_VOCABULARY
from app.infini_gram.engine import Engine
from app.infini_gram.tokenizer import Tokenizer

MAX_CHARACTERS = 1000
MAX_TOKENS = 500
MAX_CLAUSES = 4
MAX_TERMS = 4
MAX_SUPPORT = 10_000
MAX_CLAUSE_FREQ = 500_000
MAX_DIFF_TOKENS = 1000
# The engine's defaults.
DEFAULT_SUPPORT = 1000
DEFAULT_CLAUSE_FREQ = 50_000
DEFAULT_DIFF_TOKENS = 100

# Ours: tokens of context on each side, documents of one request, and tokens of all of them.
MAX_CONTEXT = 10_000
MAX_DOCUMENTS = 100
MAX_DOCUMENT_TOKENS = 200_000
# The largest rank, pointer or document: far beyond any index, below the engine's 2**64.
_MAX_POSITION = 2**62

AND, OR = " AND ", " OR "


class CamelModel(BaseModel):
    """camelCase in JSON, snake_case in code; both are accepted."""

    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, extra="ignore", frozen=True
    )


def _kind(value: object) -> str | None:
    if isinstance(value, str):
        return "text"
    return "tokens" if isinstance(value, list) else None


def _either(what: str) -> Discriminator:
    return Discriminator(
        _kind, custom_error_type="query_type", custom_error_message=f"must be a text or {what}"
    )


_Text = Annotated[str, Field(min_length=1, max_length=MAX_CHARACTERS), Tag("text")]
_Id = Annotated[int, Field(strict=True, ge=0, le=MAX_VOCABULARY), WHOLE]
_Ids = Annotated[list[_Id], Field(min_length=1, max_length=MAX_TOKENS)]
_Clause = Annotated[list[_Ids], Field(min_length=1, max_length=MAX_TERMS)]
_Clauses = Annotated[list[_Clause], Field(min_length=1, max_length=MAX_CLAUSES)]
_Query = Annotated[_Text | Annotated[_Ids, Tag("tokens")], _either("a list of token ids")]
_CnfQuery = Annotated[
    _Text | Annotated[_Clauses, Tag("tokens")],
    _either("a list of clauses, each a list of terms, each a list of token ids"),
]


class QueryRequest(CamelModel):
    """find, count, prob and infgram_prob; the last token is the continuation for the last two."""

    query: _Query = Field(description="A text, or token ids of the index's tokenizer.")


class NtdRequest(QueryRequest):
    """ntd and infgram_ntd."""

    max_support: int | None = Field(
        None, ge=1, le=MAX_SUPPORT, description=f"Most occurrences to sample ({DEFAULT_SUPPORT})."
    )


class CnfRequest(CamelModel):
    """find_cnf and count_cnf."""

    query: _CnfQuery = Field(
        description=f"A text with `{AND.strip()}` between its clauses and `{OR.strip()}` between the "
        "terms of each; or clauses of terms of token ids."
    )
    max_clause_freq: int | None = Field(
        None,
        ge=1,
        le=MAX_CLAUSE_FREQ,
        description=f"Most occurrences of a clause to sample ({DEFAULT_CLAUSE_FREQ}).",
    )
    max_diff_tokens: int | None = Field(
        None,
        ge=1,
        le=MAX_DIFF_TOKENS,
        description=f"Most tokens between two clauses ({DEFAULT_DIFF_TOKENS}).",
    )


_Position = Annotated[int, Field(ge=0, le=_MAX_POSITION)]
_Context = Annotated[
    int, Field(ge=0, le=MAX_CONTEXT, description="Most tokens on each side of the needle.")
]


class _AroundNeedle(CamelModel):
    shard: int = Field(ge=0, le=_MAX_POSITION)
    needle_length: int = Field(ge=0, le=MAX_CONTEXT, description="Tokens of the query.")
    maximum_context_length: _Context


class RankRequest(_AroundNeedle):
    """get_document_by_rank: a rank of `segmentByShard`."""

    rank: _Position


class PointerRequest(_AroundNeedle):
    """get_document_by_pointer: a pointer of `ptrsByShard`."""

    pointer: _Position


class IndexRequest(CamelModel):
    """get_document_by_index: the document's number, and the length of its beginning."""

    document_index: _Position
    maximum_context_length: Annotated[
        int, Field(ge=0, le=MAX_CONTEXT, description="Most tokens, from the beginning.")
    ]


class IndexRequests(RootModel[Annotated[list[IndexRequest], Field(max_length=MAX_DOCUMENTS)]]):
    """get_documents_by_index."""


class SearchRequest(CamelModel):
    """GET documents: the query string."""

    search: str = Field(min_length=1, max_length=MAX_CHARACTERS)
    maximum_document_display_length: int = Field(
        10, ge=1, le=MAX_CONTEXT, description="Most tokens on each side of the occurrence."
    )
    page: int = Field(0, ge=0, le=2**40, description="From 0.")
    page_size: int = Field(10, ge=1, le=MAX_DOCUMENTS)


def check_document_tokens(field: str, asked: int) -> None:
    """Raise InvalidRequestError if a request's documents have too many tokens together."""
    if asked > MAX_DOCUMENT_TOKENS:
        raise invalid_field(
            field,
            f"the documents could have {asked:,} tokens together, and {MAX_DOCUMENT_TOKENS:,} are "
            "most: ask for fewer, or for less context",
        )


# -- Queries to token ids


def to_ids(engine: Engine, query: str | list[int]) -> list[int]:
    if isinstance(query, list):
        _check_ids(query, engine.vocab_size, "query")
        return query
    ids = _encode(engine.tokenizer, query, "query")
    _check_count(len(ids))
    return ids


def to_cnf(engine: Engine, query: str | list[list[list[int]]]) -> list[list[list[int]]]:
    """The clauses of a query, each a list of terms of token ids. Raises InvalidRequestError."""
    if isinstance(query, str):
        cnf = _split(engine.tokenizer, query)
    else:
        cnf = query
        for number, clause in enumerate(cnf):
            for place, term in enumerate(clause):
                _check_ids(term, engine.vocab_size, f"query.{number}.{place}")
    _check_count(sum(len(term) for clause in cnf for term in clause))
    return cnf


def _split(tokenizer: Tokenizer, query: str) -> list[list[list[int]]]:
    clauses = [clause.split(OR) for clause in query.split(AND)]
    if len(clauses) > MAX_CLAUSES:
        raise invalid_field("query", f"has {len(clauses)} clauses, and {MAX_CLAUSES} are most")
    for clause in clauses:
        if len(clause) > MAX_TERMS:
            raise invalid_field(
                "query", f"has a clause of {len(clause)} terms, and {MAX_TERMS} are most"
            )
    return [
        [_encode(tokenizer, term, f"query.{number}.{place}") for place, term in enumerate(clause)]
        for number, clause in enumerate(clauses)
    ]


def _encode(tokenizer: Tokenizer, text: str, field: str) -> list[int]:
    ids = tokenizer.encode(text)
    if not ids:
        raise invalid_field(field, f"{text[:64]!r} has no tokens: there is nothing to look for")
    return ids


def _check_ids(ids: list[int], vocab_size: int, field: str) -> None:
    for place, token_id in enumerate(ids):
        if token_id >= vocab_size:
            raise invalid_field(
                f"{field}.{place}",
                f"{token_id} is no token of this index: ids are 0 to {vocab_size - 1}",
            )


def _check_count(count: int) -> None:
    if count > MAX_TOKENS:
        raise invalid_field("query", f"has {count} tokens, and {MAX_TOKENS} are most")
