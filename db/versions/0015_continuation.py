"""continuation: the text of a lost attempt stays, and the next attempt continues it

Revision: 0015
Revises: 0014
"""

import sqlalchemy as sa
from alembic import op

from app.core import schema_changes

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None

_TABLES = ("results", "result_chunks")


def upgrade() -> None:
    # Pending results of the former schema keep the default: they start over, as they did before.
    schema_changes.lock_tables(*_TABLES)
    schema_changes.add_column(
        "results",
        sa.Column("resumable", sa.Boolean(), server_default=sa.text("false"), nullable=False),
    )
    schema_changes.add_column("results", sa.Column("text_attempt", sa.Integer()))
    schema_changes.add_column(
        "results",
        sa.Column("continuations", sa.SmallInteger(), server_default="0", nullable=False),
    )
    schema_changes.add_column("result_chunks", sa.Column("token_ids", sa.LargeBinary()))


def downgrade() -> None:
    schema_changes.lock_tables(*_TABLES)
    # The former service reads the chunks of the present attempt alone. Kept text of a result that
    # waits for its next attempt is generated again.
    op.execute(
        "DELETE FROM result_chunks c USING results r WHERE r.id = c.result_id "
        "AND r.state = 'pending' AND r.worker_id IS NULL AND r.text_attempt IS NOT NULL"
    )
    op.drop_column("result_chunks", "token_ids")
    op.drop_column("results", "continuations")
    op.drop_column("results", "text_attempt")
    op.drop_column("results", "resumable")
