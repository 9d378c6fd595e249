"""Progress of running attempts: their text so far, in case that their worker dies."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from uuid import UUID

from app.core.database import Connection
from app.core.record_set import RecordSet
from app.queue.live_text import Notification


@dataclass(slots=True, frozen=True)
class Chunk:
    """Text of a running attempt, to be kept should its worker die. Offsets are code points."""

    result_id: UUID
    attempt: int
    offset: int
    text: str
    prompt_tokens: int | None
    completion_tokens: int | None
    logprobs: Sequence[bytes] = ()  # of its tokens, as parts of a JSON list
    token_ids: bytes | None = None  # of its tokens, as little-endian INT32


def json_list(parts: Sequence[bytes]) -> str | None:
    """Return the JSON list of these parts of its inside; None for none.

    Joined only where the statement is sent: until then there is no second copy.
    """
    return f"[{b','.join(parts).decode()}]" if parts else None


def chunk_bytes(chunk: Chunk) -> int:
    """Return about how many bytes a chunk takes in a statement."""
    return len(chunk.text) + sum(map(len, chunk.logprobs)) + len(chunk.token_ids or b"")


_CHUNKS = RecordSet(
    Chunk, ("logprobs",), {"logprobs": ("text", lambda chunk: json_list(chunk.logprobs))}
)


def is_ours_sql(row: str) -> str:
    """Condition: the attempt of a `row` for the result `r` is still the worker's, $1.

    As one value: by its parts, the planner would read all rows of the worker, and its past ones
    that are not vacuumed yet, for each id.
    """
    return f"(r.worker_id = $1 AND r.attempt = {row}.attempt AND r.state = 'pending') IS TRUE"


def lock_ours_sql(rows: str, columns: str, strength: str, condition: str = "true") -> str:
    """`rows` as `i`, with `columns` of their results as `r`; without those that are not ours.

    The results are locked in the order of the rows, which is the order of their ids.
    """
    return f"""({rows}) i CROSS JOIN LATERAL (
    SELECT {columns} FROM results r
    WHERE r.id = i.result_id AND {condition} AND {is_ours_sql("i")} FOR {strength}) r"""


_NOTIFY = 2 + len(_CHUNKS.types)  # the parameter behind those of the chunks
_APPEND = f"""
WITH appended AS (
  INSERT INTO result_chunks ({", ".join(f'"{name}"' for name in _CHUNKS.types)})
  SELECT i.* FROM {lock_ours_sql(_CHUNKS.select(2), "r.id", "SHARE")}
  ON CONFLICT DO NOTHING
)
SELECT pg_notify(n.channel, n.payload)
FROM unnest(${_NOTIFY}::text[], ${_NOTIFY + 1}::text[]) AS n(channel, payload)
WHERE EXISTS (SELECT FROM workers WHERE id = $1 AND dead_at IS NULL)
"""


async def append_chunks(
    connection: Connection,
    worker_id: UUID,
    chunks: Sequence[Chunk],
    notifications: Sequence[Notification] = (),
) -> None:
    """Store the chunks of attempts that are the worker's, and notify.

    A worker that is marked dead sends nothing: its text may be that of attempts that are over.
    """
    in_order = sorted(chunks, key=attrgetter("result_id"))
    sent = [one[0] for one in notifications], [one[1] for one in notifications]
    await connection.execute(_APPEND, worker_id, *_CHUNKS.arguments(in_order), *sent)
