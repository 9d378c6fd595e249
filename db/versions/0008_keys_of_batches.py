"""erased contexts

Revision: 0008
Revises: 0007
"""

import sqlalchemy as sa
from alembic import op

from app import schema_changes

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    schema_changes.lock_table("contexts")
    schema_changes.add_column(
        "contexts", sa.Column("erased_at", sa.DateTime(timezone=True), nullable=True)
    )
    with schema_changes.outside_transactions():
        # Of which every result was erased; one with an empty text that was not is nobody's loss.
        op.execute(
            "UPDATE contexts c SET erased_at = r.erased_at FROM results r "
            "WHERE r.context_id = c.id AND r.erased_at IS NOT NULL AND c.erased_at IS NULL "
            "AND c.content = '' AND NOT EXISTS (SELECT FROM results o "
            "WHERE o.context_id = c.id AND o.erased_at IS NULL)"
        )


def downgrade() -> None:
    schema_changes.refuse_to_forget(
        "SELECT FROM contexts WHERE erased_at IS NOT NULL",
        "erased contexts would be empty prompts, which can be sent.",
    )
    schema_changes.lock_table("contexts")
    op.drop_column("contexts", "erased_at")
