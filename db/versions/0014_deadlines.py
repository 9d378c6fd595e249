"""deadlines: their index is for questions of deadlines alone

Any probe of the queue could use the former one, and did where statistics were made while nothing
waited: it read all that waits, for each result that was enqueued.

Revision: 0014
Revises: 0013
"""

import sqlalchemy as sa

from app.core import schema_changes

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None

_UNCLAIMED = "state = 'pending' AND worker_id IS NULL"
_FORMER, _NEW = "ix_results_deadline_at_unclaimed", "ix_results_unclaimed_deadline_at"


def upgrade() -> None:
    with schema_changes.outside_transactions():
        schema_changes.create_index(
            _NEW,
            "results",
            ["deadline_at"],
            sa.text(f"{_UNCLAIMED} AND deadline_at IS NOT NULL"),
        )
        schema_changes.drop_index(_FORMER, "results")


def downgrade() -> None:
    with schema_changes.outside_transactions():
        schema_changes.create_index(_FORMER, "results", ["deadline_at"], sa.text(_UNCLAIMED))
        schema_changes.drop_index(_NEW, "results")
