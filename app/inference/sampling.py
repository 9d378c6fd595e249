"""Sampling parameters, with vLLM's names, and their bounds.

All are checked here, because the backend answers a wrong parameter with an opaque error. The model and
its engine have the defaults (docs/sampling.md): they receive only the parameters of the request, and
`max_tokens`.
"""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, model_validator

from app.core.whole_numbers import WHOLE
from app.inference.structured_outputs import StructuredOutputs

_INT64 = 2**63
MAX_TOKENS = 1_000_000

Penalty = Annotated[float, Field(ge=-2.0, le=2.0, allow_inf_nan=False)]
StopText = Annotated[str, Field(min_length=1, max_length=256)]
# One text becomes a list of one, so that an error names the member and not a union.
StopTexts = Annotated[
    list[StopText],
    Field(max_length=16),
    BeforeValidator(
        lambda given: [given] if isinstance(given, str) else given,
        json_schema_input_type=StopText | Annotated[list[StopText], Field(max_length=16)],
    ),
]
TokenId = Annotated[int, Field(ge=0, lt=2**31), WHOLE]
TokenIdText = Annotated[str, Field(pattern=r"^\d{1,9}$")]
Bias = Annotated[float, Field(ge=-100.0, le=100.0, allow_inf_nan=False)]


class SamplingParameters(BaseModel):
    """Parameters of the choice of tokens. Unknown names are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)

    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS), WHOLE] | None = Field(
        None,
        description="Most tokens to generate. Left open: the default, or what the model's length "
        "leaves where that is less.",
    )
    min_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS), WHOLE] | None = None
    """Fewest tokens before an end or stop string may end the text."""
    temperature: Annotated[float, Field(ge=0.0, le=100.0, allow_inf_nan=False)] | None = None
    """0 is greedy; larger is more random. The default is the model's own, else 1."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0, allow_inf_nan=False)] | None = None
    """Sample from the smallest set of tokens with this much probability."""
    top_k: Annotated[int, Field(ge=-1, le=1_000_000), WHOLE] | None = None
    """Sample from this many most likely tokens; 0 or -1 means all."""
    min_p: Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)] | None = None
    """Drop tokens below this share of the most likely one's probability."""
    presence_penalty: Penalty | None = None
    """Positive values favour tokens that have not occurred yet."""
    frequency_penalty: Penalty | None = None
    """Positive values disfavour tokens by how often they occurred."""
    repetition_penalty: Annotated[float, Field(gt=0.0, le=100.0, allow_inf_nan=False)] | None = None
    """Above 1 disfavours repetition of prompt and output."""
    stop: StopTexts | None = None
    """Text(s) that end the generation; not part of the result."""
    stop_token_ids: Annotated[list[TokenId], Field(max_length=256)] | None = None
    """Token ids that end the generation."""
    bad_words: Annotated[list[StopText], Field(max_length=256)] | None = None
    """Words that are never generated."""
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1, max_length=4096)] | None = None
    """Only these token ids are generated; without the model's end token among them, the text ends by
    its length or a stop."""
    include_stop_str_in_output: bool | None = None
    """Keep the stop text in the result."""
    ignore_eos: bool | None = None
    """Go on after the model's end token, up to max_tokens."""
    seed: Annotated[int, Field(ge=-_INT64, lt=_INT64), WHOLE] | None = None
    """Makes sampling repeatable on one engine."""
    n: Annotated[Literal[1], WHOLE] | None = None
    """One result is one generation: only 1."""
    logprobs: Annotated[int, Field(ge=0, le=20), WHOLE] | None = None
    """Store this many most likely tokens, with log probabilities, per token."""
    prompt_logprobs: Annotated[int, Field(ge=0, le=20), WHOLE] | None = None
    """Store this many most likely tokens, with log probabilities, per token of the prompt."""
    logit_bias: Annotated[dict[TokenIdText, Bias], Field(max_length=300)] | None = None
    """Added to the logits of these token ids."""
    skip_special_tokens: bool | None = None
    """Leave special tokens out of the text."""
    spaces_between_special_tokens: bool | None = None
    """Put spaces between special tokens."""
    structured_outputs: StructuredOutputs | None = Field(
        None,
        description="Force the text to be JSON of a schema (`json`), a `regex`, one `choice`, a "
        "`grammar`, or any `json_object`.",
    )

    @model_validator(mode="after")
    def _min_within_max(self) -> Self:
        if self.min_tokens and self.max_tokens and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})"
            )
        return self

    def to_stored(self, max_tokens: int) -> dict[str, JsonValue]:
        """The stored form: the given parameters, and always this `max_tokens`."""
        given = self.model_dump(exclude_none=True, exclude={"max_tokens"})
        return {"max_tokens": max_tokens} | given
