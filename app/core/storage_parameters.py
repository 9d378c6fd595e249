"""Storage parameters of the tables: vacuum thresholds and fill factors.

https://www.postgresql.org/docs/current/sql-createtable.html#SQL-CREATETABLE-STORAGE-PARAMETERS
"""

# PostgreSQL's default of a fifth of a table is a day of deletions: vacuum runs before the table grows.
LONG = {
    "autovacuum_vacuum_scale_factor": 0.05,
    "autovacuum_vacuum_insert_scale_factor": 0.05,
    "autovacuum_analyze_scale_factor": 0.05,
}
LONG_WITH_TEXTS = LONG | {"toast.autovacuum_vacuum_scale_factor": 0.05}
# Few rows with a high turnover: new rows reuse the space of old ones. Truncating the table's end would
# need an exclusive lock.
QUEUE = {
    "autovacuum_vacuum_scale_factor": 0,
    "autovacuum_vacuum_threshold": 1000,
    "autovacuum_vacuum_cost_delay": 0,
    "vacuum_truncate": "false",
}
# Frequently updated rows: the next version stays in the same page (HOT), and no index is written.
COUNTERS = {"fillfactor": 70}
