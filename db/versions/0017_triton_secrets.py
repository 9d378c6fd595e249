"""triton secrets: what the requests to a registered or launched Triton server carry

Revision: 0017
Revises: 0016
"""

import sqlalchemy as sa
from alembic import op

from app.core import schema_changes

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None

_TABLES = ("servers", "launches")


def upgrade() -> None:
    # Servers of the former schema have no restrictions and need no secret.
    schema_changes.lock_tables(*_TABLES)
    for table in _TABLES:
        schema_changes.add_column(table, sa.Column("secret", sa.String()))


def downgrade() -> None:
    schema_changes.refuse_to_forget(
        "SELECT FROM servers WHERE secret IS NOT NULL UNION ALL "
        "SELECT FROM launches WHERE secret IS NOT NULL AND ended_at IS NULL",
        "servers that answer only with their secret would be out of reach. Stop their launches, and "
        "remove the others (`python -m app server remove NAME`).",
    )
    schema_changes.lock_tables(*_TABLES)
    for table in _TABLES:
        op.drop_column(table, "secret")
