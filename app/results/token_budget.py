"""Tokens of a request: those of its prompt, and how many its model may generate."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from app.inference.images import IMAGES
from app.inference.model_registry import Model
from app.inference.pooling import task_of
from app.queue.result_size import count_prompt_logprobs
from app.queue.team_limits import Limits
from app.results.drafts import SubmissionDraft, invalid
from app.results.requests import SendOptions
from app.results.reuse import may_reuse

# A tokenizer makes at most one token of a byte, and adds a few special ones.
_SPECIAL_TOKENS = 8


def needs_text(options: SendOptions, limits: Limits) -> bool:
    """Return whether a request needs more of its stored prompt than its size."""
    return (
        limits.tokens_per_minute is not None
        or options.parameters.prompt_logprobs is not None
        or options.score is not None
        or may_reuse(options, limits)
    )


async def count_tokens(model: Model, text: str) -> int:
    """Tokens of a prompt; a quarter of its bytes where the model has no tokenizer."""
    counted = await model.format.count_tokens(text) if model.format else None
    return math.ceil(len(text.encode()) / 4) if counted is None else counted


async def prompt_tokens(draft: SubmissionDraft) -> int:
    """`count_tokens` of a draft's prompt, and the tokens of its images."""
    ids = draft.token_ids
    if ids is not None:
        return len(ids)
    tokens = await count_tokens(draft.model, draft.text) + draft.image_tokens
    if draft.options.score is not None and draft.prompt is not None:
        tokens += await repeated_tokens(draft.model, draft.prompt)
    return tokens


async def repeated_tokens(model: Model, prompt: str) -> int:
    """Tokens of the query of a score: the model reads it again with each document behind the first."""
    query, *documents = orjson.loads(prompt)
    repeated = len(documents) - 1
    return repeated * await count_tokens(model, query) if repeated else 0


async def scored_tokens(draft: SubmissionDraft) -> int:
    """`most_tokens` of a draft's prompt, and the tokens of its images."""
    return await most_tokens(draft.model, draft.text, draft.token_ids) + draft.image_tokens


async def retried_tokens(model: Model, text: str, parameters: Mapping[str, Any]) -> tuple[int, int]:
    """Tokens of the prompt of a result that is sent again, and the most log probabilities of them."""
    ids = parameters.get("prompt_token_ids")
    images: int = parameters.get(IMAGES, {}).get("tokens", 0)
    tokens = await count_tokens(model, text) if ids is None else len(ids)
    if text and task_of(parameters) == "score":
        tokens += await repeated_tokens(model, text)
    most = await most_tokens(model, text, ids)
    return tokens + images, count_prompt_logprobs(parameters, most + images)


async def most_tokens(model: Model, text: str, token_ids: Sequence[int] | None = None) -> int:
    """An upper bound of a prompt's tokens: their number where the model has a tokenizer."""
    if token_ids is not None:
        return len(token_ids)
    counted = await model.format.count_tokens(text) if model.format else None
    return len(text.encode()) + _SPECIAL_TOKENS if counted is None else counted


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
    ids = draft.token_ids
    if ids is None and fits(model, draft.size.bytes + draft.image_tokens, wanted):
        return wanted
    if length is None or model.format is None:
        return wanted
    count = len(ids) if ids is not None else await model.format.count_tokens(draft.text)
    if count is None:
        return given or min(default, length)
    count += draft.image_tokens
    if count >= length:
        raise invalid(
            "content",
            f"the prompt has {count} tokens; {model.name} takes {length} in all",
            max_model_len=length,
        )
    if given is not None and count + given > length and not draft.cuts_max_tokens:
        raise invalid(
            "parameters.max_tokens",
            f"{given} and a prompt of {count} tokens exceed the {length} tokens of "
            f"{model.name}; at most {length - count} are left",
            max_model_len=length,
        )
    return min(wanted, length - count)
