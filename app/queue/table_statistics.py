"""Statistics of the queue's table follow its growth.

A session keeps the plan of a statement until the table is analysed. Autovacuum does so once a minute at
most. Until then a plan that was made for a table of some rows would read all of a large one.
"""

from app.core.database import Connection

_LARGE_PAGES = 1_000  # plans for as many serve any size
_GROWTH = 4  # times

# The first rows of a table may come into a page that it already had.
_STATE = f"""
SELECT relpages >= {_LARGE_PAGES} AS is_large,
  pg_relation_size(oid) / current_setting('block_size')::int > {_GROWTH} * relpages
    OR reltuples < 1 AND EXISTS (SELECT FROM results) AS has_grown
FROM pg_class WHERE oid = 'results'::regclass
"""


async def analyze_growth(connection: Connection) -> bool:
    """Analyse `results` if it has grown to a multiple of its last known size; whether it is large.

    All sessions plan again after this. Autovacuum is enough for a large table.
    """
    (state,) = await connection.fetch(_STATE)
    if state["has_grown"]:
        await connection.execute("ANALYZE (SKIP_LOCKED) results")
    return bool(state["is_large"])
