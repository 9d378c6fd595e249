"""OpenAI's embeddings: texts to results, and vectors back.

https://platform.openai.com/docs/api-reference/embeddings. Further members are those of vLLM's server.
"""

import base64
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, Field

from app.api.openai.completions_schemas import Prompts
from app.api.schema_parts import STRICT, Refused
from app.core.whole_numbers import WHOLE
from app.inference.pooling import MAX_DIMENSIONS, EmbeddingParameters
from app.results.requests import SendOptions
from app.results.rows import ResultRow


class EmbeddingRequest(BaseModel):
    """Texts whose vectors are wanted; each is a result of its own."""

    model_config = STRICT

    model: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    input: Prompts = Field(description="A text, up to 1,000 texts, or token ids of them.")
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=MAX_DIMENSIONS), WHOLE] | None = None
    user: str | None = Field(None, description="Ignored.")
    store: bool | None = Field(None, description="False: texts and vectors are erased on delivery.")
    normalize: bool | None = Field(None, description="vLLM's; false: the vector as it is pooled.")
    truncate_prompt_tokens: Literal[-1] | None = Field(
        None, description="vLLM's; -1 cuts what exceeds the model's length."
    )
    priority: Annotated[int, Field(ge=-100, le=100), WHOLE] | None = Field(
        None,
        description="vLLM's: larger values run later; below 0 only with a token that allows it.",
    )
    messages: Refused = Field(None, description="Not supported: send input.")

    def to_send_options(self) -> SendOptions:
        parameters = EmbeddingParameters(
            dimensions=self.dimensions,
            normalize=self.normalize,
            truncate=True if self.truncate_prompt_tokens else None,
        )
        return SendOptions(embedding=parameters, priority=-(self.priority or 0))


def embeddings(request: EmbeddingRequest, rows: Sequence[ResultRow]) -> dict[str, Any]:
    tokens = sum(row.prompt_tokens or 0 for row in rows)
    return {
        "object": "list",
        "data": [
            {
                "object": "embedding",
                "index": place,
                "embedding": _encoded(request, row),
            }
            for place, row in enumerate(rows)
        ],
        "model": rows[0].model_name,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def _encoded(request: EmbeddingRequest, row: ResultRow) -> str | orjson.Fragment:
    if request.encoding_format == "base64":
        return base64.b64encode(row.vector or b"").decode()
    return row.encoded_numbers()
