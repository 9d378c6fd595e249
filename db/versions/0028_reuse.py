"""reuse: the digest of a request, and the result whose text answers an equal one

Columns that may be NULL, and an index of the results that have a digest: older processes neither write
nor read them.

Revision: 0028
Revises: 0027
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

from app.core import schema_changes

revision = "0028"
down_revision = "0027"
branch_labels = None
depends_on = None

_INDEX = "ix_results_team_id_reuse_digest_id"


def upgrade() -> None:
    schema_changes.lock_tables("results")
    schema_changes.add_column("results", sa.Column("reuse_digest", sa.LargeBinary()))
    schema_changes.add_column("results", sa.Column("reused_from", postgresql.UUID()))
    with schema_changes.outside_transactions():
        schema_changes.create_index(
            _INDEX,
            "results",
            ["team_id", "reuse_digest", "id"],
            sa.text("reuse_digest IS NOT NULL"),
        )


def downgrade() -> None:
    schema_changes.refuse_to_forget(
        "SELECT FROM results WHERE reused_from IS NOT NULL",
        "the tokens of reused results would look like their own.",
    )
    schema_changes.lock_tables("results")
    op.drop_column("results", "reused_from")
    op.drop_column("results", "reuse_digest")
