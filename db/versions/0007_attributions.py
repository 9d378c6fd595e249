"""attributions: results of another kind; the queue is found by its name alone

Revision: 0007
Revises: 0006
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

from app.core import schema_changes

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

_UNCLAIMED = sa.text("state = 'pending' AND worker_id IS NULL")
_ORDER = (sa.text("priority DESC"), "fair_key", "id")
_KIND = "ck_results_kind"


def _create_queue_indexes(name: str, first: list[str]) -> None:
    for index, columns in ((name, ["model_name"]), (f"{name}_team", ["model_name", "team_id"])):
        schema_changes.create_index(index, "results", [*first, *columns, *_ORDER], _UNCLAIMED)


def _drop_queue_indexes(name: str) -> None:
    schema_changes.drop_index(f"{name}_team", "results")
    schema_changes.drop_index(name, "results")


def upgrade() -> None:
    schema_changes.lock_tables("results")
    schema_changes.add_column("results", sa.Column("source_id", sa.UUID(), nullable=True))
    schema_changes.add_column(
        "results",
        sa.Column("attribution", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
    )
    schema_changes.replace_check("results", _KIND, "kind IN ('generation', 'attribution')")
    with schema_changes.outside_transactions():
        schema_changes.validate("results", _KIND)
        schema_changes.create_index(
            "ix_results_source_id_id",
            "results",
            ["source_id", "id"],
            sa.text("source_id IS NOT NULL"),
        )
        _create_queue_indexes("ix_results_queue", [])
        _drop_queue_indexes("ix_results_unclaimed")


def downgrade() -> None:
    schema_changes.refuse_to_forget(
        "SELECT FROM results WHERE kind = 'attribution'",
        "attributions, which the service before does not know, would be deleted.",
    )
    schema_changes.lock_tables("results")
    schema_changes.replace_check("results", _KIND, "kind IN ('generation')")
    with schema_changes.outside_transactions():
        # The service before knows no such kind, and would give them to a model.
        op.execute("DELETE FROM results WHERE kind = 'attribution'")
        schema_changes.validate("results", _KIND)
        _create_queue_indexes("ix_results_unclaimed", ["kind"])
        _drop_queue_indexes("ix_results_queue")
        schema_changes.drop_index("ix_results_source_id_id", "results")
    schema_changes.lock_tables("results")
    op.drop_column("results", "attribution")
    op.drop_column("results", "source_id")
