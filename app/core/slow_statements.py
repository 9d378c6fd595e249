"""Plans of slow statements, in the log: a plan that has turned shows itself where it runs."""

import asyncio
import logging
import time
from functools import partial
from typing import Any

import asyncpg

logger = logging.getLogger(__name__)

_PAUSE_SECONDS = 600.0  # between two plans of one statement
_EXPLAIN_SECONDS = 2.0
_MAX_STATEMENTS = 1_000  # that are remembered

# The statements of this session: the plan that ran is the one that the session has cached.
_NAME = """
SELECT name, cardinality(parameter_types) FROM pg_prepared_statements
WHERE statement = $1 ORDER BY prepare_time DESC LIMIT 1
"""


class SlowStatements:
    """Logs the plan of each statement that takes at least `seconds`, locks and commit included."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        # The text and the seconds of the last slow statement, by its server process.
        self._noted: dict[int, tuple[str, float]] = {}
        self._logged_at: dict[str, float] = {}  # by statement

    async def watch(self, connection: asyncpg.Connection) -> None:
        pid = connection.get_server_pid()
        connection.add_query_logger(partial(self._note, pid))

        def forget(_: object) -> None:
            self._noted.pop(pid, None)

        connection.add_termination_listener(forget)

    def _note(self, pid: int, record: Any) -> None:
        if record.exception is None and record.elapsed >= self._seconds:
            logged_at = self._logged_at.get(record.query, -_PAUSE_SECONDS)
            if time.monotonic() >= logged_at + _PAUSE_SECONDS:
                self._noted[pid] = record.query, record.elapsed

    async def log_plan(self, connection: asyncpg.pool.PoolConnectionProxy, seconds: float) -> None:
        """Log the plan of the last slow statement of a connection, which was used for `seconds`."""
        if seconds < self._seconds:
            return
        await asyncio.sleep(0)  # asyncpg passes records on in the next round of the loop
        noted = self._noted.pop(connection.get_server_pid(), None)
        if noted is None:
            return
        query, elapsed = noted
        if len(self._logged_at) >= _MAX_STATEMENTS:
            self._logged_at.clear()
        self._logged_at[query] = time.monotonic()
        try:
            plan = await _explain(connection, query)
        except (asyncpg.PostgresError, asyncpg.InterfaceError, TimeoutError, OSError) as error:
            plan = f"(no plan: {error})"
        logger.warning(
            "a statement took %.2f s:\n%s\n%s",
            elapsed,
            query.strip(),
            plan,
            extra={"action": "slow_statement"},
        )


async def _explain(connection: asyncpg.pool.PoolConnectionProxy, query: str) -> str:
    named = await connection.fetchrow(_NAME, query, timeout=_EXPLAIN_SECONDS)
    if named is None:
        return "(no plan: the statement is not prepared in this session)"
    name, parameters = named
    values = f"({', '.join(['NULL'] * parameters)})" if parameters else ""
    rows = await connection.fetch(f'EXPLAIN EXECUTE "{name}"{values}', timeout=_EXPLAIN_SECONDS)
    return "\n".join(row[0] for row in rows)
