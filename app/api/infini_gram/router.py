"""infini-gram API: queries about a corpus, run on an index of it.

https://github.com/allenai/infinigram-api. Each query runs on a thread (`Indexes.run`), and so does
the serialization of its response, which may be long.
"""

from collections.abc import Callable, Iterable
from math import ceil
from typing import Annotated, Any, TypeVar, get_type_hints

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel

from app.api.dependencies import ServicesOf, services_of
from app.api.infini_gram import response_schemas as answers
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
    check_document_tokens,
    to_cnf,
    to_ids,
)
from app.api.json_codec import JSON, json_response, parse, validate
from app.api.raw_routes import body_of, describe, reference
from app.core.byte_budget import charge
from app.core.errors import EngineInputError, FieldError
from app.infini_gram.engine import Engine
from app.infini_gram.engine_types import Document

router = APIRouter(tags=["infini-gram"])
raw = APIRouter(tags=["infini-gram"])

_T = TypeVar("_T", bound=BaseModel)
_Answer = Callable[[Engine, _T], BaseModel]  # blocks

_PATH = {"index": "An index's name."}
_QUERY = {"query": "return None"}
_NEXT = {"query": "return", "maxSupport": 100}
_CNF = {"query": "def OR class AND return", "maxDiffTokens": 50}
_AROUND = {"needleLength": 2, "maximumContextLength": 50}
_BEGINNING = {"documentIndex": 0, "maximumContextLength": 50}


@router.get("/indexes", responses={200: {"model": list[str] | list[answers.IndexRead]}})
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
    read = [answers.read_index(indexes.engine(name)) for name in indexes.names]
    return json_response([one.model_dump(by_alias=True) for one in read])


async def _ask(request: Request, wanted: _T, answer: _Answer[_T]) -> Response:
    """Run a query on the path's index and serialize its response, both on a thread."""

    def call(engine: Engine) -> bytes:
        return answer(engine, wanted).model_dump_json(by_alias=True).encode()

    try:
        body = await services_of(request).indexes.run(request.path_params["index"], call)
    except EngineInputError as error:
        error.errors = error.errors or [FieldError("body", error.detail)]
        raise
    await charge(len(body))
    return Response(body, media_type=JSON)


def _post(example: Any, body: dict[str, Any] | None = None) -> Callable[[_Answer[_T]], _Answer[_T]]:
    """Register POST /{index}/NAME for a function of this name.

    Its types are those of the request and the response; its docstring describes the route.
    """

    def register(answer: _Answer[_T]) -> _Answer[_T]:
        name, types = answer.__name__, get_type_hints(answer)
        wanted: type[_T] = types["wanted"]

        async def endpoint(request: Request) -> Response:
            return await _ask(request, parse(wanted, await body_of(request)), answer)

        raw.add_api_route(
            f"/{{index}}/{name}",
            endpoint,
            methods=["POST"],
            name=name,
            description=answer.__doc__,
            responses={200: {"model": types["return"]}},
            openapi_extra=describe(path=_PATH, body=body or wanted, example=example),
        )
        return answer

    return register


@_post(_QUERY)
def find(engine: Engine, wanted: QueryRequest) -> answers.FindRead:
    """Find a token sequence: ranges of ranks in each shard, for get_document_by_rank."""
    ids = to_ids(engine, wanted.query)
    found = engine.find(ids)
    return answers.FindRead(
        **answers.of_query(engine, ids), cnt=found.count, segment_by_shard=found.segment_by_shard
    )


@_post(_CNF)
def find_cnf(engine: Engine, wanted: CnfRequest) -> answers.FindCnfRead:
    """Find places near which each clause has a term: pointers, for get_document_by_pointer."""
    cnf = to_cnf(engine, wanted.query)
    found = engine.find_cnf(cnf, *_bounds(wanted))
    return answers.FindCnfRead(
        **answers.of_cnf(engine, cnf),
        cnt=found.count,
        approx=found.approx,
        ptrs_by_shard=found.ptrs_by_shard,
    )


@_post(_QUERY)
def count(engine: Engine, wanted: QueryRequest) -> answers.CountRead:
    """Count the occurrences of a token sequence."""
    ids = to_ids(engine, wanted.query)
    found = engine.count(ids)
    return answers.CountRead(
        **answers.of_query(engine, ids), count=found.count, approx=found.approx
    )


@_post(_CNF)
def count_cnf(engine: Engine, wanted: CnfRequest) -> answers.CountCnfRead:
    """Count places near which each clause has a term; `approx` if the count is estimated."""
    cnf = to_cnf(engine, wanted.query)
    found = engine.count_cnf(cnf, *_bounds(wanted))
    return answers.CountCnfRead(
        **answers.of_cnf(engine, cnf), count=found.count, approx=found.approx
    )


def _bounds(wanted: CnfRequest) -> tuple[int, int]:
    return (
        wanted.max_clause_freq or DEFAULT_CLAUSE_FREQ,
        wanted.max_diff_tokens or DEFAULT_DIFF_TOKENS,
    )


@_post(_QUERY)
def prob(engine: Engine, wanted: QueryRequest) -> answers.ProbRead:
    """Probability of the last token after the preceding ones; -1 if these never occur."""
    ids = to_ids(engine, wanted.query)
    return answers.ProbRead(**answers.of_query(engine, ids), **answers.of_prob(engine.prob(ids)))


@_post(_NEXT)
def ntd(engine: Engine, wanted: NtdRequest) -> answers.NtdRead:
    """Distribution of the next token; `approx` if it comes from a sample of the occurrences."""
    ids = to_ids(engine, wanted.query)
    found = engine.ntd(ids, wanted.max_support or DEFAULT_SUPPORT)
    return answers.NtdRead(
        **answers.of_query(engine, ids), **answers.of_distribution(engine.tokenizer, found)
    )


@_post(_QUERY)
def infgram_prob(engine: Engine, wanted: QueryRequest) -> answers.InfgramProbRead:
    """Probability of the last token after the longest suffix of the preceding ones that occurs."""
    ids = to_ids(engine, wanted.query)
    found = engine.infgram_prob(ids)
    suffix = answers.of_suffix(engine.tokenizer, ids[:-1], found.suffix_length)
    return answers.InfgramProbRead(
        **answers.of_query(engine, ids), **answers.of_prob(found), **suffix
    )


@_post(_NEXT)
def infgram_ntd(engine: Engine, wanted: NtdRequest) -> answers.InfgramNtdRead:
    """Distribution of the next token after the longest suffix that occurs."""
    ids = to_ids(engine, wanted.query)
    found = engine.infgram_ntd(ids, wanted.max_support or DEFAULT_SUPPORT)
    suffix = answers.of_suffix(engine.tokenizer, ids, found.suffix_length)
    distribution = answers.of_distribution(engine.tokenizer, found)
    return answers.InfgramNtdRead(**answers.of_query(engine, ids), **distribution, **suffix)


@_post({"shard": 0, "rank": 7} | _AROUND)
def get_document_by_rank(engine: Engine, wanted: RankRequest) -> answers.OneDocumentRead:
    """The document around a rank of `segmentByShard`."""
    around = (wanted.needle_length, wanted.maximum_context_length)
    return _one(engine, engine.document_by_rank(wanted.shard, wanted.rank, *around))


@_post({"shard": 0, "pointer": 8} | _AROUND)
def get_document_by_pointer(engine: Engine, wanted: PointerRequest) -> answers.OneDocumentRead:
    """The document around a pointer of `ptrsByShard`."""
    around = (wanted.needle_length, wanted.maximum_context_length)
    return _one(engine, engine.document_by_pointer(wanted.shard, wanted.pointer, *around))


@_post(_BEGINNING)
def get_document_by_index(engine: Engine, wanted: IndexRequest) -> answers.OneDocumentRead:
    """The beginning of a document, by its number."""
    return _one(engine, _beginning(engine, wanted))


@_post([_BEGINNING], {"type": "array", "maxItems": MAX_DOCUMENTS, "items": reference(IndexRequest)})
def get_documents_by_index(engine: Engine, wanted: IndexRequests) -> answers.DocumentsRead:
    """The beginnings of several documents."""
    asked = sum(one.maximum_context_length for one in wanted.root)
    check_document_tokens("maximumContextLength", asked)
    documents = [_beginning(engine, one) for one in wanted.root]
    return answers.DocumentsRead(index=engine.declaration.name, documents=_all(engine, documents))


def _beginning(engine: Engine, wanted: IndexRequest) -> Document:
    return engine.document_by_index(wanted.document_index, wanted.maximum_context_length)


def _one(engine: Engine, document: Document) -> answers.OneDocumentRead:
    return answers.OneDocumentRead(
        index=engine.declaration.name, **answers.of_document(engine.tokenizer, document)
    )


def _all(engine: Engine, documents: Iterable[Document]) -> list[answers.DocumentRead]:
    return [answers.DocumentRead(**answers.of_document(engine.tokenizer, one)) for one in documents]


@raw.get(
    "/{index}/documents/",
    responses={200: {"model": answers.PageRead}},
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
    return await _ask(request, validate(SearchRequest, dict(request.query_params)), _search)


def _search(engine: Engine, wanted: SearchRequest) -> answers.PageRead:
    asked = 2 * wanted.maximum_document_display_length * wanted.page_size
    check_document_tokens("page_size", asked)
    ids = to_ids(engine, wanted.search)
    found = engine.find(ids)
    around = (len(ids), wanted.maximum_document_display_length)
    places = engine.places(found, wanted.page * wanted.page_size, wanted.page_size)
    documents = (engine.document_by_rank(*place, *around) for place in places)
    return answers.PageRead(
        index=engine.declaration.name,
        documents=_all(engine, documents),
        page=wanted.page,
        page_size=wanted.page_size,
        page_count=ceil(found.count / wanted.page_size),
        total_documents=found.count,  # of occurrences, as in the original
    )
