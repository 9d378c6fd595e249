"""Search and statistics of past results, and the state of retention."""

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    DateTime,
    ForeignKey,
    Identity,
    Index,
    Integer,
    SmallInteger,
    String,
    Table,
)
from sqlalchemy.dialects.postgresql import ARRAY, TSVECTOR, UUID

from app.core.storage_parameters import COUNTERS, LONG, QUEUE
from app.core.tables.schema import NOW, metadata, time

# Queue of ended results that are not indexed yet; the statement that ends a result inserts its row.
undigested_results = Table(
    "undigested_results",
    metadata,
    # In the order of ends, so that the indexer starts behind the deleted rows.
    Column("place", BigInteger, Identity(), primary_key=True),
    # No foreign key: the indexer skips results that were deleted.
    Column("result_id", UUID, nullable=False),
    postgresql_with=QUEUE,
)

# One row for each indexed result: it marks that the result was counted.
result_search = Table(
    "result_search",
    metadata,
    Column("result_id", UUID, ForeignKey("results.id", ondelete="CASCADE"), primary_key=True),
    Column("team_id", String, nullable=False),
    # Words of prompt, output and error, and the team's word. NULL: the result cannot be found by words.
    Column("words", TSVECTOR),
    Index(
        "ix_result_search_words",
        "words",
        postgresql_using="gin",
        # In kB. Each search reads the whole pending list of the index.
        postgresql_with={"gin_pending_list_limit": 1024},
    ),
    postgresql_with=LONG,
)

# No foreign keys: totals outlive their results.
minute_stats = Table(
    "minute_stats",
    metadata,
    Column("team_id", String, primary_key=True),
    # Minute of their end.
    Column("minute", DateTime(timezone=True), primary_key=True),
    Column("model_name", String, primary_key=True),
    # `completed` or the error code.
    Column("ended_as", String, primary_key=True),
    Column("results", Integer, nullable=False),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("completion_tokens", BigInteger, nullable=False),
    # Results by duration, in the buckets of results/stats/histogram.py.
    Column("queue_seconds", ARRAY(Integer), nullable=False),
    Column("first_token_seconds", ARRAY(Integer), nullable=False),
    Column("seconds", ARRAY(Integer), nullable=False),
    Index("ix_minute_stats_minute", "minute"),
    postgresql_with=COUNTERS,
)

queue_samples = Table(
    "queue_samples",
    metadata,
    Column("minute", DateTime(timezone=True), primary_key=True),
    Column("name", String, primary_key=True),
    Column("queued", Integer, nullable=False),
    Column("running", Integer, nullable=False),
)

# One row: progress of indexing older results, and the time of the last sample.
digest_state = Table(
    "digest_state",
    metadata,
    Column("id", SmallInteger, primary_key=True, autoincrement=False),
    Column("passes_left", SmallInteger, nullable=False, server_default="2"),
    # Results from this id on are done in this pass.
    Column(
        "digested_from", UUID, nullable=False, server_default="ffffffff-ffff-ffff-ffff-ffffffffffff"
    ),
    Column("resumes_at", DateTime(timezone=True), nullable=False, server_default=NOW),
    time("sampled_minute"),
    CheckConstraint("id = 1", name="one"),
)

# One row: the clock of retention, and its last pass.
retention_state = Table(
    "retention_state",
    metadata,
    Column("id", SmallInteger, primary_key=True, autoincrement=False),
    time("looked_at"),
    # Follows the database's clock without its jumps ahead.
    time("trusted_at"),
    time("cleaned_at"),
    # Rows deleted from `result_search` since its index was built; the index still holds their words.
    Column("words_gone", BigInteger, nullable=False, server_default="0"),
    CheckConstraint("id = 1", name="one"),
)

# Progress of prompt retention per team: smaller ids are done.
retention_marks = Table(
    "retention_marks",
    metadata,
    Column("team_id", String, primary_key=True),
    Column("prompts_to", UUID, nullable=False),
)
