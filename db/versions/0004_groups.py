"""what becomes of a result whose client left; log probabilities of running results

Revision: 0004
Revises: 0003
"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "results",
        sa.Column("on_disconnect", sa.String(), server_default="continue", nullable=False),
    )
    op.create_check_constraint(
        op.f("ck_results_on_disconnect"), "results", "on_disconnect IN ('continue', 'cancel')"
    )
    op.create_index(
        "ix_results_group_id",
        "results",
        ["group_id"],
        postgresql_where=sa.text("group_id IS NOT NULL"),
    )
    op.add_column("result_chunks", sa.Column("logprobs", sa.Text(), nullable=True))


def downgrade() -> None:
    op.drop_column("result_chunks", "logprobs")
    op.drop_index("ix_results_group_id", "results")
    op.drop_constraint(op.f("ck_results_on_disconnect"), "results")
    op.drop_column("results", "on_disconnect")
