"""Statistics of the queue's table: autovacuum's first ones may come a minute after its first rows."""

from app.core.database import Connection

_ROWS = "SELECT reltuples FROM pg_class WHERE oid = 'results'::regclass"
_HAS_ROWS = "SELECT EXISTS (SELECT FROM results)"


async def analyze_first_rows(connection: Connection) -> bool:
    """Analyse `results` if PostgreSQL has not since its first rows; whether it has statistics.

    A session that has none may choose the wrong index for a small table, and keep that plan.
    All sessions plan again after this.
    """
    if await connection.fetchval(_ROWS) >= 1:
        return True
    if await connection.fetchval(_HAS_ROWS):
        await connection.execute("ANALYZE (SKIP_LOCKED) results")
    return False
