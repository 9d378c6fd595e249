"""retries, webhooks, idempotency keys, stream tickets

Revision: 0002
Revises: 0001
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_NOW = sa.text("now()")


def upgrade() -> None:
    op.add_column("results", sa.Column("deadline_seconds", sa.Float(), nullable=True))
    op.add_column("results", sa.Column("retry_of", sa.UUID(), nullable=True))
    op.add_column("results", sa.Column("webhook_url", sa.Text(), nullable=True))
    op.create_table(
        "idempotency_keys",
        sa.Column("team_id", sa.String(), nullable=False),
        sa.Column("key", sa.String(), nullable=False),
        sa.Column("request_hash", sa.LargeBinary(), nullable=False),
        sa.Column("result_id", sa.UUID(), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["result_id"],
            ["results.id"],
            name=op.f("fk_idempotency_keys_result_id"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("team_id", "key", name=op.f("pk_idempotency_keys")),
    )
    op.create_index("ix_idempotency_keys_result_id", "idempotency_keys", ["result_id"])
    op.create_index("ix_idempotency_keys_expires_at", "idempotency_keys", ["expires_at"])
    op.create_table(
        "stream_tickets",
        sa.Column("ticket_hash", sa.LargeBinary(), nullable=False),
        sa.Column("team_id", sa.String(), nullable=False),
        sa.Column("result_id", sa.UUID(), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("ticket_hash", name=op.f("pk_stream_tickets")),
    )
    op.create_index("ix_stream_tickets_expires_at", "stream_tickets", ["expires_at"])
    op.create_table(
        "webhook_deliveries",
        sa.Column("result_id", sa.UUID(), nullable=False),
        sa.Column("team_id", sa.String(), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("state", sa.String(), server_default="pending", nullable=False),
        sa.Column("attempts", sa.SmallInteger(), server_default="0", nullable=False),
        sa.Column(
            "next_attempt_at", sa.DateTime(timezone=True), server_default=_NOW, nullable=False
        ),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=_NOW, nullable=False),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column(
            "log",
            postgresql.JSONB(astext_type=sa.Text()),
            server_default=sa.text("'[]'::jsonb"),
            nullable=False,
        ),
        sa.CheckConstraint(
            "state IN ('pending', 'delivered', 'failed')", name=op.f("ck_webhook_deliveries_state")
        ),
        sa.CheckConstraint(
            "(state = 'pending') = (finished_at IS NULL)",
            name=op.f("ck_webhook_deliveries_finished"),
        ),
        sa.ForeignKeyConstraint(
            ["result_id"],
            ["results.id"],
            name=op.f("fk_webhook_deliveries_result_id"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("result_id", name=op.f("pk_webhook_deliveries")),
    )
    op.create_index(
        "ix_webhook_deliveries_team_id_result_id", "webhook_deliveries", ["team_id", "result_id"]
    )
    op.create_index(
        "ix_webhook_deliveries_next_attempt_at",
        "webhook_deliveries",
        ["next_attempt_at"],
        postgresql_where=sa.text("state = 'pending'"),
    )
    op.create_index(
        "ix_webhook_deliveries_team_id_result_id_open",
        "webhook_deliveries",
        ["team_id", "result_id"],
        postgresql_where=sa.text("state <> 'delivered'"),
    )
    op.create_table(
        "webhook_secrets",
        sa.Column("team_id", sa.String(), nullable=False),
        sa.Column("secret", sa.String(), nullable=False),
        sa.Column("previous_secret", sa.String(), nullable=True),
        sa.Column("previous_expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("rotated_at", sa.DateTime(timezone=True), server_default=_NOW, nullable=False),
        sa.PrimaryKeyConstraint("team_id", name=op.f("pk_webhook_secrets")),
    )


def downgrade() -> None:
    for table in ("webhook_secrets", "webhook_deliveries", "stream_tickets", "idempotency_keys"):
        op.drop_table(table)
    op.drop_column("results", "webhook_url")
    op.drop_column("results", "retry_of")
    op.drop_column("results", "deadline_seconds")
