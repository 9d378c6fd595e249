"""Requests to rank, to score and to embed, in the shapes of Cohere, Jina, vLLM and TEI.

https://docs.cohere.com/reference/rerank, https://jina.ai/reranker,
https://docs.vllm.ai/en/latest/models/pooling_models, and
https://huggingface.github.io/text-embeddings-inference.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, Field, model_validator

from app.api.schema_parts import STRICT, Refused, value_error
from app.core.whole_numbers import WHOLE
from app.inference.pooling import (
    DOCUMENT,
    MAX_DIMENSIONS,
    QUERY,
    EmbeddingParameters,
    ScoreParameters,
)
from app.results.drafts import Prompt
from app.results.requests import MAX_PROMPT_CHARACTERS, SendOptions

MAX_TEXTS = 1000  # of one request: each is a result

Text = Annotated[str, Field(min_length=1, max_length=MAX_PROMPT_CHARACTERS)]


class Document(BaseModel):
    model_config = STRICT

    text: Text


def _to_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _to_texts(value: Any) -> Any:
    """Documents may be objects, as Jina's and Cohere's first version have them."""
    if isinstance(value, list):
        return [one["text"] if isinstance(one, dict) and "text" in one else one for one in value]
    return value


Texts = Annotated[list[Text], Field(min_length=1, max_length=MAX_TEXTS)]
OneOrMore = Annotated[Texts, BeforeValidator(_to_list, json_schema_input_type=Text | Texts)]
Documents = Annotated[
    Texts, BeforeValidator(_to_texts, json_schema_input_type=list[Text | Document])
]
Model = Annotated[str, Field(min_length=1, max_length=256)]


class _Request(BaseModel):
    model_config = STRICT

    model: Model | None = Field(
        None, description="May be left out while one model of its kind is ready."
    )
    store: bool | None = Field(None, description="False: the texts are erased on delivery.")


class RerankRequest(_Request):
    """A query, and `documents` (Cohere, Jina) or `texts` (TEI) to rank."""

    query: Text
    documents: Documents | None = None
    texts: Texts | None = Field(None, description="TEI's; the response is TEI's, too.")
    top_n: Annotated[int, Field(ge=0), WHOLE] | None = Field(
        None, description="Return only this many of the best; 0 is all."
    )
    return_documents: bool | None = Field(
        None, description="By default false below /v2, otherwise true."
    )
    return_text: bool | None = Field(None, description="TEI's; default false.")
    raw_scores: bool | None = Field(None, description="TEI's: without the model's activation.")
    truncate: bool | None = Field(
        None,
        description="Cut what exceeds the model's length; the default is true with `documents`.",
    )
    truncation_direction: Literal["Right", "right"] | None = None
    max_tokens_per_doc: Annotated[int, Field(ge=1), WHOLE] | None = Field(
        None, description="Ignored: a document is cut at the model's length."
    )
    rank_fields: Refused = Field(None, description="Not supported.")

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if (self.documents is None) == (self.texts is None):
            raise value_error("give either documents or texts")
        return self

    @property
    def is_tei(self) -> bool:
        return self.texts is not None

    @property
    def ranked(self) -> list[str]:
        return self.texts or self.documents or []

    def to_prompts(self) -> list[Prompt]:
        return [_pair(self.query, one) for one in self.ranked]

    def to_send_options(self) -> SendOptions:
        truncate = not self.is_tei if self.truncate is None else self.truncate
        return _score(raw=self.raw_scores, truncate=truncate)


class ScoreRequest(_Request):
    """vLLM's: pairs of texts; one `text_1` may go with several `text_2`."""

    text_1: OneOrMore
    text_2: OneOrMore
    truncate_prompt_tokens: Literal[-1] | None = Field(
        None, description="-1 cuts what exceeds the model's length."
    )
    use_activation: bool | None = Field(None, description="False: the model's number itself.")

    @model_validator(mode="after")
    def _makes_pairs(self) -> Self:
        if len(self.text_1) not in (1, len(self.text_2)):
            raise value_error("text_1 must be one text, or as many as text_2")
        return self

    def to_prompts(self) -> list[Prompt]:
        firsts = self.text_1 * len(self.text_2) if len(self.text_1) == 1 else self.text_1
        return [_pair(*pair) for pair in zip(firsts, self.text_2, strict=True)]

    def to_send_options(self) -> SendOptions:
        truncate = self.truncate_prompt_tokens is not None
        return _score(raw=self.use_activation is False, truncate=truncate)


class EmbedRequest(_Request):
    """TEI's: texts whose vectors are wanted."""

    inputs: OneOrMore
    normalize: bool | None = None
    truncate: bool | None = Field(None, description="Cut what exceeds the model's length.")
    truncation_direction: Literal["Right", "right"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=MAX_DIMENSIONS), WHOLE] | None = None
    prompt_name: Refused = Field(None, description="Not supported: put the prompt before the text.")

    def to_prompts(self) -> list[Prompt]:
        return [Prompt(content=one) for one in self.inputs]

    def to_send_options(self) -> SendOptions:
        parameters = EmbeddingParameters(
            dimensions=self.dimensions,
            normalize=self.normalize,
            truncate=True if self.truncate else None,
        )
        return SendOptions(embedding=parameters)


def _pair(query: str, document: str) -> Prompt:
    messages = [{"role": QUERY, "content": query}, {"role": DOCUMENT, "content": document}]
    return Prompt(messages=messages)


def _score(*, raw: bool | None, truncate: bool) -> SendOptions:
    parameters = ScoreParameters(raw=True if raw else None, truncate=True if truncate else None)
    return SendOptions(score=parameters)
