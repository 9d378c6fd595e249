"""the fair order of the queue; limits of teams

Revision: 0005
Revises: 0004
"""

import sqlalchemy as sa
from alembic import op

from app.core import schema_changes

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

_UNCLAIMED = sa.text("state = 'pending' AND worker_id IS NULL")


def upgrade() -> None:
    schema_changes.lock_tables("results")
    schema_changes.add_column(
        "results", sa.Column("fair_key", sa.Float(), server_default="0", nullable=False)
    )
    order: schema_changes.Columns = [sa.text("priority DESC"), "fair_key", "id"]
    with schema_changes.outside_transactions():
        schema_changes.replace_index(
            "ix_results_unclaimed", "results", ["kind", "model_name", *order], _UNCLAIMED
        )
        schema_changes.create_index(
            "ix_results_unclaimed_team",
            "results",
            ["kind", "model_name", "team_id", *order],
            _UNCLAIMED,
        )
    op.create_table(
        "team_limits",
        sa.Column("team_id", sa.String(), nullable=False),
        sa.Column("model_name", sa.String(), server_default="*", nullable=False),
        sa.Column("weight", sa.Float(), nullable=True),
        sa.Column("max_queued", sa.Integer(), nullable=True),
        sa.Column("max_running", sa.Integer(), nullable=True),
        sa.Column("requests_per_minute", sa.Integer(), nullable=True),
        sa.Column("tokens_per_minute", sa.Integer(), nullable=True),
        sa.CheckConstraint("weight > 0", name=op.f("ck_team_limits_weight")),
        sa.PrimaryKeyConstraint("team_id", "model_name", name=op.f("pk_team_limits")),
    )
    op.create_table(
        "rate_buckets",
        sa.Column("team_id", sa.String(), nullable=False),
        sa.Column("model_name", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("level", sa.Float(), nullable=False),
        sa.Column("filled_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("team_id", "model_name", "name", name=op.f("pk_rate_buckets")),
    )


def downgrade() -> None:
    with schema_changes.outside_transactions():
        schema_changes.drop_index("ix_results_unclaimed_team", "results")
        schema_changes.replace_index(
            "ix_results_unclaimed",
            "results",
            ["kind", "model_name", sa.text("priority DESC"), "id"],
            _UNCLAIMED,
        )
    schema_changes.lock_tables("results", "rate_buckets", "team_limits")
    op.drop_table("rate_buckets")
    op.drop_table("team_limits")
    op.drop_column("results", "fair_key")
