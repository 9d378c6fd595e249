"""usage: a ledger of tokens and engine time by team, token, model and day

Columns with constant defaults, and new tables: no row is written. Workers add the results that exist in
the background, by another walk over them.

Revision: 0019
Revises: 0018
"""

from typing import Any

import sqlalchemy as sa
from alembic import op

from app.core import schema_changes

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None

_KEYS = ("team_id", "day", "token_id", "model_name", "adapter", "ended_as")
_SUMS = (
    "results",
    "prompt_tokens",
    "cached_prompt_tokens",
    "completion_tokens",
    "reasoning_tokens",
    "engine_microseconds",
)


def _columns() -> list[sa.Column[Any]]:
    return [
        *(_column(name, sa.Date() if name == "day" else sa.String()) for name in _KEYS),
        *(_column(name, sa.BigInteger()) for name in _SUMS),
    ]


def _column(name: str, kind: sa.types.TypeEngine[Any]) -> sa.Column[Any]:
    return sa.Column(name, kind, nullable=False)


def upgrade() -> None:
    schema_changes.lock_tables("batches", "results", "result_search")
    for table in ("batches", "results"):
        schema_changes.add_column(table, sa.Column("token_id", sa.String(), nullable=True))
    schema_changes.add_column(
        "result_search",
        sa.Column("in_usage", sa.Boolean(), server_default=sa.false(), nullable=False),
    )
    op.create_table(
        "usage_entries",
        sa.Column("id", sa.BigInteger(), sa.Identity(), nullable=False),
        *_columns(),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_usage_entries")),
        postgresql_with={
            "autovacuum_vacuum_scale_factor": "0",
            "autovacuum_vacuum_threshold": "1000",
            "autovacuum_vacuum_cost_delay": "0",
            "vacuum_truncate": "false",
        },
    )
    op.create_table(
        "usage_days",
        *_columns(),
        sa.PrimaryKeyConstraint(*_KEYS, name=op.f("pk_usage_days")),
        postgresql_with={"fillfactor": "70"},
    )
    op.create_index("ix_usage_days_day", "usage_days", ["day"])
    op.execute(
        "UPDATE digest_state SET passes_left = 2, resumes_at = now(), "
        "digested_from = 'ffffffff-ffff-ffff-ffff-ffffffffffff'"
    )


def downgrade() -> None:
    schema_changes.refuse_to_forget(
        "SELECT FROM usage_days UNION ALL SELECT FROM usage_entries",
        "the usage of teams would be deleted, also that of results which exist no longer.",
    )
    schema_changes.lock_tables("batches", "results", "result_search")
    op.drop_table("usage_days")
    op.drop_table("usage_entries")
    op.drop_column("result_search", "in_usage")
    op.drop_column("results", "token_id")
    op.drop_column("batches", "token_id")
