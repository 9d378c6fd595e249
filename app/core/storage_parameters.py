"""How PostgreSQL keeps the tables: when they are vacuumed, how full their pages are.

https://www.postgresql.org/docs/current/sql-createtable.html#SQL-CREATETABLE-STORAGE-PARAMETERS
"""

# A fifth of a table, as PostgreSQL has it, is a day of deletions: it is vacuumed before it has grown.
LONG = {
    "autovacuum_vacuum_scale_factor": 0.05,
    "autovacuum_vacuum_insert_scale_factor": 0.05,
    "autovacuum_analyze_scale_factor": 0.05,
}
LONG_WITH_TEXTS = LONG | {"toast.autovacuum_vacuum_scale_factor": 0.05}
# Few rows, new ones all the time: the next ones take the room of those before. To give the end of the
# table back would mean to lock it for that.
QUEUE = {
    "autovacuum_vacuum_scale_factor": 0,
    "autovacuum_vacuum_threshold": 1000,
    "autovacuum_vacuum_cost_delay": 0,
    "vacuum_truncate": "false",
}
# Rows that are written over and over: their next version stays in their page, no index is touched.
COUNTERS = {"fillfactor": 70}
