"""Files and batches."""

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    String,
    Table,
    Text,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSONB, UUID

from app.core.storage_parameters import COUNTERS, LONG_WITH_TEXTS
from app.core.tables.schema import EMPTY_LIST, EMPTY_OBJECT, metadata, time

files = Table(
    "files",
    metadata,
    Column("id", UUID, primary_key=True),
    Column("team_id", String, nullable=False),
    Column("purpose", String, nullable=False),
    Column("filename", Text, nullable=False),
    # Set with the last part; until then the file is not visible.
    Column("size", BigInteger),
    time("expires_at"),
    Index("ix_files_team_id_id", "team_id", "id", postgresql_where=text("size IS NOT NULL")),
    Index("ix_files_expires_at", "expires_at", postgresql_where=text("expires_at IS NOT NULL")),
    Index("ix_files_unfinished", "id", postgresql_where=text("size IS NULL")),
)

file_parts = Table(
    "file_parts",
    metadata,
    Column("file_id", UUID, ForeignKey("files.id", ondelete="CASCADE"), primary_key=True),
    Column("place", Integer, primary_key=True),
    Column("content", LargeBinary, nullable=False),
)

_ACTIVE = text("state IN ('validating', 'in_progress', 'cancelling', 'finalizing')")

batches = Table(
    "batches",
    metadata,
    Column("id", UUID, primary_key=True),
    Column("team_id", String, nullable=False),
    Column("endpoint", String, nullable=False),
    # No foreign keys: a batch keeps the ids of deleted files.
    Column("input_file_id", UUID, nullable=False),
    Column("output_file_id", UUID),
    Column("error_file_id", UUID),
    Column("completion_window", String, nullable=False),
    Column("metadata", JSONB, nullable=False, server_default=EMPTY_OBJECT),
    Column("state", String, nullable=False, server_default="validating"),
    # Faults of the input file: [{"code", "line", "message", "param"}].
    Column("errors", JSONB, nullable=False, server_default=EMPTY_LIST),
    Column("total", Integer, nullable=False, server_default="0"),
    Column("completed", Integer, nullable=False, server_default="0"),
    Column("failed", Integer, nullable=False, server_default="0"),
    # Lifetime of its output files from their creation; NULL: they are kept.
    Column("output_seconds", Integer),
    time("expires_at", nullable=False),
    time("in_progress_at"),
    # Start of its cancellation or expiry.
    time("cancelling_at"),
    time("expiring_at"),
    time("finalizing_at"),
    # Time of its terminal state: completed, failed, expired or cancelled.
    time("ended_at"),
    # The process that works on it, and the end of its lease.
    Column("feeder_id", UUID),
    time("lease_expires_at"),
    # Idempotency key of its request, and its expiry.
    Column("idempotency_key", String),
    Column("request_hash", LargeBinary),
    time("key_expires_at"),
    CheckConstraint(
        "state IN ('validating', 'failed', 'in_progress', 'finalizing', 'completed', 'expired', "
        "'cancelling', 'cancelled')",
        name="state",
    ),
    CheckConstraint(
        "(state IN ('failed', 'completed', 'expired', 'cancelled')) = (ended_at IS NOT NULL)",
        name="ended",
    ),
    Index("ix_batches_team_id_id", "team_id", "id"),
    CheckConstraint(
        "num_nonnulls(idempotency_key, request_hash, key_expires_at) IN (0, 3)", name="whole_key"
    ),
    Index("ix_batches_active", "id", postgresql_where=_ACTIVE),
    Index("ix_batches_team_id_active", "team_id", postgresql_where=_ACTIVE),
    Index(
        "ix_batches_team_id_idempotency_key",
        "team_id",
        "idempotency_key",
        unique=True,
        postgresql_where=text("idempotency_key IS NOT NULL"),
    ),
    postgresql_with=COUNTERS,
)

batch_lines = Table(
    "batch_lines",
    metadata,
    Column("batch_id", UUID, ForeignKey("batches.id", ondelete="CASCADE"), primary_key=True),
    # Line number in the input file, from 1.
    Column("line", Integer, primary_key=True),
    Column("custom_id", Text, nullable=False),
    Column("state", String, nullable=False, server_default="waiting"),
    # The request as a JSON object; NULL once it is done.
    Column("body", Text),
    # Assigned before the line is sent, so that a second send creates no second result.
    Column("result_ids", ARRAY(UUID)),
    # Outcome of a finished line, as in its output file.
    Column("is_completed", Boolean),
    Column("outcome", Text),
    CheckConstraint("state IN ('waiting', 'sent', 'done')", name="state"),
    CheckConstraint("state = 'done' OR body IS NOT NULL", name="open_has_body"),
    CheckConstraint("state <> 'sent' OR result_ids IS NOT NULL", name="sent_has_results"),
    CheckConstraint(
        "(state = 'done') = (num_nonnulls(outcome, is_completed) = 2)", name="done_has_outcome"
    ),
    Index(
        "ix_batch_lines_batch_id_line_waiting",
        "batch_id",
        "line",
        postgresql_where=text("state = 'waiting'"),
    ),
    Index(
        "ix_batch_lines_batch_id_line_sent",
        "batch_id",
        "line",
        postgresql_where=text("state = 'sent'"),
    ),
    postgresql_with=LONG_WITH_TEXTS,
)
