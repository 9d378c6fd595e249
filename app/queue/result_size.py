"""Memory that a result takes where it runs and where it is read."""

from collections.abc import Mapping
from typing import Any

# Bytes of one log probability as JSON text: 80 measured with vLLM, for short tokens.
_LOGPROB_BYTES = 100
# Bytes of a token's text with the objects that hold it: 105 measured.
_TOKEN_BYTES = 110
# The sampled token's, and one for the objects that hold all of them.
_FURTHER_LOGPROBS = 2
# More than any results take together.
UNBOUNDED = 2**62


def count_logprobs(parameters: Mapping[str, Any]) -> int:
    """Return how many log probabilities a result may have: those of the likely and sampled tokens."""
    wanted: int | None = parameters.get("logprobs")
    max_tokens: int = parameters.get("max_tokens", 0)
    return 0 if wanted is None else max_tokens * (wanted + 1)


def expected_bytes(prompt_length: int, parameters: Mapping[str, Any]) -> int:
    """Return the bytes that a worker may hold for a result; an attribution has no `max_tokens`."""
    tokens: int = parameters.get("max_tokens", 0)
    wanted: int | None = parameters.get("logprobs")
    held = 0 if wanted is None else wanted + _FURTHER_LOGPROBS
    return prompt_length + tokens * (_TOKEN_BYTES + held * _LOGPROB_BYTES)


def expected_bytes_sql(result: str) -> str:
    """The same of a row of `results`; the lengths of stored texts are read without the texts."""
    return f"""(coalesce(octet_length({result}.prompt), (
      SELECT octet_length(c.content) FROM contexts c WHERE c.id = {result}.context_id))
    + coalesce(({result}.parameters ->> 'max_tokens')::bigint
        * ({_TOKEN_BYTES} + coalesce(({result}.parameters ->> 'logprobs')::int + {_FURTHER_LOGPROBS}, 0) * {_LOGPROB_BYTES}), 0))::float8"""
