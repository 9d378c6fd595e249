"""model downloads: downloads of Hugging Face models that workers run for requests

Older processes neither read nor write the table.

Revision: 0032
Revises: 0031
"""

import sqlalchemy as sa
from alembic import op

from app.core import schema_changes

revision = "0032"
down_revision = "0031"
branch_labels = None
depends_on = None


def _time(name: str) -> sa.Column[object]:
    return sa.Column(name, sa.DateTime(timezone=True))


def _now(name: str) -> sa.Column[object]:
    return sa.Column(
        name, sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False
    )


def upgrade() -> None:
    op.create_table(
        "model_downloads",
        sa.Column("id", sa.UUID(), nullable=False),
        sa.Column("team_id", sa.String(), nullable=False),
        sa.Column("profile", sa.String(), nullable=False),
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("revision", sa.String(), nullable=False),
        sa.Column("state", sa.String(), server_default="queued", nullable=False),
        sa.Column("reason", sa.Text(), server_default="", nullable=False),
        sa.Column("attempt", sa.Integer(), server_default="0", nullable=False),
        sa.Column("failures", sa.Integer(), server_default="0", nullable=False),
        sa.Column("done_bytes", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("total_bytes", sa.BigInteger()),
        sa.Column("commit", sa.String()),
        _time("started_at"),
        _time("ended_at"),
        _now("next_attempt_at"),
        _time("lease_expires_at"),
        sa.CheckConstraint(
            "state IN ('queued', 'running', 'completed', 'failed', 'cancelled')",
            name=op.f("ck_model_downloads_state"),
        ),
        sa.CheckConstraint(
            "(state IN ('queued', 'running')) = (ended_at IS NULL)",
            name=op.f("ck_model_downloads_ended"),
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_model_downloads")),
    )
    op.create_index(op.f("ix_model_downloads_team_id_id"), "model_downloads", ["team_id", "id"])
    op.create_index(
        op.f("ix_model_downloads_open"),
        "model_downloads",
        ["team_id", "profile", "model"],
        unique=True,
        postgresql_where=sa.text("ended_at IS NULL"),
    )


def downgrade() -> None:
    schema_changes.refuse_to_forget(
        "SELECT FROM model_downloads WHERE ended_at IS NULL",
        "downloads that have not ended would be forgotten.",
    )
    op.drop_table("model_downloads")
