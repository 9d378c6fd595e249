"""retention: how long what is done is kept, and tables that are vacuumed as they change

Revision: 0012
Revises: 0011
"""

import sqlalchemy as sa
from alembic import op

from app.core import schema_changes

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

_LONG = {
    "autovacuum_vacuum_scale_factor": "0.05",
    "autovacuum_vacuum_insert_scale_factor": "0.05",
    "autovacuum_analyze_scale_factor": "0.05",
}
_LONG_WITH_TEXTS = _LONG | {"toast.autovacuum_vacuum_scale_factor": "0.05"}
_QUEUE = {
    "autovacuum_vacuum_scale_factor": "0",
    "autovacuum_vacuum_threshold": "1000",
    "autovacuum_vacuum_cost_delay": "0",
    "vacuum_truncate": "false",
}
_COUNTERS = {"fillfactor": "70"}
_STORAGE = {
    "contexts": _LONG_WITH_TEXTS,
    "results": _LONG_WITH_TEXTS,
    "result_search": _LONG,
    "idempotency_keys": _LONG,
    "webhook_deliveries": _LONG,
    "batch_lines": _LONG_WITH_TEXTS,
    "result_chunks": _QUEUE,
    "undigested_results": _QUEUE,
    "minute_stats": _COUNTERS,
    "rate_buckets": _COUNTERS,
    "batches": _COUNTERS,
}
_TABLES = ("team_retention", "retention_marks", "retention_state")


def _time(name: str) -> sa.Column[object]:
    return sa.Column(name, sa.DateTime(timezone=True), nullable=True)


def upgrade() -> None:
    schema_changes.lock_tables("contexts", "results")
    schema_changes.add_column("contexts", _time("unused_since"))
    schema_changes.add_column("results", sa.Column("retain_seconds", sa.Float(), nullable=True))
    schema_changes.add_column("results", _time("expires_at"))
    with schema_changes.outside_transactions():
        schema_changes.create_index(
            "ix_contexts_team_id_unused_since",
            "contexts",
            ["team_id", "unused_since"],
            sa.text("unused_since IS NOT NULL"),
        )
        schema_changes.create_index(
            "ix_results_expires_at", "results", ["expires_at"], sa.text("expires_at IS NOT NULL")
        )
        # Takes a lock that no reader and no writer of rows waits for.
        for table, parameters in _STORAGE.items():
            values = ", ".join(f"{name} = {value}" for name, value in parameters.items())
            op.execute(f"ALTER TABLE {table} SET ({values})")
    _create_tables()


def _create_tables() -> None:
    op.create_table(
        "team_retention",
        sa.Column("team_id", sa.String(), nullable=False),
        sa.Column("results_seconds", sa.Float(), nullable=True),
        sa.Column("prompts_seconds", sa.Float(), nullable=True),
        sa.CheckConstraint(
            "results_seconds >= 0 AND prompts_seconds >= 0",
            name=op.f("ck_team_retention_seconds"),
        ),
        sa.PrimaryKeyConstraint("team_id", name=op.f("pk_team_retention")),
    )
    op.create_table(
        "retention_state",
        sa.Column("id", sa.SmallInteger(), autoincrement=False, nullable=False),
        _time("looked_at"),
        _time("trusted_at"),
        _time("cleaned_at"),
        sa.Column("words_gone", sa.BigInteger(), server_default="0", nullable=False),
        sa.CheckConstraint("id = 1", name=op.f("ck_retention_state_one")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_retention_state")),
    )
    op.execute("INSERT INTO retention_state (id) VALUES (1)")
    op.create_table(
        "retention_marks",
        sa.Column("team_id", sa.String(), nullable=False),
        sa.Column("prompts_to", sa.UUID(), nullable=False),
        sa.PrimaryKeyConstraint("team_id", name=op.f("pk_retention_marks")),
    )


def downgrade() -> None:
    schema_changes.refuse_to_forget(
        "SELECT FROM results WHERE retain_seconds IS NOT NULL",
        "results that were sent with `retain_seconds` would be kept indefinitely.",
    )
    with schema_changes.outside_transactions():
        for table, parameters in _STORAGE.items():
            op.execute(f"ALTER TABLE {table} RESET ({', '.join(parameters)})")
        schema_changes.drop_index("ix_results_expires_at", "results")
        schema_changes.drop_index("ix_contexts_team_id_unused_since", "contexts")
    schema_changes.lock_tables("contexts", "results")
    op.drop_column("results", "expires_at")
    op.drop_column("results", "retain_seconds")
    op.drop_column("contexts", "unused_since")
    for table in _TABLES:
        op.drop_table(table)
