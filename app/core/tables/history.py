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

# A result that ended, until `digest` has counted it: one row, put in by the statement that ends it.
undigested_results = Table(
    "undigested_results",
    metadata,
    # In the order of ends, so that who takes them begins where it was, behind what is gone.
    Column("place", BigInteger, Identity(), primary_key=True),
    # No foreign key: what was deleted before it was digested is passed over.
    Column("result_id", UUID, nullable=False),
    postgresql_with=QUEUE,
)

# Each result that is digested has one row: the mark that it was counted.
result_search = Table(
    "result_search",
    metadata,
    Column("result_id", UUID, ForeignKey("results.id", ondelete="CASCADE"), primary_key=True),
    Column("team_id", String, nullable=False),
    # Of prompt, output and error, and one that no text has: the team's. NULL: nothing to be found by.
    Column("words", TSVECTOR),
    Index(
        "ix_result_search_words",
        "words",
        postgresql_using="gin",
        # In kB. What was inserted last waits in a list that each search reads through.
        postgresql_with={"gin_pending_list_limit": 1024},
    ),
    postgresql_with=LONG,
)

# No foreign keys: what was stays, whatever is deleted.
minute_stats = Table(
    "minute_stats",
    metadata,
    Column("team_id", String, primary_key=True),
    # When they ended.
    Column("minute", DateTime(timezone=True), primary_key=True),
    Column("model_name", String, primary_key=True),
    # `completed`, or the code of the error.
    Column("ended_as", String, primary_key=True),
    Column("results", Integer, nullable=False),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("completion_tokens", BigInteger, nullable=False),
    # Results by how long it took, in the buckets of `histogram`.
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

# One row: how far the digest of results that were there before it has come, and the last sample.
digest_state = Table(
    "digest_state",
    metadata,
    Column("id", SmallInteger, primary_key=True, autoincrement=False),
    Column("passes_left", SmallInteger, nullable=False, server_default="2"),
    # Results from this id on were looked at in this pass.
    Column(
        "digested_from", UUID, nullable=False, server_default="ffffffff-ffff-ffff-ffff-ffffffffffff"
    ),
    Column("resumes_at", DateTime(timezone=True), nullable=False, server_default=NOW),
    time("sampled_minute"),
    CheckConstraint("id = 1", name="one"),
)

# One row: the time that retention goes by, and when it last looked.
retention_state = Table(
    "retention_state",
    metadata,
    Column("id", SmallInteger, primary_key=True, autoincrement=False),
    time("looked_at"),
    # It follows the database's clock, but never jumps ahead with it.
    time("trusted_at"),
    time("cleaned_at"),
    # Rows of `result_search` that went since its index was built: their words are in there still.
    Column("words_gone", BigInteger, nullable=False, server_default="0"),
    CheckConstraint("id = 1", name="one"),
)

# How far the prompts of a team's results were judged: those of smaller ids are done with.
retention_marks = Table(
    "retention_marks",
    metadata,
    Column("team_id", String, primary_key=True),
    Column("prompts_to", UUID, nullable=False),
)
