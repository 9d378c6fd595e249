"""Search and statistics of past results, and the state of retention."""

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import ARRAY, TSVECTOR, UUID

from app.core.storage_parameters import COUNTERS, LONG, QUEUE
from app.core.tables.schema import NOW, index, metadata, time

# Queue of ended results that are not indexed yet; the statement that ends a result inserts its row.
undigested_results = sa.Table(
    "undigested_results",
    metadata,
    # In the order of ends, so that the indexer starts behind the deleted rows.
    sa.Column("place", sa.BigInteger, sa.Identity(), primary_key=True),
    # No foreign key: the indexer skips results that were deleted.
    sa.Column("result_id", UUID, nullable=False),
    postgresql_with=QUEUE,
)

# One row for each indexed result: it marks that the result was counted.
result_search = sa.Table(
    "result_search",
    metadata,
    # No foreign key, see `delete_rows_of_results`.
    sa.Column("result_id", UUID, primary_key=True),
    sa.Column("team_id", sa.String, nullable=False),
    # Words of prompt, output and error, and the team's word. NULL: the result cannot be found by words.
    sa.Column("words", TSVECTOR),
    # Whether the ledger of usage has it; a process of an older version leaves it false.
    sa.Column("in_usage", sa.Boolean, nullable=False, server_default=sa.text("false")),
    sa.Index(
        "ix_result_search_words",
        "words",
        postgresql_using="gin",
        # In kB. Each search reads the whole pending list of the index.
        postgresql_with={"gin_pending_list_limit": 1024},
    ),
    postgresql_with=LONG,
)

# No foreign keys: totals outlive their results.
minute_stats = sa.Table(
    "minute_stats",
    metadata,
    sa.Column("team_id", sa.String, primary_key=True),
    # Minute of their end.
    sa.Column("minute", sa.DateTime(timezone=True), primary_key=True),
    sa.Column("model_name", sa.String, primary_key=True),
    # `completed` or the error code.
    sa.Column("ended_as", sa.String, primary_key=True),
    sa.Column("results", sa.Integer, nullable=False),
    sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
    sa.Column("completion_tokens", sa.BigInteger, nullable=False),
    # Results by duration, in the buckets of results/stats/histogram.py.
    sa.Column("queue_seconds", ARRAY(sa.Integer), nullable=False),
    sa.Column("first_token_seconds", ARRAY(sa.Integer), nullable=False),
    sa.Column("seconds", ARRAY(sa.Integer), nullable=False),
    index("minute"),
    postgresql_with=COUNTERS,
)

queue_samples = sa.Table(
    "queue_samples",
    metadata,
    sa.Column("minute", sa.DateTime(timezone=True), primary_key=True),
    sa.Column("name", sa.String, primary_key=True),
    sa.Column("queued", sa.Integer, nullable=False),
    sa.Column("running", sa.Integer, nullable=False),
)

# One row: progress of indexing older results, and the time of the last sample.
digest_state = sa.Table(
    "digest_state",
    metadata,
    sa.Column("id", sa.SmallInteger, primary_key=True, autoincrement=False),
    sa.Column("passes_left", sa.SmallInteger, nullable=False, server_default="2"),
    # Results from this id on are done in this pass.
    sa.Column(
        "digested_from", UUID, nullable=False, server_default="ffffffff-ffff-ffff-ffff-ffffffffffff"
    ),
    time("resumes_at", nullable=False, default=NOW),
    time("sampled_minute"),
    sa.CheckConstraint("id = 1", name="one"),
)

# One row: the clock of retention, and its last pass.
retention_state = sa.Table(
    "retention_state",
    metadata,
    sa.Column("id", sa.SmallInteger, primary_key=True, autoincrement=False),
    time("looked_at"),
    # Follows the database's clock without its jumps ahead.
    time("trusted_at"),
    time("cleaned_at"),
    # Rows deleted from `result_search` since its index was built; the index still holds their words.
    sa.Column("words_gone", sa.BigInteger, nullable=False, server_default="0"),
    sa.CheckConstraint("id = 1", name="one"),
)

# Progress of prompt retention per team: smaller ids are done.
retention_marks = sa.Table(
    "retention_marks",
    metadata,
    sa.Column("team_id", sa.String, primary_key=True),
    sa.Column("prompts_to", UUID, nullable=False),
)
