"""attributions: results of another kind; a queue is found by its name alone

Revision: 0007
Revises: 0006
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

from app import schema_changes

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

_UNCLAIMED = sa.text("state = 'pending' AND worker_id IS NULL")
_QUEUES = (("", []), ("_team", ["team_id"]))
_ORDER: schema_changes.Columns = [sa.text("priority DESC"), "fair_key", "id"]


def upgrade() -> None:
    schema_changes.lock_tables("results")
    schema_changes.add_column("results", sa.Column("source_id", sa.UUID(), nullable=True))
    schema_changes.add_column(
        "results",
        sa.Column("attribution", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
    )
    schema_changes.replace_check(
        "results", "ck_results_kind", "kind IN ('generation', 'attribution')"
    )
    with schema_changes.outside_transactions():
        schema_changes.validate("results", "ck_results_kind")
        schema_changes.create_index(
            "ix_results_source_id_id",
            "results",
            ["source_id", "id"],
            sa.text("source_id IS NOT NULL"),
        )
        for name, team in _QUEUES:
            schema_changes.create_index(
                f"ix_results_queue{name}", "results", ["model_name", *team, *_ORDER], _UNCLAIMED
            )
            schema_changes.drop_index(f"ix_results_unclaimed{name}", "results")


def downgrade() -> None:
    schema_changes.refuse_to_forget(
        "SELECT FROM results WHERE kind = 'attribution'",
        "attributions, which the service before does not know, would be deleted.",
    )
    op.execute("DELETE FROM results WHERE kind = 'attribution'")
    schema_changes.lock_tables("results")
    schema_changes.replace_check("results", "ck_results_kind", "kind IN ('generation')")
    with schema_changes.outside_transactions():
        schema_changes.validate("results", "ck_results_kind")
        for name, team in _QUEUES:
            schema_changes.create_index(
                f"ix_results_unclaimed{name}",
                "results",
                ["kind", "model_name", *team, *_ORDER],
                _UNCLAIMED,
            )
            schema_changes.drop_index(f"ix_results_queue{name}", "results")
        schema_changes.drop_index("ix_results_source_id_id", "results")
    schema_changes.lock_tables("results")
    op.drop_column("results", "attribution")
    op.drop_column("results", "source_id")
