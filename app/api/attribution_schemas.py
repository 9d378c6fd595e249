"""Wire schema of an attribution, as infini-gram API returns it; `app.infini_gram.attribution` builds it."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel


class _Camel(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True)


class AttributedDocumentRead(_Camel):
    """A document with a span, in three windows around it: `text`, `textLong`, `textSnippet`."""

    document_index: int
    document_length: int = Field(description="In tokens, like all lengths and offsets.")
    display_length: int
    needle_offset: int = Field(description="Where the span begins in `tokenIds`.")
    metadata: dict[str, Any]
    token_ids: list[int]
    text: str
    blocked: bool
    display_length_long: int
    needle_offset_long: int
    text_long: str
    display_offset_snippet: int = Field(description="The snippet's length, despite its name.")
    needle_offset_snippet: int
    text_snippet: str


class SpanRead(_Camel):
    """Tokens [left, right) of the text, which the corpus contains `count` times."""

    left: int
    right: int
    length: int
    count: int
    unigram_logprob_sum: float
    text: str
    token_ids: list[int]
    documents: list[AttributedDocumentRead]


class AttributionRead(_Camel):
    """The parts of a text that a corpus contains, and the documents that contain them."""

    index: str
    input_tokens: list[str]
    spans: list[SpanRead]
