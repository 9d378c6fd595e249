"""Log probabilities of the dialects, including the value for an impossible token."""

from collections.abc import Mapping
from typing import Any

import orjson

# The value of OpenAI and vLLM's server: https://platform.openai.com/docs/api-reference/chat/object
IMPOSSIBLE = -9999.0


def logprob_of(entry: Mapping[str, Any]) -> float:
    """A token's log probability. Minus infinity, which JSON lacks, is stored as null."""
    logprob: float | None = entry["logprob"]
    return IMPOSSIBLE if logprob is None else logprob


def encoded(logprobs: Mapping[str, Any]) -> orjson.Fragment:
    """A choice's log probabilities as JSON text: an answer of many choices holds the objects of one."""
    return orjson.Fragment(orjson.dumps(logprobs))
