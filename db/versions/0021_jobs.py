"""jobs: named sets of results, whose rows are known by keys of their client

A trigger notes the end of a row: workers of the former service end rows, too, without knowledge of jobs.

Revision: 0021
Revises: 0020
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB, UUID

from app.core import schema_changes

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None

_OPEN = "ended_at IS NULL AND deleted_at IS NULL"
_EMPTY_OBJECT = sa.text("'{}'::jsonb")
_LONG = {
    "autovacuum_vacuum_scale_factor": 0.05,
    "autovacuum_vacuum_insert_scale_factor": 0.05,
    "autovacuum_analyze_scale_factor": 0.05,
}
_QUEUE = {
    "autovacuum_vacuum_scale_factor": 0,
    "autovacuum_vacuum_threshold": 1000,
    "autovacuum_vacuum_cost_delay": 0,
    "vacuum_truncate": "false",
}


def _time(name: str) -> sa.Column[object]:
    return sa.Column(name, sa.DateTime(timezone=True))


def _count(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger(), server_default="0", nullable=False)


def _index(
    table: str, columns: list[str], where: str | None, name: str, *, unique: bool = False
) -> None:
    condition = None if where is None else sa.text(where)
    op.create_index(op.f(name), table, columns, unique=unique, postgresql_where=condition)


def _create_jobs() -> None:
    op.create_table(
        "jobs",
        sa.Column("id", UUID(), nullable=False),
        sa.Column("team_id", sa.String(), nullable=False),
        sa.Column("name", sa.Text(), server_default="", nullable=False),
        sa.Column("key", sa.Text()),
        sa.Column("total", sa.BigInteger()),
        sa.Column("priority", sa.SmallInteger(), nullable=False),
        sa.Column("deadline_seconds", sa.Float()),
        sa.Column("webhook_url", sa.Text()),
        sa.Column("metadata", JSONB(), server_default=_EMPTY_OBJECT, nullable=False),
        sa.Column("max_rows", sa.BigInteger(), nullable=False),
        *map(_time, ("closed_at", "cancel_requested_at", "ended_at", "deleted_at")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_jobs")),
        sa.CheckConstraint(
            "ended_at IS NULL OR closed_at IS NOT NULL", name=op.f("ck_jobs_ended_is_closed")
        ),
    )
    _index("jobs", ["team_id", "id"], "deleted_at IS NULL", "ix_jobs_team_id_id")
    of_key = "key IS NOT NULL AND deleted_at IS NULL"
    _index("jobs", ["team_id", "key"], of_key, "ix_jobs_team_id_key", unique=True)
    _index("jobs", ["team_id"], _OPEN, "ix_jobs_team_id_open")
    _index("jobs", ["id"], f"cancel_requested_at IS NOT NULL AND {_OPEN}", "ix_jobs_cancelled")
    _index("jobs", ["id"], "deleted_at IS NOT NULL", "ix_jobs_deleted")


def _create_progress() -> None:
    op.create_table(
        "job_progress",
        sa.Column("job_id", UUID(), nullable=False),
        *map(_count, ("rows", "last_place")),
        sa.Column("ended", JSONB(), server_default=_EMPTY_OBJECT, nullable=False),
        *map(_count, ("prompt_tokens", "completion_tokens")),
        sa.Column(
            "changed_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.PrimaryKeyConstraint("job_id", name=op.f("pk_job_progress")),
        sa.ForeignKeyConstraint(
            ["job_id"], ["jobs.id"], name=op.f("fk_job_progress_job_id"), ondelete="CASCADE"
        ),
        postgresql_with={"fillfactor": 70},
    )


def _create_rows() -> None:
    op.create_table(
        "job_rows",
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("job_id", UUID(), nullable=False),
        sa.Column("request_hash", sa.LargeBinary(), nullable=False),
        sa.Column("result_id", UUID(), nullable=False),
        sa.Column("replaced_id", UUID()),
        sa.Column("place", sa.BigInteger()),
        sa.Column("ended_as", sa.String()),
        sa.PrimaryKeyConstraint("key", "job_id", name=op.f("pk_job_rows")),
        sa.CheckConstraint(
            "(place IS NULL) = (ended_as IS NULL)", name=op.f("ck_job_rows_ended_has_place")
        ),
        postgresql_with=_LONG,
    )
    _index("job_rows", ["job_id", "result_id"], "place IS NULL", "ix_job_rows_pending")
    _index("job_rows", ["job_id", "place"], "ended_as = 'completed'", "ix_job_rows_completed")
    _index("job_rows", ["job_id", "place"], "ended_as <> 'completed'", "ix_job_rows_failed")
    op.create_table(
        "job_events",
        sa.Column("id", sa.BigInteger(), sa.Identity(), nullable=False),
        sa.Column("job_id", UUID(), nullable=False),
        sa.Column("result_id", UUID()),
        sa.Column("ended_as", sa.String()),
        sa.Column("rows", sa.Integer(), nullable=False),
        sa.Column("prompt_tokens", sa.Integer(), server_default="0", nullable=False),
        sa.Column("completion_tokens", sa.Integer(), server_default="0", nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_job_events")),
        postgresql_with=_QUEUE,
    )
    _index("job_events", ["job_id"], None, "ix_job_events_job_id")


def _note_ends() -> None:
    schema_changes.lock_tables("results")
    schema_changes.add_column("results", sa.Column("job_id", UUID()))
    op.execute("""
        CREATE FUNCTION note_end_of_job_row() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
          IF OLD.state = 'pending' AND NEW.state <> 'pending' THEN
            INSERT INTO job_events (job_id, result_id, ended_as, rows, prompt_tokens, completion_tokens)
            VALUES (NEW.job_id, NEW.id, coalesce(NEW.error_code, 'completed'), 1,
                    coalesce(NEW.prompt_tokens, 0), coalesce(NEW.completion_tokens, 0));
          END IF;
          RETURN NULL;
        END $$
    """)
    op.execute("""
        CREATE TRIGGER note_end_of_job_row AFTER UPDATE OF state ON results FOR EACH ROW
        WHEN (NEW.job_id IS NOT NULL) EXECUTE FUNCTION note_end_of_job_row()
    """)
    _delete_rows("""INSERT INTO job_events (job_id, result_id, ended_as, rows)
          SELECT job_id, id, 'deleted', 1 FROM gone WHERE job_id IS NOT NULL AND state = 'pending';""")


def _delete_rows(statements: str) -> None:
    """Replace the function of revision 0020, with further statements on the deleted rows `gone`."""
    body = """
        CREATE OR REPLACE FUNCTION delete_rows_of_results() RETURNS trigger LANGUAGE plpgsql AS $$
        DECLARE
          ids uuid[] := ARRAY(SELECT id FROM gone);
        BEGIN
          DELETE FROM result_search WHERE result_id = ANY (ids);
          DELETE FROM idempotency_keys WHERE result_id = ANY (ids);
          DELETE FROM webhook_deliveries WHERE result_id = ANY (ids);
          -- more
          RETURN NULL;
        END $$
    """
    op.execute(body.replace("-- more", statements))


def upgrade() -> None:
    _create_jobs()
    _create_progress()
    _create_rows()
    _note_ends()


def downgrade() -> None:
    schema_changes.refuse_to_forget(
        "SELECT FROM jobs WHERE deleted_at IS NULL",
        "jobs and the keys of their rows would be forgotten, and rows that are sent again would run again.",
    )
    schema_changes.lock_tables("results", "jobs", "job_progress", "job_rows", "job_events")
    op.execute("DROP TRIGGER note_end_of_job_row ON results")
    op.execute("DROP FUNCTION note_end_of_job_row")
    _delete_rows("")
    op.drop_column("results", "job_id")
    for table in ("job_events", "job_rows", "job_progress", "jobs"):
        op.drop_table(table)
