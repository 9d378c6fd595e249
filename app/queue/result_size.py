"""Memory that a result takes where it runs and where it is read."""

from collections.abc import Mapping
from typing import Any

# Bytes of one log probability as JSON text: 80 measured with vLLM, for short tokens.
_LOGPROB_BYTES = 100
# Bytes of a token's text with the objects that hold it: 105 measured.
_TOKEN_BYTES = 110
# The sampled token's, and one for the objects that hold all of them.
_FURTHER_LOGPROBS = 2
# Copies of a stored image: as it was read, in the request's tensor, and on its way to Triton.
_IMAGE_COPIES = 3
# More than any results take together.
UNBOUNDED = 2**62


def count_logprobs(parameters: Mapping[str, Any]) -> int:
    """Return how many log probabilities a result may have: those of the likely and sampled tokens."""
    wanted: int | None = parameters.get("logprobs")
    max_tokens: int = parameters.get("max_tokens", 0)
    return 0 if wanted is None else max_tokens * (wanted + 1)


def count_prompt_logprobs(parameters: Mapping[str, Any], prompt_tokens: int) -> int:
    wanted: int | None = parameters.get("prompt_logprobs")
    return 0 if wanted is None else prompt_tokens * (wanted + 1)


def expected_bytes(prompt_length: int, parameters: Mapping[str, Any]) -> int:
    """Return the bytes that a worker may hold for a result; an attribution has no `max_tokens`."""
    tokens: int = parameters.get("max_tokens", 0)
    wanted: int | None = parameters.get("logprobs")
    of_prompt: int | None = parameters.get("prompt_logprobs")
    held = 0 if wanted is None else wanted + _FURTHER_LOGPROBS
    # A prompt may have a token per character.
    each = 0 if of_prompt is None else (of_prompt + _FURTHER_LOGPROBS) * _LOGPROB_BYTES
    images: int = parameters.get("images", {}).get("characters", 0) * _IMAGE_COPIES
    return prompt_length * (1 + each) + tokens * (_TOKEN_BYTES + held * _LOGPROB_BYTES) + images


def expected_bytes_sql(result: str) -> str:
    """The same of a row of `results`; the lengths of stored texts are read without the texts."""
    return f"""(coalesce(octet_length({result}.prompt), (
      SELECT octet_length(c.content) FROM contexts c WHERE c.id = {result}.context_id))
    * (1 + coalesce(({result}.parameters ->> 'prompt_logprobs')::bigint + {_FURTHER_LOGPROBS}, 0) * {_LOGPROB_BYTES})
    + coalesce(({result}.parameters ->> 'max_tokens')::bigint
        * ({_TOKEN_BYTES} + coalesce(({result}.parameters ->> 'logprobs')::int + {_FURTHER_LOGPROBS}, 0) * {_LOGPROB_BYTES}), 0)
    + coalesce(({result}.parameters #>> '{{images,characters}}')::bigint * {_IMAGE_COPIES}, 0))::float8"""
