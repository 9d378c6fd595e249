"""Attribution of a text to the documents of an index.

The steps are infini-gram API's (https://github.com/allenai/infinigram-api, attribution_worker/): the
engine finds the longest spans that occur at most `maximumFrequency` times; the best ones are kept,
each with documents, and each document with three windows around the span.

Calls block, possibly for long. `check` is called between the steps and stops them by raising.
"""

from collections.abc import Callable, Sequence
from math import ceil
from random import Random
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from pydantic.alias_generators import to_camel

from app.core.errors import invalid_field
from app.infini_gram.engine import Engine
from app.infini_gram.engine_types import Document, Span

# The original has no upper bounds. These keep one request from exhausting a machine; each is far
# above the requests of its clients.
MAX_CHARACTERS = 100_000
# The engine starts a thread for each span, all at once; Linux refuses twice as many.
MAX_TOKENS = 16_384
MAX_FREQUENCY = 1_000_000
MAX_DOCUMENTS_PER_SPAN = 1000
MAX_CONTEXT = 10_000
MAX_DELIMITERS = 100
MAX_DELIMITER_CHARACTERS = 100
# Occurrences that the engine may materialize for all spans together: about 50 bytes each, and 250
# for the span whose documents are being chosen.
MAX_PLACES = 5_000_000
# Tokens of all documents of a response: about ten bytes of JSON each.
MAX_DOCUMENT_TOKENS = 5_000_000

_SAMPLE_SEED = 42  # the original's: the same request returns the same documents

_EXAMPLE = "def main():\n    return None\n"

Check = Callable[[], None]
_Context = Annotated[int, Field(gt=0, le=MAX_CONTEXT)]


class AttributionParameters(BaseModel):
    """Options of an attribution, in camelCase or snake_case.

    Unknown members are ignored, and so are those that the original once had: `prompt`,
    `includeDocuments`, `filterMethod` and others.
    """

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="ignore",
        frozen=True,
        allow_inf_nan=False,
    )

    delimiters: list[Annotated[str, StringConstraints(max_length=MAX_DELIMITER_CHARACTERS)]] = (
        Field(
            [],
            max_length=MAX_DELIMITERS,
            description="A span ends with the first of their tokens, and goes on in the next span.",
            examples=[["\n", "."]],
        )
    )
    allow_spans_with_partial_words: bool = Field(
        False, description="Also spans that begin or end within a word."
    )
    minimum_span_length: int = Field(1, gt=0, le=MAX_TOKENS, description="Fewest tokens of a span.")
    maximum_frequency: int = Field(
        10, gt=0, le=MAX_FREQUENCY, description="Most occurrences of a span in the corpus."
    )
    maximum_span_density: float = Field(
        0.05, gt=0, description="Most spans per token of the text; 1 or more: all of them."
    )
    span_ranking_method: Literal["length", "unigram_logprob_sum"] = Field(
        "length", description="Which spans are kept: the longest, or those of the rarest tokens."
    )
    maximum_documents_per_span: int = Field(
        10, gt=0, le=MAX_DOCUMENTS_PER_SPAN, description="If there are more, a fixed sample."
    )
    maximum_context_length: _Context = Field(
        250, description="Most tokens of `text` on each side of the span."
    )
    maximum_context_length_long: _Context = Field(100, description="The same of `textLong`.")
    maximum_context_length_snippet: _Context = Field(40, description="The same of `textSnippet`.")


class AttributionRequest(AttributionParameters):
    response: str = Field(max_length=MAX_CHARACTERS, examples=[_EXAMPLE])


def attribute(
    engine: Engine, parameters: AttributionParameters, response: str, check: Check = lambda: None
) -> dict[str, Any]:
    """The response of infini-gram API's attribution, ready for JSON.

    Raises InvalidRequestError for values beyond a bound, EngineError, and any exception of `check`.
    """
    _check_length(len(response), MAX_CHARACTERS, "characters")
    ids = engine.tokenizer.encode(response)
    _check_length(len(ids), MAX_TOKENS, "tokens")
    check()
    delimiters = delimiter_ids(engine, parameters.delimiters)
    _check_frequency(engine, ids, delimiters, parameters, check)
    spans = engine.attribute(
        ids,
        delimiters,
        parameters.minimum_span_length,
        parameters.maximum_frequency,
        parameters.allow_spans_with_partial_words,
    )
    kept = rank_and_cap(spans, parameters, len(ids))
    window = _Windows(engine, parameters, check)
    return {
        "index": engine.declaration.name,
        "inputTokens": engine.tokenizer.pieces(response),
        "spans": [window.span_to_wire(span, ids) for span in kept],
    }


def delimiter_ids(engine: Engine, delimiters: Sequence[str]) -> list[int]:
    """Token ids that end a span: those that the index declares for a text, or else its encoding."""
    declared = engine.declaration.delimiters
    ids: dict[int, None] = {}
    for delimiter in delimiters:
        found = (
            [declared[delimiter]] if delimiter in declared else engine.tokenizer.encode(delimiter)
        )
        ids.update(dict.fromkeys(found))
    return list(ids)


def rank_and_cap(
    spans: Sequence[Span], parameters: AttributionParameters, tokens: int
) -> list[Span]:
    density = parameters.maximum_span_density
    most = tokens if density >= 1 else ceil(tokens * density)
    if parameters.span_ranking_method == "length":
        ranked = sorted(spans, key=lambda span: span.length, reverse=True)
    else:
        ranked = sorted(spans, key=lambda span: span.unigram_logprob_sum)
    return sorted(ranked[:most], key=lambda span: span.left)


class _Windows:
    """Fetches documents, and counts their tokens against the bound of a response."""

    def __init__(self, engine: Engine, parameters: AttributionParameters, check: Check) -> None:
        self._engine = engine
        self._parameters = parameters
        self._check = check
        self._tokens = 0

    def span_to_wire(self, span: Span, ids: Sequence[int]) -> dict[str, Any]:
        token_ids = list(ids[span.left : span.right])
        return {
            "left": span.left,
            "right": span.right,
            "length": span.length,
            "count": span.count,
            "unigramLogprobSum": span.unigram_logprob_sum,
            "text": self._engine.tokenizer.decode(token_ids),
            "tokenIds": token_ids,
            "documents": [
                self._document_to_wire(self._fetch(span, *pointer), span.length)
                for pointer in self._sample(span.pointers)
            ],
        }

    def _sample(self, pointers: list[tuple[int, int]]) -> list[tuple[int, int]]:
        most = self._parameters.maximum_documents_per_span
        if len(pointers) <= most:
            return pointers
        return Random(_SAMPLE_SEED).sample(pointers, most)  # noqa: S311 # no secret

    def _fetch(self, span: Span, shard: int, pointer: int) -> Document:
        self._check()
        document = self._engine.document_by_pointer(
            shard, pointer, span.length, self._parameters.maximum_context_length
        )
        self._tokens += len(document.token_ids)
        if self._tokens > MAX_DOCUMENT_TOKENS:
            raise invalid_field(
                "maximumContextLength",
                f"the documents would have more than {MAX_DOCUMENT_TOKENS:,} tokens together; ask "
                "for less context, fewer documents per span, or a lower density of spans",
            )
        return document

    def _document_to_wire(self, document: Document, length: int) -> dict[str, Any]:
        long, long_offset = cut(document, length, self._parameters.maximum_context_length_long)
        snippet, snippet_offset = cut(
            document, length, self._parameters.maximum_context_length_snippet
        )
        decode = self._engine.tokenizer.decode
        return {
            "documentIndex": document.index,
            "documentLength": document.length,
            "displayLength": document.display_length,
            "needleOffset": document.needle_offset,
            "metadata": document.metadata,
            "tokenIds": document.token_ids,
            "text": decode(document.token_ids),
            "blocked": document.blocked,
            "displayLengthLong": len(long),
            "needleOffsetLong": long_offset,
            "textLong": decode(long),
            # A length, despite the original's name.
            "displayOffsetSnippet": len(snippet),
            "needleOffsetSnippet": snippet_offset,
            "textSnippet": decode(snippet),
        }


def cut(document: Document, length: int, context: int) -> tuple[list[int], int]:
    """At most `context` tokens on each side of the needle, and the needle's offset in them."""
    start = max(0, document.needle_offset - context)
    end = document.needle_offset + length + context
    return document.token_ids[start:end], document.needle_offset - start


def _check_length(found: int, most: int, unit: str) -> None:
    if found > most:
        raise invalid_field("response", f"has {found:,} {unit}, and {most:,} are most")


def _check_frequency(
    engine: Engine,
    ids: Sequence[int],
    delimiters: Sequence[int],
    parameters: AttributionParameters,
    check: Check,
) -> None:
    """Refuse a text with too many occurrences; only a large `maximumFrequency` needs it."""
    if len(ids) * min(parameters.maximum_frequency, engine.total_tokens) <= MAX_PLACES:
        return
    enough = MAX_PLACES // len(ids)
    is_start, is_end = _word_bounds(engine, ids, parameters)
    places = reached = 0
    for left in range(len(ids)):
        check()
        if not is_start[left]:
            continue
        most, right, is_whole = _measure(engine, ids, left, frozenset(delimiters), is_end, enough)
        if is_whole and right <= reached:
            continue  # contained in an earlier span, and dropped
        reached = max(reached, right)
        places += min(parameters.maximum_frequency, most)
    if places > MAX_PLACES:
        raise invalid_field(
            "maximumFrequency",
            f"is too large for this text, whose parts occur too often: {enough:,} is safe",
        )


def _word_bounds(
    engine: Engine, ids: Sequence[int], parameters: AttributionParameters
) -> tuple[Sequence[bool], Sequence[bool]]:
    """Flags per token: a span may begin with it; a span may end before it (or with the text)."""
    if parameters.allow_spans_with_partial_words:
        return [True] * len(ids), [True] * (len(ids) + 1)
    starts = engine.tokenizer.word_start_ids()
    is_start = [token_id in starts for token_id in ids]
    return is_start, [*is_start, True]


def _measure(
    engine: Engine,
    ids: Sequence[int],
    left: int,
    delimiters: frozenset[int],
    is_end: Sequence[bool],
    enough: int,
) -> tuple[int, int, bool]:
    """An upper bound of the occurrences of the span that begins here: those of one of its prefixes.

    Also returns the end of that prefix, and whether it is the whole span. The search for a longer
    prefix ends when few enough occurrences are left.
    """
    most, end = 0, left
    for right in range(left + 1, len(ids) + 1):
        if is_end[right]:
            count = engine.count(ids[left:right]).count
            if count == 0:
                break
            most, end = count, right
            if count <= enough:
                return most, end, False
        if ids[right - 1] in delimiters:
            break
    return most, end, True
