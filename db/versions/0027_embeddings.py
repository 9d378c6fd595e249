"""embeddings and scores: results of two more kinds, with their vectors

Older processes neither write nor read the column, and refuse to run such results: upgrade all workers
before the first request.

Revision: 0027
Revises: 0026
"""

import sqlalchemy as sa
from alembic import op

from app.core import schema_changes

revision = "0027"
down_revision = "0026"
branch_labels = None
depends_on = None

_KIND = "ck_results_kind"


def upgrade() -> None:
    schema_changes.lock_tables("results")
    schema_changes.add_column("results", sa.Column("vector", sa.LargeBinary(), nullable=True))
    schema_changes.replace_check(
        "results", _KIND, "kind IN ('generation', 'attribution', 'embedding', 'score')"
    )
    with schema_changes.outside_transactions():
        schema_changes.validate("results", _KIND)


def downgrade() -> None:
    schema_changes.refuse_to_forget(
        "SELECT FROM results WHERE kind IN ('embedding', 'score')",
        "embeddings and scores, which the service before does not know, would be deleted.",
    )
    schema_changes.lock_tables("results")
    op.execute("DELETE FROM results WHERE kind IN ('embedding', 'score')")
    op.drop_column("results", "vector")
    schema_changes.replace_check("results", _KIND, "kind IN ('generation', 'attribution')")
    with schema_changes.outside_transactions():
        schema_changes.validate("results", _KIND)
