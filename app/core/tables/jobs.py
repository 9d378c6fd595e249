"""Jobs: named sets of results, whose rows are known by keys of their client."""

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB, UUID

from app.core.storage_parameters import COUNTERS, LONG, QUEUE
from app.core.tables.results import results
from app.core.tables.schema import EMPTY_OBJECT, NOW, index, metadata, time

_OPEN = "ended_at IS NULL AND deleted_at IS NULL"

jobs = sa.Table(
    "jobs",
    metadata,
    sa.Column("id", UUID, primary_key=True),
    sa.Column("team_id", sa.String, nullable=False),
    sa.Column("name", sa.Text, nullable=False, server_default=""),
    # Idempotency key of its creation; it lives as long as the job.
    sa.Column("key", sa.Text),
    # Rows that its client expects; NULL: unknown.
    sa.Column("total", sa.BigInteger),
    # Defaults of its rows. They never change: processes keep them.
    sa.Column("priority", sa.SmallInteger, nullable=False),
    sa.Column("deadline_seconds", sa.Float),
    sa.Column("webhook_url", sa.Text),
    sa.Column("metadata", JSONB, nullable=False, server_default=EMPTY_OBJECT),
    # Most rows, by the setting at its creation.
    sa.Column("max_rows", sa.BigInteger, nullable=False),
    # From then on it takes no further rows.
    time("closed_at"),
    time("cancel_requested_at"),
    # Time at which it was closed and had no pending rows; NULL again while retried rows run.
    time("ended_at"),
    # Hidden since then; its rows are deleted bit by bit.
    time("deleted_at"),
    index("team_id", "id", where="deleted_at IS NULL"),
    index("team_id", "key", unique=True, where="key IS NOT NULL AND deleted_at IS NULL"),
    index("team_id", name="ix_jobs_team_id_open", where=_OPEN),
    index(
        "id",
        name="ix_jobs_cancelled",
        where=f"cancel_requested_at IS NOT NULL AND {_OPEN}",
    ),
    index("id", name="ix_jobs_deleted", where="deleted_at IS NOT NULL"),
    sa.CheckConstraint("ended_at IS NULL OR closed_at IS NOT NULL", name="ended_is_closed"),
)

# Counts of a job, written by one process at a time (results/jobs/progress.py). Later changes are in
# job_events.
job_progress = sa.Table(
    "job_progress",
    metadata,
    sa.Column("job_id", UUID, sa.ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("rows", sa.BigInteger, nullable=False, server_default="0"),
    # Place of the row that ended last.
    sa.Column("last_place", sa.BigInteger, nullable=False, server_default="0"),
    # Ended rows by `completed` or error code.
    sa.Column("ended", JSONB, nullable=False, server_default=EMPTY_OBJECT),
    sa.Column("prompt_tokens", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("completion_tokens", sa.BigInteger, nullable=False, server_default="0"),
    time("changed_at", nullable=False, default=NOW),
    # The last time that it had no pending row and got some, and its last place then: for its speed.
    time("began_at", nullable=False, default=NOW),
    sa.Column("began_place", sa.BigInteger, nullable=False, server_default="0"),
    postgresql_with=COUNTERS,
)

# No foreign keys: the statement that stores a row locks its job, and the row outlives its result.
job_rows = sa.Table(
    "job_rows",
    metadata,
    # The key first: no statement on many rows of a job can mistake this index for one of the others.
    sa.Column("key", sa.Text, primary_key=True),
    sa.Column("job_id", UUID, primary_key=True),
    # SHA-256 of the canonical request: the same key with another request is refused.
    sa.Column("request_hash", sa.LargeBinary, nullable=False),
    # Its result: the last one, if it was retried, and then the one before.
    sa.Column("result_id", UUID, nullable=False),
    sa.Column("replaced_id", UUID),
    # Once it has ended: its place in the order of ends, and `completed` or the error code.
    sa.Column("place", sa.BigInteger),
    sa.Column("ended_as", sa.String),
    sa.CheckConstraint("(place IS NULL) = (ended_as IS NULL)", name="ended_has_place"),
    index("job_id", "result_id", name="ix_job_rows_pending", where="place IS NULL"),
    index("job_id", "place", name="ix_job_rows_completed", where="ended_as = 'completed'"),
    index("job_id", "place", name="ix_job_rows_failed", where="ended_as <> 'completed'"),
    postgresql_with=LONG,
)

# Queue of changes that job_progress does not count yet.
job_events = sa.Table(
    "job_events",
    metadata,
    sa.Column("id", sa.BigInteger, sa.Identity(), primary_key=True),
    sa.Column("job_id", UUID, nullable=False),
    # The result that has ended; NULL: of new or retried rows.
    sa.Column("result_id", UUID),
    # `completed` or the error code of ended rows; NULL: of new rows.
    sa.Column("ended_as", sa.String),
    # How many there are more, or fewer.
    sa.Column("rows", sa.Integer, nullable=False),
    sa.Column("prompt_tokens", sa.Integer, nullable=False, server_default="0"),
    sa.Column("completion_tokens", sa.Integer, nullable=False, server_default="0"),
    index("job_id"),
    postgresql_with=QUEUE,
)

# A trigger: a worker of an earlier version ends rows of jobs, too. PostgreSQL reads its condition again in
# each statement, so it is short. `delete_rows_of_results` notes pending rows that are deleted.
_NOTE_ENDS = (
    """CREATE FUNCTION note_end_of_job_row() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
          IF OLD.state = 'pending' AND NEW.state <> 'pending' THEN
            INSERT INTO job_events (job_id, result_id, ended_as, rows, prompt_tokens, completion_tokens)
            VALUES (NEW.job_id, NEW.id, coalesce(NEW.error_code, 'completed'), 1,
                    coalesce(NEW.prompt_tokens, 0), coalesce(NEW.completion_tokens, 0));
          END IF;
          RETURN NULL;
        END $$""",
    """CREATE TRIGGER note_end_of_job_row AFTER UPDATE OF state ON results FOR EACH ROW
        WHEN (NEW.job_id IS NOT NULL) EXECUTE FUNCTION note_end_of_job_row()""",
)
for statement in _NOTE_ENDS:
    sa.event.listen(results, "after_create", sa.DDL(statement))  # type: ignore[no-untyped-call]
