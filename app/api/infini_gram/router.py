"""infini-gram API: queries about a corpus, run on an index of it.

https://github.com/allenai/infinigram-api. Each query runs on a thread (`Indexes.run`), and so does
the serialization of its response, which may be long.
"""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Annotated, Any, TypeVar

import orjson
from fastapi import APIRouter, Query
from pydantic import BaseModel, TypeAdapter
from starlette.requests import Request
from starlette.responses import Response

from app.api.common import ServicesOf, body_of, describe, reference, services_of
from app.api.infini_gram.response_schemas import (
    CountCnfRead,
    CountRead,
    DocumentsRead,
    FindCnfRead,
    FindRead,
    IndexRead,
    InfgramNtdRead,
    InfgramProbRead,
    NtdRead,
    OneDocumentRead,
    PageRead,
    ProbRead,
    Wire,
    cnf_to_wire,
    count_to_wire,
    distribution_to_wire,
    documents_to_wire,
    engine_to_wire,
    found_cnf_to_wire,
    found_to_wire,
    one_to_wire,
    page_to_wire,
    places_of_page,
    prob_to_wire,
    query_to_wire,
    suffix_to_wire,
)
from app.api.infini_gram.schemas import (
    DEFAULT_CLAUSE_FREQ,
    DEFAULT_DIFF_TOKENS,
    DEFAULT_SUPPORT,
    MAX_CONTEXT,
    MAX_DOCUMENTS,
    CnfRequest,
    IndexRequest,
    IndexRequests,
    NtdRequest,
    PointerRequest,
    QueryRequest,
    RankRequest,
    SearchRequest,
    check_documents,
    check_page,
    to_cnf,
    to_ids,
)
from app.api.json_codec import JSON, json_response, parse, validate
from app.core.errors import EngineInputError, FieldError
from app.infini_gram.engine import Engine

router = APIRouter(tags=["infini-gram"])
raw = APIRouter(tags=["infini-gram"])

_T = TypeVar("_T")
_Answer = Callable[[Engine, _T], Wire]  # blocks

_PATH = {"index": "An index's name."}
_QUERY = {"query": "return None"}
_NEXT = {"query": "return", "maxSupport": 100}
_CNF = {"query": "def OR class AND return", "maxDiffTokens": 50}
_AROUND = {"needleLength": 2, "maximumContextLength": 50}
_BEGINNING = {"documentIndex": 0, "maximumContextLength": 50}


@router.get("/indexes", responses={200: {"model": list[str] | list[IndexRead]}})
async def list_indexes(
    services: ServicesOf,
    details: Annotated[
        bool, Query(description="Return each index's properties, not only its name.")
    ] = False,
) -> Response:
    """List the indexes that can be queried."""
    indexes = services.indexes
    if not details:
        return json_response(indexes.names)
    return json_response([engine_to_wire(indexes.engine(name)) for name in indexes.names])


async def _ask(request: Request, wanted: _T, answer: _Answer[_T]) -> Response:
    """Run a query on the path's index and serialize its response, both on a thread."""

    def call(engine: Engine) -> bytes:
        return orjson.dumps(answer(engine, wanted))

    try:
        body = await services_of(request).indexes.run(request.path_params["index"], call)
    except EngineInputError as error:
        error.errors = error.errors or [FieldError("body", error.detail)]
        raise
    return Response(body, media_type=JSON)


def _post(
    name: str, wanted: Any, read: type[BaseModel], example: Any
) -> Callable[[_Answer[_T]], _Answer[_T]]:
    """Register POST /{index}/name for a function; its docstring describes the route."""
    adapter: TypeAdapter[Any] = TypeAdapter(wanted)
    schema = (
        reference(wanted)
        if isinstance(wanted, type)
        else {"type": "array", "maxItems": MAX_DOCUMENTS, "items": reference(IndexRequest)}
    )

    def register(answer: _Answer[_T]) -> _Answer[_T]:
        async def endpoint(request: Request) -> Response:
            return await _ask(request, parse(adapter, await body_of(request)), answer)

        raw.add_api_route(
            f"/{{index}}/{name}",
            endpoint,
            methods=["POST"],
            name=name,
            description=answer.__doc__,
            responses={200: {"model": read}},
            openapi_extra=describe(path=_PATH, body={"schema": schema, "example": example}),
        )
        return answer

    return register


@_post("find", QueryRequest, FindRead, _QUERY)
def find(engine: Engine, wanted: QueryRequest) -> Wire:
    """Find a token sequence: ranges of ranks in each shard, for get_document_by_rank."""
    ids = to_ids(engine, wanted.query)
    return query_to_wire(engine, ids) | found_to_wire(engine.find(ids))


@_post("find_cnf", CnfRequest, FindCnfRead, _CNF)
def find_cnf(engine: Engine, wanted: CnfRequest) -> Wire:
    """Find places near which each clause has a term: pointers, for get_document_by_pointer."""
    cnf = to_cnf(engine, wanted.query)
    return cnf_to_wire(engine, cnf) | found_cnf_to_wire(engine.find_cnf(cnf, *_bounds(wanted)))


@_post("count", QueryRequest, CountRead, _QUERY)
def count(engine: Engine, wanted: QueryRequest) -> Wire:
    """Count the occurrences of a token sequence."""
    ids = to_ids(engine, wanted.query)
    return query_to_wire(engine, ids) | count_to_wire(engine.count(ids))


@_post("count_cnf", CnfRequest, CountCnfRead, _CNF)
def count_cnf(engine: Engine, wanted: CnfRequest) -> Wire:
    """Count places near which each clause has a term; `approx` if the count is estimated."""
    cnf = to_cnf(engine, wanted.query)
    return cnf_to_wire(engine, cnf) | count_to_wire(engine.count_cnf(cnf, *_bounds(wanted)))


def _bounds(wanted: CnfRequest) -> tuple[int, int]:
    return (
        wanted.max_clause_freq or DEFAULT_CLAUSE_FREQ,
        wanted.max_diff_tokens or DEFAULT_DIFF_TOKENS,
    )


@_post("prob", QueryRequest, ProbRead, _QUERY)
def prob(engine: Engine, wanted: QueryRequest) -> Wire:
    """Probability of the last token after the preceding ones; -1 if these never occur."""
    ids = to_ids(engine, wanted.query)
    return query_to_wire(engine, ids) | prob_to_wire(engine.prob(ids))


# The engine runs such a query on many threads at the same time: 200 for a support of 1,000, 600 for
# 10,000. If the system refuses one, the engine ends the process.
_many_threads = threading.Lock()


def _alone(wanted: NtdRequest) -> AbstractContextManager[object]:
    is_large = (wanted.max_support or DEFAULT_SUPPORT) > DEFAULT_SUPPORT
    return _many_threads if is_large else nullcontext()


@_post("ntd", NtdRequest, NtdRead, _NEXT)
def ntd(engine: Engine, wanted: NtdRequest) -> Wire:
    """Distribution of the next token; `approx` if it comes from a sample of the occurrences."""
    ids = to_ids(engine, wanted.query)
    with _alone(wanted):
        found = engine.ntd(ids, wanted.max_support or DEFAULT_SUPPORT)
    return query_to_wire(engine, ids) | distribution_to_wire(engine.tokenizer, found)


@_post("infgram_prob", QueryRequest, InfgramProbRead, _QUERY)
def infgram_prob(engine: Engine, wanted: QueryRequest) -> Wire:
    """Probability of the last token after the longest suffix of the preceding ones that occurs."""
    ids = to_ids(engine, wanted.query)
    found = engine.infgram_prob(ids)
    suffix = suffix_to_wire(engine.tokenizer, ids[:-1], found.suffix_length)
    return query_to_wire(engine, ids) | prob_to_wire(found) | suffix


@_post("infgram_ntd", NtdRequest, InfgramNtdRead, _NEXT)
def infgram_ntd(engine: Engine, wanted: NtdRequest) -> Wire:
    """Distribution of the next token after the longest suffix that occurs."""
    ids = to_ids(engine, wanted.query)
    with _alone(wanted):
        found = engine.infgram_ntd(ids, wanted.max_support or DEFAULT_SUPPORT)
    suffix = suffix_to_wire(engine.tokenizer, ids, found.suffix_length)
    return query_to_wire(engine, ids) | distribution_to_wire(engine.tokenizer, found) | suffix


@_post("get_document_by_rank", RankRequest, OneDocumentRead, {"shard": 0, "rank": 7} | _AROUND)
def get_document_by_rank(engine: Engine, wanted: RankRequest) -> Wire:
    """The document around a rank of `segmentByShard`."""
    around = (wanted.needle_length, wanted.maximum_context_length)
    return one_to_wire(engine, engine.document_by_rank(wanted.shard, wanted.rank, *around))


@_post(
    "get_document_by_pointer", PointerRequest, OneDocumentRead, {"shard": 0, "pointer": 8} | _AROUND
)
def get_document_by_pointer(engine: Engine, wanted: PointerRequest) -> Wire:
    """The document around a pointer of `ptrsByShard`."""
    around = (wanted.needle_length, wanted.maximum_context_length)
    return one_to_wire(engine, engine.document_by_pointer(wanted.shard, wanted.pointer, *around))


@_post("get_document_by_index", IndexRequest, OneDocumentRead, _BEGINNING)
def get_document_by_index(engine: Engine, wanted: IndexRequest) -> Wire:
    """The beginning of a document, by its number."""
    return one_to_wire(engine, _beginning(engine, wanted))


@_post("get_documents_by_index", IndexRequests, DocumentsRead, [_BEGINNING])
def get_documents_by_index(engine: Engine, wanted: list[IndexRequest]) -> Wire:
    """The beginnings of several documents."""
    check_documents(wanted)
    return documents_to_wire(engine, [_beginning(engine, one) for one in wanted])


def _beginning(engine: Engine, wanted: IndexRequest) -> Any:
    return engine.document_by_index(wanted.document_index, wanted.maximum_context_length)


@raw.get(
    "/{index}/documents/",
    responses={200: {"model": PageRead}},
    openapi_extra=describe(
        path=_PATH,
        query={
            "search": {"required": True, "schema": {"type": "string", "minLength": 1}},
            "maximum_document_display_length": {
                "schema": {"type": "integer", "minimum": 1, "maximum": MAX_CONTEXT, "default": 10},
                "description": "Most tokens on each side of the occurrence.",
            },
            "page": {"schema": {"type": "integer", "minimum": 0, "default": 0}},
            "page_size": {
                "schema": {"type": "integer", "minimum": 1, "maximum": MAX_DOCUMENTS, "default": 10}
            },
        },
    ),
)
async def search_documents(request: Request) -> Response:
    """Pages of the documents around each occurrence of a text; a document may repeat."""
    return await _ask(request, validate(_SEARCH, dict(request.query_params)), _search)


_SEARCH = TypeAdapter(SearchRequest)


def _search(engine: Engine, wanted: SearchRequest) -> Wire:
    check_page(wanted)
    ids = to_ids(engine, wanted.search)
    found = engine.find(ids)
    around = (len(ids), wanted.maximum_document_display_length)
    documents = [
        engine.document_by_rank(shard, rank, *around)
        for shard, rank in places_of_page(found, wanted.page, wanted.page_size)
    ]
    return page_to_wire(engine, documents, wanted, found.count)
