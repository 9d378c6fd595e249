"""job webhooks: deliveries of ends of jobs, beside those of results

Revision: 0023
Revises: 0022
"""

import sqlalchemy as sa
from alembic import op

from app.core import schema_changes

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None


def upgrade() -> None:
    schema_changes.lock_tables("webhook_deliveries")
    schema_changes.add_column(
        "webhook_deliveries",
        sa.Column("is_job", sa.Boolean(), server_default=sa.text("false"), nullable=False),
    )


def downgrade() -> None:
    schema_changes.lock_tables("webhook_deliveries")
    # The former service would look for results of these ids, again and again.
    op.execute("DELETE FROM webhook_deliveries WHERE is_job")
    op.drop_column("webhook_deliveries", "is_job")
