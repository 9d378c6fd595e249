"""Those who wait for what does not come: open streams and long-polls of results nobody runs."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

from app.core.settings.fields import DEFAULT_TEAM
from bench.load import connect, get
from bench.servers import House, Server

ABSENT = "absent"  # a model that Triton does not have: its results stay in the queue
_SETTLE_SECONDS = 0.5
_SETTLE_SECONDS_EACH = 0.00075

_PENDING = """
WITH context AS (
  INSERT INTO contexts (id, team_id, content) VALUES (uuidv7(), $1, '{{chunks=1}} say')
  RETURNING id
)
INSERT INTO results (id, team_id, context_id, model_name, parameters, deadline_at)
SELECT uuidv7(), $1, context.id, $2, '{"max_tokens": 16, "temperature": 0}',
  now() + interval '1 day'
FROM context, generate_series(1, $3::int)
RETURNING id
"""


async def queue(house: House, database: str, count: int, model: str = ABSENT) -> list[str]:
    """Put so many results into the queue, in SQL; their ids."""
    connection = await house.connect(database)
    try:
        rows = await connection.fetch(_PENDING, DEFAULT_TEAM, model, count)
        await connection.execute("VACUUM (ANALYZE) results")
    finally:
        await connection.close()
    return [str(row["id"]) for row in rows]


def wait_for(identifier: str) -> str:
    """The path of a long-poll."""
    return f"/results/{identifier}?wait=60"


def stream_of(identifier: str) -> str:
    """The path of a stream."""
    return f"/results/{identifier}/stream"


@contextlib.asynccontextmanager
async def held(api: Server, paths: Sequence[str]) -> AsyncIterator[None]:
    """Hold a request of each path, on a connection of its own."""
    requests = iter([get(path) for path in paths])
    async with connect(api.port, len(paths)) as callers:
        callers.send_once(requests.__next__)
        await asyncio.sleep(_SETTLE_SECONDS + len(paths) * _SETTLE_SECONDS_EACH)
        yield
        if refused := callers.refused():
            raise RuntimeError(f"{len(refused)} were not held: {refused[0]!r}")
