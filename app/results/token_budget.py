"""Tokens of a request: those of its prompt, and how many its model may generate."""

import math

from app.inference.model_registry import Model
from app.results.drafts import SubmissionDraft, invalid

# A tokenizer makes at most one token of a byte, and adds a few special ones.
_SPECIAL_TOKENS = 8


async def count_tokens(model: Model, text: str) -> int:
    """Tokens of a prompt; a quarter of its bytes where the model has no tokenizer."""
    counted = await model.format.count_tokens(text) if model.format else None
    return math.ceil(len(text.encode()) / 4) if counted is None else counted


async def generated_tokens(draft: SubmissionDraft, default: int) -> int:
    """The most tokens to generate. Raises InvalidRequestError for lengths that do not fit."""
    parameters = draft.options.parameters
    max_tokens = await _within_length(draft, parameters.max_tokens, default)
    if (parameters.min_tokens or 0) > max_tokens:
        raise invalid(
            "parameters.min_tokens",
            f"{parameters.min_tokens} exceeds max_tokens, which is {max_tokens} unless it is given",
        )
    return max_tokens


def fits(model: Model, prompt_bytes: int, max_tokens: int) -> bool:
    """Return whether a prompt of this length and its answer fit, without counting tokens."""
    length = model.max_model_len
    if length is None or model.format is None:
        return True
    return prompt_bytes + _SPECIAL_TOKENS + max_tokens <= length


async def _within_length(draft: SubmissionDraft, given: int | None, default: int) -> int:
    model, length = draft.model, draft.model.max_model_len
    wanted = given or default
    if fits(model, draft.size.bytes, wanted):
        return wanted
    assert length is not None
    assert model.format is not None
    prompt_tokens = await model.format.count_tokens(draft.text)
    if prompt_tokens is None:
        return given or min(default, length)
    if prompt_tokens >= length:
        raise invalid(
            "content",
            f"the prompt has {prompt_tokens} tokens; {model.name} takes {length} in all",
            max_model_len=length,
        )
    if given is not None and prompt_tokens + given > length:
        raise invalid(
            "parameters.max_tokens",
            f"{given} and a prompt of {prompt_tokens} tokens exceed the {length} tokens of "
            f"{model.name}; at most {length - prompt_tokens} are left",
            max_model_len=length,
        )
    return given or min(default, length - prompt_tokens)
