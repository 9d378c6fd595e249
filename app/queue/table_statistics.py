"""Statistics of the queue's table follow its growth.

A session keeps the plan of a statement until the table is analysed. Autovacuum does so once a minute at
most. Until then a plan that was made for a table of some rows would read all of a large one.
"""

from app.core.database import Connection

_SMALL_PAGES = 1_000  # more are planned for as any number
_GROWTH = 4  # times
_FEW_ROWS = 50  # which every plan serves

# New rows may come into pages that the table already had. Rows that come and go are no growth. Only the owner
# may analyse it.
_HAS_GROWN = f"""
SELECT (relpages < {_SMALL_PAGES}
    AND pg_relation_size(oid) / current_setting('block_size')::int > {_GROWTH} * relpages::bigint
  OR pg_stat_get_live_tuples(oid) > {_GROWTH} * greatest(reltuples, {_FEW_ROWS})
  OR reltuples < 1 AND EXISTS (SELECT FROM results)) AND pg_has_role(relowner, 'USAGE')
FROM pg_class WHERE oid = 'results'::regclass
"""


async def analyze_growth(connection: Connection) -> None:
    """Analyse `results` if it has grown to a multiple of its last known size.

    All sessions plan again after this.
    """
    if await connection.fetchval(_HAS_GROWN):
        await connection.execute("ANALYZE (SKIP_LOCKED) results")
