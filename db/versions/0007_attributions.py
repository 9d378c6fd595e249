"""attributions: results of another kind; the queue is found by its name alone

Revision: 0007
Revises: 0006
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

_UNCLAIMED = sa.text("state = 'pending' AND worker_id IS NULL")
_ORDER = (sa.text("priority DESC"), "fair_key", "id")


def _create_queue_indexes(name: str, first: list[str]) -> None:
    op.create_index(name, "results", [*first, "model_name", *_ORDER], postgresql_where=_UNCLAIMED)
    op.create_index(
        f"{name}_team",
        "results",
        [*first, "model_name", "team_id", *_ORDER],
        postgresql_where=_UNCLAIMED,
    )


def _drop_queue_indexes(name: str) -> None:
    op.drop_index(f"{name}_team", "results")
    op.drop_index(name, "results")


def _check_kind(condition: str) -> None:
    op.drop_constraint(op.f("ck_results_kind"), "results")
    op.create_check_constraint(op.f("ck_results_kind"), "results", condition)


def upgrade() -> None:
    op.add_column("results", sa.Column("source_id", sa.UUID(), nullable=True))
    op.add_column(
        "results",
        sa.Column("attribution", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
    )
    _check_kind("kind IN ('generation', 'attribution')")
    op.create_index(
        "ix_results_source_id_id",
        "results",
        ["source_id", "id"],
        postgresql_where=sa.text("source_id IS NOT NULL"),
    )
    _create_queue_indexes("ix_results_queue", [])
    _drop_queue_indexes("ix_results_unclaimed")


def downgrade() -> None:
    # The service before knows no such kind, and would give them to a model.
    op.execute("DELETE FROM results WHERE kind = 'attribution'")
    _create_queue_indexes("ix_results_unclaimed", ["kind"])
    _drop_queue_indexes("ix_results_queue")
    op.drop_index("ix_results_source_id_id", "results")
    _check_kind("kind IN ('generation')")
    op.drop_column("results", "attribution")
    op.drop_column("results", "source_id")
