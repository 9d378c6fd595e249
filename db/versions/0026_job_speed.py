"""the time since which the rows of a job run, for an estimate of its remaining time

Older processes do not change it: their estimates are too high until the job begins again.

Revision: 0026
Revises: 0025
"""

import sqlalchemy as sa
from alembic import op

from app.core import schema_changes

revision = "0026"
down_revision = "0025"
branch_labels = None
depends_on = None

# A job that runs begins now: its former rows have no time.
_BEGIN = """
UPDATE job_progress SET began_place = last_place
WHERE job_id IN (SELECT id FROM jobs WHERE ended_at IS NULL AND deleted_at IS NULL)
"""


def upgrade() -> None:
    schema_changes.lock_tables("job_progress")
    began_at = sa.Column(
        "began_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False
    )
    began_place = sa.Column("began_place", sa.BigInteger(), server_default="0", nullable=False)
    schema_changes.add_column("job_progress", began_at)
    schema_changes.add_column("job_progress", began_place)
    op.execute(_BEGIN)


def downgrade() -> None:
    schema_changes.lock_tables("job_progress")
    op.drop_column("job_progress", "began_place")
    op.drop_column("job_progress", "began_at")
