"""Triton servers that are registered; what workers run on each

Revision: 0009
Revises: 0008
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

from app.core import schema_changes

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "servers",
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("grpc", sa.String(), nullable=False),
        sa.Column("http", sa.String()),
        sa.Column("metrics", sa.String()),
        sa.Column("slots", sa.Integer()),
        sa.Column("is_draining", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column(
            "registered_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.CheckConstraint("slots > 0", name=op.f("ck_servers_slots")),
        sa.UniqueConstraint("grpc", name=op.f("uq_servers_grpc")),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_servers")),
    )
    schema_changes.lock_tables("workers")
    schema_changes.add_column(
        "workers",
        sa.Column("servers", JSONB(), server_default=sa.text("'{}'::jsonb"), nullable=False),
    )


def downgrade() -> None:
    schema_changes.lock_tables("workers", "servers")
    op.drop_column("workers", "servers")
    op.drop_table("servers")
