"""The stored text of results that run, read from an offset."""

from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from app.core.database import Connection

# The chunks of a running result, from the one that holds the reader's offset on; none of a terminal
# result.
#
# A text may consist of several attempts, each of which continues the one before. `known` is how much of
# it the reader has: text of an earlier attempt counts as far as its successor kept it. The attempts are
# found one by one, so that each probe of the index reads only the rows that it returns.
_MAX_CHUNKS = 64
_TEXT_SINCE = f"""
SELECT i.place, r.state = 'pending' AS is_pending, r.attempt, k.known,
  coalesce(t.begins, 0) AS begins, coalesce(t.text, '') AS text,
  coalesce(t.chunks, 0) = {_MAX_CHUNKS} AS has_more, t.logprobs, t.completion_tokens
FROM unnest($1::uuid[], $2::int[], $3::bigint[], $4::bool[])
  WITH ORDINALITY AS i(id, attempt, after, continues, place)
JOIN results r ON r.id = i.id
CROSS JOIN LATERAL (
  SELECT CASE
    WHEN i.attempt = r.attempt THEN i.after
    WHEN i.continues AND i.attempt >= r.text_attempt THEN least(i.after, coalesce(
      (SELECT min(o."offset") FROM result_chunks o
       WHERE o.result_id = r.id AND o.attempt > i.attempt AND o.attempt <= r.attempt),
      (SELECT o."offset" + char_length(o.text) FROM result_chunks o
       WHERE o.result_id = r.id AND o.attempt BETWEEN r.text_attempt AND r.attempt
       ORDER BY o.attempt DESC, o."offset" DESC LIMIT 1), 0))
    ELSE 0 END AS known
) k
LEFT JOIN LATERAL (
  WITH RECURSIVE attempts(number) AS (
    SELECT coalesce(r.text_attempt, r.attempt)
    UNION ALL
    SELECT (SELECT n.attempt FROM result_chunks n
            WHERE n.result_id = r.id AND n.attempt > a.number AND n.attempt <= r.attempt
            ORDER BY n.attempt LIMIT 1)
    FROM attempts a WHERE a.number < r.attempt
  ), place AS MATERIALIZED (
    SELECT coalesce(max(b."offset"), 0) AS begins FROM attempts a CROSS JOIN LATERAL (
      SELECT o."offset" FROM result_chunks o
      WHERE o.result_id = r.id AND o.attempt = a.number AND o."offset" <= k.known
      ORDER BY o."offset" DESC LIMIT 1) b
  )
  SELECT min(c."offset") AS begins, string_agg(c.text, '' ORDER BY c."offset") AS text,
    count(*) AS chunks, max(c.completion_tokens) AS completion_tokens,
    -- Readers of tokens have whole chunks: their offset is at the end of a chunk.
    array_agg(c.logprobs ORDER BY c."offset") FILTER (WHERE c.logprobs IS NOT NULL
      AND c."offset" >= k.known) AS logprobs
  FROM (
    SELECT p.* FROM attempts a CROSS JOIN LATERAL (
      SELECT * FROM result_chunks c
      WHERE c.result_id = r.id AND c.attempt = a.number
        AND c."offset" >= (SELECT begins FROM place)
      ORDER BY c."offset" LIMIT {_MAX_CHUNKS}) p
    ORDER BY p."offset" LIMIT {_MAX_CHUNKS}
  ) c
) t ON r.state = 'pending'
"""


@dataclass(slots=True, frozen=True)
class StoredText:
    """The stored text of a result behind an offset; empty for a terminal one."""

    is_pending: bool
    attempt: int
    begins: int = 0  # its offset; less than the reader's if the reader's text was not kept
    text: str = ""
    has_more: bool = False
    logprobs: Sequence[str] = ()  # of its tokens, as JSON lists
    completion_tokens: int | None = None  # of the attempt up to the end of this text


async def read_texts(
    connection: Connection, places: Sequence[tuple[UUID, int, int, bool]], _resent: bool
) -> Sequence[StoredText | None]:
    distinct = list(dict.fromkeys(places))  # readers of a result are often at the same place
    rows = await connection.fetch(
        _TEXT_SINCE, *(list(column) for column in zip(*distinct, strict=True))
    )
    found = {
        distinct[row["place"] - 1]: StoredText(
            row["is_pending"],
            row["attempt"],
            row["known"],
            row["text"][max(0, row["known"] - row["begins"]) :],
            row["has_more"],
            row["logprobs"] or (),
            row["completion_tokens"],
        )
        for row in rows
    }
    return [found.get(place) for place in places]
