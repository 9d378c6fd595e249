"""Sampling members of other engines, which vLLM does not have: refused by name in the dialects that
otherwise ignore unknown members. A value without effect is accepted; clients send it by default.
"""

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, Field, JsonValue

from app.api.schema_parts import Refused, value_error


def _only_one(value: Any) -> None:
    if value is not None and (isinstance(value, bool) or value != 1):
        raise value_error("is not supported by this service; only 1, which has no effect")


_RefusedFactor = Annotated[JsonValue, AfterValidator(_only_one)]


class RefusedSampling(BaseModel):
    dry_multiplier: Refused = Field(None, description="DRY is not supported: vLLM has none.")
    xtc_probability: Refused = Field(None, description="XTC is not supported: vLLM has none.")
    typical_p: _RefusedFactor = Field(None, description="Not supported.")
    tfs_z: _RefusedFactor = Field(None, description="Not supported.")
    top_a: Refused = Field(None, description="Not supported.")
    mirostat: Refused = Field(None, description="Not supported.")
    mirostat_mode: Refused = Field(None, description="Not supported.")
    dynatemp_range: Refused = Field(None, description="Not supported.")
    smoothing_factor: Refused = Field(None, description="Not supported.")
    epsilon_cutoff: Refused = Field(None, description="Not supported.")
    eta_cutoff: Refused = Field(None, description="Not supported.")


class RefusedExtensions(RefusedSampling):
    """vLLM's and OpenAI's sampling members too, in a dialect that has none of them."""

    min_p: Refused = Field(None, description="Not supported in this dialect.")
    presence_penalty: Refused = Field(None, description="Not supported in this dialect.")
    frequency_penalty: Refused = Field(None, description="Not supported in this dialect.")
    repetition_penalty: _RefusedFactor = Field(None, description="Not supported in this dialect.")
    logit_bias: Refused = Field(None, description="Not supported in this dialect.")
    bad_words: Refused = Field(None, description="Not supported in this dialect.")
    stop_token_ids: Refused = Field(None, description="Not supported in this dialect.")
    n: _RefusedFactor = Field(None, description="A message is one: only 1.")
    best_of: _RefusedFactor = Field(None, description="A message is one: only 1.")
    allowed_token_ids: Refused = Field(None, description="Not supported in this dialect.")
    structured_outputs: Refused = Field(None, description="Not supported: use output_config.")
    response_format: Refused = Field(None, description="Not supported: use output_config.")
