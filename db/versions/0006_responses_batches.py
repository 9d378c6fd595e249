"""what a response answers with later, texts that are erased, files and batches

Revision: 0006
Revises: 0005
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

from app.core import schema_changes

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

_ACTIVE = sa.text("state IN ('validating', 'in_progress', 'cancelling', 'finalizing')")
_HAS_OUTPUT = "ck_results_completed_has_output"
_AT_END = "ck_results_erased_at_end"
_COMPLETED_HAS_OUTPUT = "state <> 'completed' OR output IS NOT NULL"


def _json(name: str, default: str | None = None) -> sa.Column[object]:
    return sa.Column(
        name,
        postgresql.JSONB(astext_type=sa.Text()),
        server_default=None if default is None else sa.text(f"'{default}'::jsonb"),
        nullable=default is None,
    )


def _time(name: str, *, nullable: bool = True) -> sa.Column[object]:
    return sa.Column(name, sa.DateTime(timezone=True), nullable=nullable)


def _count(name: str) -> sa.Column[object]:
    return sa.Column(name, sa.Integer(), server_default="0", nullable=False)


def upgrade() -> None:
    schema_changes.lock_tables("results")
    schema_changes.add_column("results", _json("request"))
    schema_changes.add_column(
        "results", sa.Column("store", sa.Boolean(), server_default=sa.text("true"), nullable=False)
    )
    schema_changes.add_column("results", _time("erased_at"))
    schema_changes.replace_check(
        "results", _HAS_OUTPUT, f"{_COMPLETED_HAS_OUTPUT} OR erased_at IS NOT NULL"
    )
    schema_changes.replace_check("results", _AT_END, "erased_at IS NULL OR state <> 'pending'")
    with schema_changes.outside_transactions():
        schema_changes.validate("results", _HAS_OUTPUT, _AT_END)
        schema_changes.create_index(
            "ix_results_finished_at_to_erase",
            "results",
            ["finished_at"],
            sa.text("NOT store AND erased_at IS NULL AND finished_at IS NOT NULL"),
        )
    _create_files()
    _create_batches()


def _create_files() -> None:
    op.create_table(
        "files",
        sa.Column("id", sa.UUID(), nullable=False),
        sa.Column("team_id", sa.String(), nullable=False),
        sa.Column("purpose", sa.String(), nullable=False),
        sa.Column("filename", sa.Text(), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=True),
        _time("expires_at"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_files")),
    )
    for name, columns, where in (
        ("ix_files_team_id_id", ["team_id", "id"], "size IS NOT NULL"),
        ("ix_files_expires_at", ["expires_at"], "expires_at IS NOT NULL"),
        ("ix_files_unfinished", ["id"], "size IS NULL"),
    ):
        op.create_index(name, "files", columns, postgresql_where=sa.text(where))
    op.create_table(
        "file_parts",
        sa.Column("file_id", sa.UUID(), nullable=False),
        sa.Column("place", sa.Integer(), nullable=False),
        sa.Column("content", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(
            ["file_id"], ["files.id"], name=op.f("fk_file_parts_file_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("file_id", "place", name=op.f("pk_file_parts")),
    )


def _create_batches() -> None:
    op.create_table(
        "batches",
        sa.Column("id", sa.UUID(), nullable=False),
        sa.Column("team_id", sa.String(), nullable=False),
        sa.Column("endpoint", sa.String(), nullable=False),
        sa.Column("input_file_id", sa.UUID(), nullable=False),
        sa.Column("output_file_id", sa.UUID(), nullable=True),
        sa.Column("error_file_id", sa.UUID(), nullable=True),
        sa.Column("completion_window", sa.String(), nullable=False),
        _json("metadata", "{}"),
        sa.Column("state", sa.String(), server_default="validating", nullable=False),
        _json("errors", "[]"),
        _count("total"),
        _count("completed"),
        _count("failed"),
        sa.Column("output_seconds", sa.Integer(), nullable=True),
        _time("expires_at", nullable=False),
        _time("in_progress_at"),
        _time("cancelling_at"),
        _time("expiring_at"),
        _time("finalizing_at"),
        _time("ended_at"),
        sa.Column("feeder_id", sa.UUID(), nullable=True),
        _time("lease_expires_at"),
        sa.CheckConstraint(
            "state IN ('validating', 'failed', 'in_progress', 'finalizing', 'completed', "
            "'expired', 'cancelling', 'cancelled')",
            name=op.f("ck_batches_state"),
        ),
        sa.CheckConstraint(
            "(state IN ('failed', 'completed', 'expired', 'cancelled')) = (ended_at IS NOT NULL)",
            name=op.f("ck_batches_ended"),
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_batches")),
    )
    op.create_index("ix_batches_team_id_id", "batches", ["team_id", "id"])
    op.create_index("ix_batches_active", "batches", ["id"], postgresql_where=_ACTIVE)
    op.create_table(
        "batch_lines",
        sa.Column("batch_id", sa.UUID(), nullable=False),
        sa.Column("line", sa.Integer(), nullable=False),
        sa.Column("custom_id", sa.Text(), nullable=False),
        sa.Column("state", sa.String(), server_default="waiting", nullable=False),
        sa.Column("body", sa.Text(), nullable=True),
        sa.Column("result_ids", postgresql.ARRAY(sa.UUID()), nullable=True),
        sa.Column("is_completed", sa.Boolean(), nullable=True),
        sa.Column("outcome", sa.Text(), nullable=True),
        sa.CheckConstraint(
            "state IN ('waiting', 'sent', 'done')", name=op.f("ck_batch_lines_state")
        ),
        sa.CheckConstraint(
            "state = 'done' OR body IS NOT NULL", name=op.f("ck_batch_lines_open_has_body")
        ),
        sa.CheckConstraint(
            "state <> 'sent' OR result_ids IS NOT NULL",
            name=op.f("ck_batch_lines_sent_has_results"),
        ),
        sa.CheckConstraint(
            "(state = 'done') = (num_nonnulls(outcome, is_completed) = 2)",
            name=op.f("ck_batch_lines_done_has_outcome"),
        ),
        sa.ForeignKeyConstraint(
            ["batch_id"], ["batches.id"], name=op.f("fk_batch_lines_batch_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("batch_id", "line", name=op.f("pk_batch_lines")),
    )
    for state in ("waiting", "sent"):
        op.create_index(
            f"ix_batch_lines_batch_id_line_{state}",
            "batch_lines",
            ["batch_id", "line"],
            postgresql_where=sa.text(f"state = '{state}'"),
        )


def downgrade() -> None:
    schema_changes.refuse_to_forget(
        "SELECT FROM results WHERE NOT store OR erased_at IS NOT NULL",
        "of results with `store` false, what is to be erased would be kept, and what is erased "
        "would be an empty answer.",
    )
    schema_changes.lock_tables("results")
    op.drop_constraint(op.f(_AT_END), "results", if_exists=True)
    # Rows that were written before are put right below, before they are judged.
    schema_changes.replace_check("results", _HAS_OUTPUT, _COMPLETED_HAS_OUTPUT)
    with schema_changes.outside_transactions():
        # The service before knows no answer that is gone: it reads an empty one.
        op.execute("UPDATE results SET output = '' WHERE state = 'completed' AND output IS NULL")
        schema_changes.validate("results", _HAS_OUTPUT)
        schema_changes.drop_index("ix_results_finished_at_to_erase", "results")
    tables = ("batch_lines", "batches", "file_parts", "files")
    schema_changes.lock_tables("results", *tables)
    for table in tables:
        op.drop_table(table)
    for name in ("erased_at", "store", "request"):
        op.drop_column("results", name)
