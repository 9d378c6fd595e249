"""Files and batches."""

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import ARRAY, JSONB, UUID

from app.core.storage_parameters import COUNTERS, LONG_WITH_TEXTS
from app.core.tables.schema import EMPTY_LIST, EMPTY_OBJECT, index, metadata, time

files = sa.Table(
    "files",
    metadata,
    sa.Column("id", UUID, primary_key=True),
    sa.Column("team_id", sa.String, nullable=False),
    sa.Column("purpose", sa.String, nullable=False),
    sa.Column("filename", sa.Text, nullable=False),
    # Set with the last part; until then the file is not visible.
    sa.Column("size", sa.BigInteger),
    time("expires_at"),
    index("team_id", "id", where="size IS NOT NULL"),
    index("expires_at", where="expires_at IS NOT NULL"),
    index("id", name="ix_files_unfinished", where="size IS NULL"),
)

file_parts = sa.Table(
    "file_parts",
    metadata,
    sa.Column("file_id", UUID, sa.ForeignKey("files.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("place", sa.Integer, primary_key=True),
    sa.Column("content", sa.LargeBinary, nullable=False),
)

_ACTIVE = "state IN ('validating', 'in_progress', 'cancelling', 'finalizing')"

batches = sa.Table(
    "batches",
    metadata,
    sa.Column("id", UUID, primary_key=True),
    sa.Column("team_id", sa.String, nullable=False),
    sa.Column("endpoint", sa.String, nullable=False),
    # No foreign keys: a batch keeps the ids of deleted files.
    sa.Column("input_file_id", UUID, nullable=False),
    sa.Column("output_file_id", UUID),
    sa.Column("error_file_id", UUID),
    sa.Column("completion_window", sa.String, nullable=False),
    sa.Column("metadata", JSONB, nullable=False, server_default=EMPTY_OBJECT),
    sa.Column("state", sa.String, nullable=False, server_default="validating"),
    # Faults of the input file: [{"code", "line", "message", "param"}].
    sa.Column("errors", JSONB, nullable=False, server_default=EMPTY_LIST),
    sa.Column("total", sa.Integer, nullable=False, server_default="0"),
    sa.Column("completed", sa.Integer, nullable=False, server_default="0"),
    sa.Column("failed", sa.Integer, nullable=False, server_default="0"),
    # Lifetime of its output files from their creation; NULL: they are kept.
    sa.Column("output_seconds", sa.Integer),
    time("expires_at", nullable=False),
    time("in_progress_at"),
    # Start of its cancellation or expiry.
    time("cancelling_at"),
    time("expiring_at"),
    time("finalizing_at"),
    # Time of its terminal state: completed, failed, expired or cancelled.
    time("ended_at"),
    # The process that works on it, and the end of its lease.
    sa.Column("feeder_id", UUID),
    time("lease_expires_at"),
    # Idempotency key of its request, and its expiry.
    sa.Column("idempotency_key", sa.String),
    sa.Column("request_hash", sa.LargeBinary),
    time("key_expires_at"),
    # Token of its request, for the usage of its results.
    sa.Column("token_id", sa.String),
    sa.CheckConstraint(
        "state IN ('validating', 'failed', 'in_progress', 'finalizing', 'completed', 'expired', "
        "'cancelling', 'cancelled')",
        name="state",
    ),
    sa.CheckConstraint(
        "(state IN ('failed', 'completed', 'expired', 'cancelled')) = (ended_at IS NOT NULL)",
        name="ended",
    ),
    index("team_id", "id"),
    sa.CheckConstraint(
        "num_nonnulls(idempotency_key, request_hash, key_expires_at) IN (0, 3)", name="whole_key"
    ),
    index("id", name="ix_batches_active", where=_ACTIVE),
    index("team_id", name="ix_batches_team_id_active", where=_ACTIVE),
    index("team_id", "idempotency_key", unique=True, where="idempotency_key IS NOT NULL"),
    postgresql_with=COUNTERS,
)

batch_lines = sa.Table(
    "batch_lines",
    metadata,
    sa.Column("batch_id", UUID, sa.ForeignKey("batches.id", ondelete="CASCADE"), primary_key=True),
    # Line number in the input file, from 1.
    sa.Column("line", sa.Integer, primary_key=True),
    sa.Column("custom_id", sa.Text, nullable=False),
    sa.Column("state", sa.String, nullable=False, server_default="waiting"),
    # The request as a JSON object; NULL once it is done.
    sa.Column("body", sa.Text),
    # Assigned before the line is sent, so that a second send creates no second result.
    sa.Column("result_ids", ARRAY(UUID)),
    # Outcome of a finished line, as in its output file.
    sa.Column("is_completed", sa.Boolean),
    sa.Column("outcome", sa.Text),
    sa.CheckConstraint("state IN ('waiting', 'sent', 'done')", name="state"),
    sa.CheckConstraint("state = 'done' OR body IS NOT NULL", name="open_has_body"),
    sa.CheckConstraint("state <> 'sent' OR result_ids IS NOT NULL", name="sent_has_results"),
    sa.CheckConstraint(
        "(state = 'done') = (num_nonnulls(outcome, is_completed) = 2)", name="done_has_outcome"
    ),
    index(
        "batch_id", "line", name="ix_batch_lines_batch_id_line_waiting", where="state = 'waiting'"
    ),
    index("batch_id", "line", name="ix_batch_lines_batch_id_line_sent", where="state = 'sent'"),
    postgresql_with=LONG_WITH_TEXTS,
)
