"""Launches: Triton servers that the service starts, follows and stops

Revision: 0010
Revises: 0009
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

from app.core import schema_changes

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

_OPEN = sa.text("ended_at IS NULL")


def _text(name: str, default: str | None = None) -> sa.Column[object]:
    return sa.Column(name, sa.Text(), server_default=default, nullable=default is None)


def _name(name: str, *, nullable: bool = False) -> sa.Column[object]:
    return sa.Column(name, sa.String(), nullable=nullable)


def _time(name: str) -> sa.Column[object]:
    return sa.Column(name, sa.DateTime(timezone=True))


def upgrade() -> None:
    op.create_table(
        "launches",
        sa.Column("id", sa.UUID(), nullable=False),
        *(_name(one) for one in ("team_id", "name", "provider", "profile", "model")),
        sa.Column("spec", JSONB(), nullable=False),
        sa.Column("state", sa.String(), server_default="submitted", nullable=False),
        _text("reason", ""),
        *(_name(one, nullable=True) for one in ("end_state", "job_id", "node", "machine")),
        sa.Column("ports", JSONB()),
        sa.Column("address", JSONB()),
        sa.Column("requests", sa.BigInteger(), server_default="0", nullable=False),
        _text("log", ""),
        sa.Column("exit_code", sa.Integer()),
        *(
            _time(f"{one}_at")
            for one in ("submitted", "started", "healthy", "last_used", "stopping", "ended")
        ),
        sa.Column(
            "next_check_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        _time("lease_expires_at"),
        sa.Column("follower_id", sa.UUID()),
        sa.CheckConstraint(
            "state IN ('submitted', 'pending', 'starting', 'healthy', 'unhealthy', 'stopping', "
            "'stopped', 'timeout', 'failed')",
            name=op.f("ck_launches_state"),
        ),
        sa.CheckConstraint(
            "(state IN ('stopped', 'timeout', 'failed')) = (ended_at IS NOT NULL)",
            name=op.f("ck_launches_ended"),
        ),
        sa.CheckConstraint(
            "end_state IN ('stopped', 'timeout', 'failed')", name=op.f("ck_launches_end_state")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_launches")),
    )
    op.create_index("ix_launches_team_id_id", "launches", ["team_id", "id"])
    op.create_index(
        "ix_launches_name_open", "launches", ["name"], unique=True, postgresql_where=_OPEN
    )
    op.create_index(
        "ix_launches_next_check_at", "launches", ["next_check_at"], postgresql_where=_OPEN
    )


def downgrade() -> None:
    schema_changes.refuse_to_forget(
        "SELECT FROM launches WHERE ended_at IS NULL",
        "servers that were launched would run on unmanaged.",
    )
    schema_changes.lock_tables("launches")
    op.drop_table("launches")
