"""API processes, and the results that no client waits for once their process is gone.

A result whose `on_disconnect` is `cancel` names the process that serves its client. A process that is
killed cannot cancel it: each process renews a row of its own, and rescuers cancel what such a row
leaves behind.
"""

from collections.abc import Sequence
from uuid import UUID

from app.core.database import Connection, Database
from app.core.ids import new_id
from app.core.polling import PollingLoop
from app.queue.terminal_state import MAX_BATCH

# No setting: longer than any stall of a process that still has its clients.
LEASE_SECONDS = 60.0
_PERIOD_SECONDS = 10.0

_RENEW = """
INSERT INTO api_processes (id, lease_expires_at) VALUES ($1, now() + make_interval(secs => $2))
ON CONFLICT (id) DO UPDATE SET lease_expires_at = excluded.lease_expires_at
"""
# A lease that is longer than any was not renewed since the clock was set back.
_GONE = f"""
SELECT id FROM api_processes
WHERE (lease_expires_at < now() OR lease_expires_at > now() + make_interval(secs => {2 * LEASE_SECONDS}))
  AND pg_postmaster_start_time() + make_interval(secs => $1) < now()
ORDER BY id LIMIT 10
"""
_REMOVE = "DELETE FROM api_processes WHERE id = ANY($1::uuid[])"
# Two parts, each by the condition of an index that has pending results only.
_WAITED_FOR = """
SELECT id FROM results WHERE state = 'pending' AND worker_id IS NULL AND deadline_at IS NOT NULL
  AND waiter_id = ANY($1::uuid[]) AND cancel_requested_at IS NULL
UNION ALL
SELECT id FROM results WHERE state = 'pending' AND worker_id IS NOT NULL
  AND waiter_id = ANY($1::uuid[]) AND cancel_requested_at IS NULL
LIMIT $2
"""


class ApiProcess:
    """This process, as the `waiter_id` of the results that end with it."""

    def __init__(self, database: Database) -> None:
        self.id = new_id()
        self._database = database

    async def run(self) -> None:
        await PollingLoop("api_process", self.renew, seconds=_PERIOD_SECONDS).run()

    async def renew(self) -> None:
        await self._database.fetch(_RENEW, self.id, LEASE_SECONDS)


async def gone_processes(connection: Connection, lease_seconds: float) -> list[UUID]:
    """Return processes whose lease ran out, unless the server is younger than a lease."""
    return [row["id"] for row in await connection.fetch(_GONE, lease_seconds)]


async def results_of(connection: Connection, process_ids: Sequence[UUID]) -> list[UUID]:
    """Return some of the pending results that the clients of these processes waited for."""
    return [row["id"] for row in await connection.fetch(_WAITED_FOR, process_ids, MAX_BATCH)]


async def remove(connection: Connection, process_ids: Sequence[UUID]) -> None:
    await connection.execute(_REMOVE, process_ids)
