"""Continuation of a lost attempt: which results allow it, and what is stored of their text.

The text of an attempt is in `result_chunks`, with the ids of its tokens. The next attempt sends both
to the model, which generates the rest (docs/continuation.md).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import orjson
from asyncpg import Record

from app.core.database import Connection

_ID_BYTES = 4  # of a token id: INT32
# A text that lost so many attempts in a row before their first token may be what kills the engine.
_MOST_FRUITLESS = 2

# A repetition penalty counts a token once, in the prompt or in the output: it continues as it was.
_NEUTRAL = {"presence_penalty": (0,), "frequency_penalty": (0,)}
_NEVER = ("structured_outputs", "logprobs", "prompt_logprobs")


def can_continue(parameters: Mapping[str, Any]) -> bool:
    """Whether sampling by these parameters depends only on the tokens, not on the attempt.

    A structured output has a parser's state and a seeded one a generator's. Penalties and bad words
    count output tokens, which are a continued attempt's prompt. Log probabilities of the
    whole text are not stored with it.
    """
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

    since_attempt: int
    text: str = ""
    token_ids: bytes | None = None  # little-endian INT32; None where they are not all known
    prompt_tokens: int | None = None
    completion_tokens: int = 0
    begins: Sequence[tuple[int, int]] = ()
    fault: str | None = None

    def kept_of(self, attempt: int, offset: int) -> int:
        """How much of the first `offset` code points of an earlier attempt is part of this text."""
        if attempt < self.since_attempt:
            return 0
        later = (begin for number, begin in self.begins if number > attempt)
        return min(offset, next(later, len(self.text)))


_LOAD = """
SELECT k.id, string_agg(c.text, '' ORDER BY c."offset", c.attempt) AS text,
  bool_and(c.fits) AS fits,
  string_agg(c.token_ids, ''::bytea ORDER BY c."offset", c.attempt) AS token_ids,
  max(c.prompt_tokens) AS prompt_tokens, max(c.completion_tokens) AS completion_tokens,
  array_agg(c.attempt ORDER BY c."offset", c.attempt) FILTER (WHERE c.is_first) AS attempts,
  array_agg(c."offset" ORDER BY c."offset", c.attempt) FILTER (WHERE c.is_first) AS offsets
FROM unnest($1::uuid[], $2::int[], $3::int[]) AS k(id, since_attempt, attempt)
CROSS JOIN LATERAL (
  SELECT c.*, row_number() OVER (PARTITION BY c.attempt ORDER BY c."offset") = 1 AS is_first,
    c."offset" = coalesce(
      lag(c."offset" + char_length(c.text)) OVER (ORDER BY c."offset", c.attempt), 0) AS fits
  FROM result_chunks c
  WHERE c.result_id = k.id AND c.attempt >= k.since_attempt AND c.attempt < k.attempt
) c
GROUP BY k.id
"""


async def load_resumes(connection: Connection, claimed: Sequence[Record]) -> dict[UUID, Resume]:
    """The stored text of those claimed rows that have any, in one statement."""
    rows = {row["id"]: row for row in claimed if row["text_attempt"] is not None}
    if not rows:
        return {}
    found = await connection.fetch(
        _LOAD,
        list(rows),
        [row["text_attempt"] for row in rows.values()],
        [row["attempt"] for row in rows.values()],
    )
    stored = {row["id"]: row for row in found}
    return {identifier: _to_resume(row, stored.get(identifier)) for identifier, row in rows.items()}


def _to_resume(row: Record, stored: Record | None) -> Resume:
    since: int = row["text_attempt"]
    fault = _fault(row, stored)
    if fault is not None or stored is None:
        return Resume(since, fault=fault)
    count: int = stored["completion_tokens"] or 0
    token_ids: bytes | None = stored["token_ids"]
    if token_ids is not None and len(token_ids) != _ID_BYTES * count:
        token_ids = None  # some attempts ran on a model that returns none
    return Resume(
        since_attempt=since,
        text=stored["text"],
        token_ids=token_ids,
        prompt_tokens=stored["prompt_tokens"],
        completion_tokens=count,
        begins=tuple(zip(stored["attempts"], stored["offsets"], strict=True)),
    )


def _fault(row: Record, stored: Record | None) -> str | None:
    if stored is None:
        return "its stored text is gone"
    if not stored["fits"]:
        return "its stored text has a gap or an overlap"
    if (stored["completion_tokens"] or 0) > orjson.loads(row["parameters"]).get("max_tokens", 0):
        return "its stored text is longer than max_tokens"
    last = stored["attempts"][-1]
    fruitless = [
        entry
        for entry in orjson.loads(row["attempt_history"])
        if entry["attempt"] > last and entry["counted"]
    ]
    if len(fruitless) >= _MOST_FRUITLESS:
        return f"{len(fruitless)} attempts to continue it were lost before their first token"
    return None
