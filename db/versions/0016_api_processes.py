"""api_processes: a result names the process whose client waits for it, and ends with it

Revision: 0016
Revises: 0015
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import UUID

from app.core import schema_changes

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # Results of the former service name no process: they run to their end, as they did before.
    op.create_table(
        "api_processes",
        sa.Column("id", UUID(), nullable=False),
        sa.Column("lease_expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_api_processes")),
    )
    schema_changes.lock_tables("results")
    schema_changes.add_column("results", sa.Column("waiter_id", UUID()))


def downgrade() -> None:
    schema_changes.lock_tables("results", "api_processes")
    op.drop_column("results", "waiter_id")
    op.drop_table("api_processes")
