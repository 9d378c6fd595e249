"""Log probabilities as numbers: what dialects tell of a token that could not be."""

from collections.abc import Mapping
from typing import Any

# What OpenAI and vLLM's server tell: https://platform.openai.com/docs/api-reference/chat/object
IMPOSSIBLE = -9999.0


def logprob_of(entry: Mapping[str, Any]) -> float:
    """A token's log probability. The engine's minus infinity, which JSON has not, is stored as null."""
    logprob: float | None = entry["logprob"]
    return IMPOSSIBLE if logprob is None else logprob
