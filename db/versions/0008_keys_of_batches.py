"""erased contexts; idempotency keys of batches, and the count of a team's open ones

Revision: 0008
Revises: 0007
"""

import sqlalchemy as sa
from alembic import op

from app.core import schema_changes

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

_ACTIVE = sa.text("state IN ('validating', 'in_progress', 'cancelling', 'finalizing')")


def upgrade() -> None:
    schema_changes.lock_tables("contexts", "batches")
    schema_changes.add_column(
        "contexts", sa.Column("erased_at", sa.DateTime(timezone=True), nullable=True)
    )
    for column in (
        sa.Column("idempotency_key", sa.String(), nullable=True),
        sa.Column("request_hash", sa.LargeBinary(), nullable=True),
        sa.Column("key_expires_at", sa.DateTime(timezone=True), nullable=True),
    ):
        schema_changes.add_column("batches", column)
    schema_changes.replace_check(
        "batches",
        "ck_batches_whole_key",
        "num_nonnulls(idempotency_key, request_hash, key_expires_at) IN (0, 3)",
    )
    with schema_changes.outside_transactions():
        # Contexts whose results were all erased; marking an empty one by mistake loses no text.
        op.execute(
            "UPDATE contexts c SET erased_at = r.erased_at FROM results r "
            "WHERE r.context_id = c.id AND r.erased_at IS NOT NULL AND c.erased_at IS NULL "
            "AND c.content = '' AND NOT EXISTS (SELECT FROM results o "
            "WHERE o.context_id = c.id AND o.erased_at IS NULL)"
        )
        schema_changes.validate("batches", "ck_batches_whole_key")
        schema_changes.create_index("ix_batches_team_id_active", "batches", ["team_id"], _ACTIVE)
        schema_changes.create_index(
            "ix_batches_team_id_idempotency_key",
            "batches",
            ["team_id", "idempotency_key"],
            sa.text("idempotency_key IS NOT NULL"),
            unique=True,
        )


def downgrade() -> None:
    schema_changes.refuse_to_forget(
        "SELECT FROM contexts WHERE erased_at IS NOT NULL",
        "erased contexts would be empty prompts, which can be sent.",
    )
    with schema_changes.outside_transactions():
        schema_changes.drop_index("ix_batches_team_id_idempotency_key", "batches")
        schema_changes.drop_index("ix_batches_team_id_active", "batches")
    schema_changes.lock_tables("contexts", "batches")
    op.drop_constraint(op.f("ck_batches_whole_key"), "batches")
    for name in ("key_expires_at", "request_hash", "idempotency_key"):
        op.drop_column("batches", name)
    op.drop_column("contexts", "erased_at")
