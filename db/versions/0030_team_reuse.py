"""team limits: whether equal results answer a team's requests without `reuse`

A column that may be NULL: older processes neither write nor read it. After a downgrade the requests of
such a team run again; nothing else is lost.

Revision: 0030
Revises: 0029
"""

import sqlalchemy as sa
from alembic import op

from app.core import schema_changes

revision = "0030"
down_revision = "0029"
branch_labels = None
depends_on = None


def upgrade() -> None:
    schema_changes.lock_tables("team_limits")
    schema_changes.add_column("team_limits", sa.Column("reuse", sa.Boolean()))


def downgrade() -> None:
    schema_changes.lock_tables("team_limits")
    op.drop_column("team_limits", "reuse")
