"""Progress of running attempts: their text so far, in case that their worker dies."""

from collections.abc import Sequence
from dataclasses import dataclass
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


def lock_results_sql(strength: str, condition: str = "true") -> str:
    """A CTE of the results $2, locked in the order of their ids.

    By their ids alone: with their worker and state as well, the planner reads all rows of the worker,
    and its past ones that are not vacuumed yet, for each id.
    """
    return f"""locked AS MATERIALIZED (
  SELECT id, worker_id, attempt, state, cancel_requested_at, deadline_at, lost_attempts,
    engine_deaths
  FROM results WHERE id = ANY($2::uuid[]) AND {condition} ORDER BY id FOR {strength}
)"""


# Whether the attempt of a row `i` is still the worker's, $1.
IS_OURS = "r.worker_id = $1 AND r.attempt = i.attempt AND r.state = 'pending'"


def _notify_sql(first: int) -> str:
    return f"""
SELECT pg_notify(n.channel, n.payload)
FROM unnest(${first}::text[], ${first + 1}::text[]) AS n(channel, payload)
WHERE EXISTS (SELECT FROM workers WHERE id = $1 AND dead_at IS NULL)
"""


_NOTIFY = _notify_sql(2)
_APPEND = f"""
WITH {lock_results_sql("SHARE")}, appended AS (
  INSERT INTO result_chunks ({", ".join(f'"{name}"' for name in _CHUNKS.types)})
  SELECT i.* FROM ({_CHUNKS.select(2)}) i JOIN locked r ON r.id = i.result_id WHERE {IS_OURS}
  ON CONFLICT DO NOTHING
)
{_notify_sql(2 + len(_CHUNKS.types))}"""


async def append_chunks(
    connection: Connection,
    worker_id: UUID,
    chunks: Sequence[Chunk],
    notifications: Sequence[Notification] = (),
) -> None:
    """Store the chunks of attempts that are the worker's, and notify.

    A worker that is marked dead sends nothing: its text may be that of attempts that are over.
    """
    sent = [one[0] for one in notifications], [one[1] for one in notifications]
    if chunks:
        await connection.execute(_APPEND, worker_id, *_CHUNKS.arguments(chunks), *sent)
    else:
        await connection.execute(_NOTIFY, worker_id, *sent)
