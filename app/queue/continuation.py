"""Continuation of a lost attempt: which results allow it, and what is stored of their text.

The text of an attempt is in `result_chunks`, with the ids of its tokens. The next attempt sends both
to the model, which generates the rest (docs/continuation.md).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID

from asyncpg import Record

from app.core.database import Connection
from app.core.record_set import RecordSet

_ID_BYTES = 4  # of a token id: INT32
# A text that lost so many attempts in a row before their first token may be what kills the engine.
_MAX_FRUITLESS = 2

# A repetition penalty counts a token once, in the prompt or in the output: it continues as it was.
_NEUTRAL = {"presence_penalty": (0,), "frequency_penalty": (0,)}
_NEVER = ("structured_outputs", "logprobs", "prompt_logprobs", "prompt_token_ids", "images", "task")


def can_continue(parameters: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> bool:
    """Return whether sampling by these parameters depends only on the tokens, not on the attempt.

    A structured output has a parser's state and a seeded one a generator's. Penalties and bad words
    count output tokens, which are a continued attempt's prompt. Log probabilities of the
    whole text are not stored with it. Embeddings and scores have no text. `defaults`: the model's
    own, which hold where a request has none.
    """
    parameters = {**(defaults or {}), **parameters}
    if any(parameters.get(name) is not None for name in _NEVER):
        return False
    if any(parameters.get(name) not in (None, *neutral) for name, neutral in _NEUTRAL.items()):
        return False
    if parameters.get("n") not in (None, 1) or parameters.get("bad_words"):
        return False
    return parameters.get("seed") is None or parameters.get("temperature") == 0


@dataclass(slots=True, frozen=True)
class Resume:
    """The stored text that an attempt is to continue.

    `fault`: why it cannot be continued; the text is empty then. `begins`: each attempt that stored
    some of the text, and its first offset, in order.
    """

    text: str = ""
    token_ids: bytes | None = None  # little-endian INT32; None where they are not all known
    prompt_tokens: int | None = None
    completion_tokens: int = 0
    begins: Sequence[tuple[int, int]] = ()
    fault: str | None = None

    def kept_of(self, attempt: int, offset: int) -> int:
        """Return how many of the first `offset` code points of an earlier attempt are in this text."""
        later = (begin for number, begin in self.begins if number > attempt)
        return min(offset, next(later, len(self.text)))


@dataclass(slots=True, frozen=True)
class Interrupted:
    """A claimed result with the text of earlier attempts, from `text_attempt` on."""

    id: UUID
    attempt: int
    text_attempt: int
    max_tokens: int
    history: Sequence[Mapping[str, Any]]  # of its attempts


_INTERRUPTED = RecordSet(Interrupted, ("max_tokens", "history"))
_LOAD = f"""
SELECT k.id, string_agg(c.text, '' ORDER BY c."offset", c.attempt) AS text,
  bool_and(c.fits) AS fits,
  string_agg(c.token_ids, ''::bytea ORDER BY c."offset", c.attempt) AS token_ids,
  max(c.prompt_tokens) AS prompt_tokens, max(c.completion_tokens) AS completion_tokens,
  array_agg(c.attempt ORDER BY c."offset", c.attempt) FILTER (WHERE c.is_first) AS attempts,
  array_agg(c."offset" ORDER BY c."offset", c.attempt) FILTER (WHERE c.is_first) AS offsets
FROM ({_INTERRUPTED.select(1)}) k
CROSS JOIN LATERAL (
  SELECT c.*, row_number() OVER (PARTITION BY c.attempt ORDER BY c."offset") = 1 AS is_first,
    c."offset" = coalesce(
      lag(c."offset" + char_length(c.text)) OVER (ORDER BY c."offset", c.attempt), 0) AS fits
  FROM result_chunks c
  WHERE c.result_id = k.id AND c.attempt >= k.text_attempt AND c.attempt < k.attempt
) c
GROUP BY k.id
"""


async def load_resumes(
    connection: Connection, interrupted: Sequence[Interrupted]
) -> dict[UUID, Resume]:
    if not interrupted:
        return {}
    rows = await connection.fetch(_LOAD, *_INTERRUPTED.arguments(interrupted))
    stored = {row["id"]: row for row in rows}
    return {one.id: _to_resume(one, stored.get(one.id)) for one in interrupted}


def _to_resume(result: Interrupted, row: Record | None) -> Resume:
    if row is None:
        return Resume(fault="its stored text is gone")
    resume = Resume(
        text=row["text"],
        token_ids=row["token_ids"],
        prompt_tokens=row["prompt_tokens"],
        completion_tokens=row["completion_tokens"] or 0,
        begins=tuple(zip(row["attempts"], row["offsets"], strict=True)),
    )
    fault = "its stored text has a gap or an overlap" if not row["fits"] else _fault(result, resume)
    if fault is not None:
        return Resume(fault=fault)
    if len(resume.token_ids or b"") != _ID_BYTES * resume.completion_tokens:
        return replace(resume, token_ids=None)  # some attempts ran on a model that returns none
    return resume


def _fault(result: Interrupted, resume: Resume) -> str | None:
    if resume.completion_tokens > result.max_tokens:
        return "its stored text is longer than max_tokens"
    last_attempt, _ = resume.begins[-1]
    fruitless = sum(
        entry["attempt"] > last_attempt and entry["counted"] for entry in result.history
    )
    if fruitless >= _MAX_FRUITLESS:
        return f"{fruitless} attempts to continue it were lost before their first token"
    return None
