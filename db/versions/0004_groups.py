"""groups, on_disconnect of results whose client left; log probabilities of running results

Revision: 0004
Revises: 0003
"""

import sqlalchemy as sa
from alembic import op

from app.core import schema_changes

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    schema_changes.lock_tables("results")
    schema_changes.add_column(
        "results",
        sa.Column("on_disconnect", sa.String(), server_default="continue", nullable=False),
    )
    schema_changes.replace_check(
        "results", "ck_results_on_disconnect", "on_disconnect IN ('continue', 'cancel')"
    )
    with schema_changes.outside_transactions():
        schema_changes.validate("results", "ck_results_on_disconnect")
        schema_changes.create_index(
            "ix_results_group_id", "results", ["group_id"], sa.text("group_id IS NOT NULL")
        )
    schema_changes.lock_tables("result_chunks")
    op.add_column("result_chunks", sa.Column("logprobs", sa.Text(), nullable=True))


def downgrade() -> None:
    with schema_changes.outside_transactions():
        schema_changes.drop_index("ix_results_group_id", "results")
    schema_changes.lock_tables("results", "result_chunks")
    op.drop_column("result_chunks", "logprobs")
    op.drop_constraint(op.f("ck_results_on_disconnect"), "results")
    op.drop_column("results", "on_disconnect")
