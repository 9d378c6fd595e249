"""prices of tokens and engine time, and monthly budgets of teams and tokens

Only new tables.

Revision: 0024
Revises: 0023
"""

import sqlalchemy as sa
from alembic import op

from app.core import schema_changes

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None


def _use(default: str | None) -> tuple[sa.Column[int], sa.Column[float]]:
    return (
        sa.Column("used_tokens", sa.BigInteger(), server_default=default, nullable=False),
        sa.Column("used_cost", sa.Float(), server_default=default, nullable=False),
    )


def _time(name: str, default: sa.TextClause | None = None) -> sa.Column[object]:
    kind = sa.DateTime(timezone=True)
    return sa.Column(name, kind, server_default=default, nullable=default is None)


def upgrade() -> None:
    op.create_table(
        "model_prices",
        sa.Column("model_name", sa.String(), nullable=False),
        sa.Column("since", sa.Date(), nullable=False),
        *(
            sa.Column(name, sa.Float(), nullable=False)
            for name in ("prompt", "completion", "engine_second")
        ),
        sa.CheckConstraint(
            "prompt >= 0 AND completion >= 0 AND engine_second >= 0",
            name=op.f("ck_model_prices_prices"),
        ),
        sa.PrimaryKeyConstraint("model_name", "since", name=op.f("pk_model_prices")),
    )
    _create_budgets()


def _create_budgets() -> None:
    op.create_table(
        "budgets",
        sa.Column("team_id", sa.String(), nullable=False),
        sa.Column("token_id", sa.String(), nullable=False),
        sa.Column("max_tokens", sa.BigInteger(), nullable=True),
        sa.Column("max_cost", sa.Float(), nullable=True),
        sa.Column("webhook_url", sa.Text(), nullable=True),
        sa.Column("month", sa.Date(), nullable=True),
        *_use("0"),
        _time("checked_at"),
        sa.CheckConstraint(
            "num_nonnulls(max_tokens, max_cost) > 0", name=op.f("ck_budgets_bounded")
        ),
        sa.CheckConstraint("max_tokens > 0 AND max_cost > 0", name=op.f("ck_budgets_positive")),
        sa.PrimaryKeyConstraint("team_id", "token_id", name=op.f("pk_budgets")),
        postgresql_with={"fillfactor": "70"},
    )
    op.create_table(
        "budget_alerts",
        sa.Column("id", sa.UUID(), nullable=False),
        sa.Column("team_id", sa.String(), nullable=False),
        sa.Column("token_id", sa.String(), nullable=False),
        sa.Column("month", sa.Date(), nullable=False),
        sa.Column("threshold", sa.SmallInteger(), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("max_tokens", sa.BigInteger(), nullable=True),
        sa.Column("max_cost", sa.Float(), nullable=True),
        *_use(None),
        sa.Column("state", sa.String(), server_default="pending", nullable=False),
        sa.Column("attempts", sa.SmallInteger(), server_default="0", nullable=False),
        _time("next_attempt_at", sa.text("now()")),
        _time("created_at", sa.text("now()")),
        sa.Column("error", sa.Text(), nullable=True),
        sa.CheckConstraint(
            "state IN ('pending', 'delivered', 'failed')", name=op.f("ck_budget_alerts_state")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_budget_alerts")),
        sa.UniqueConstraint(
            "team_id",
            "token_id",
            "month",
            "threshold",
            name=op.f("uq_budget_alerts_team_id_token_id_month_threshold"),
        ),
    )
    op.create_index(
        "ix_budget_alerts_next_attempt_at",
        "budget_alerts",
        ["next_attempt_at"],
        postgresql_where=sa.text("state = 'pending'"),
    )


def downgrade() -> None:
    schema_changes.refuse_to_forget(
        "SELECT FROM budgets UNION ALL SELECT FROM model_prices",
        "budgets would no longer be enforced, and prices would be deleted.",
    )
    op.drop_table("budget_alerts")
    op.drop_table("budgets")
    op.drop_table("model_prices")
