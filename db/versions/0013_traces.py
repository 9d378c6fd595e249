"""traces: the context of a result's request, for the workers that run it

Revision: 0013
Revises: 0012
"""

import sqlalchemy as sa
from alembic import op

from app.core import schema_changes

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    schema_changes.lock_tables("results")
    schema_changes.add_column("results", sa.Column("trace", sa.Text()))


def downgrade() -> None:
    schema_changes.lock_tables("results")
    op.drop_column("results", "trace")
