"""The ledger of usage: who used how much, by UTC day. Its rows outlive results, keys and teams."""

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import UUID

from app.core.storage_parameters import COUNTERS, QUEUE
from app.core.tables.schema import NOW, index, metadata, time


def _who() -> list[sa.Column[object]]:
    """Columns that rows are grouped by; no foreign keys."""
    return [
        sa.Column("team_id", sa.String, nullable=False),
        # UTC day of the end.
        sa.Column("day", sa.Date, nullable=False),
        # A JWT's `token_id`, or an API key's prefix; empty where unknown.
        sa.Column("token_id", sa.String, nullable=False),
        sa.Column("model_name", sa.String, nullable=False),
        sa.Column("adapter", sa.String, nullable=False),
        # `completed` or the error code.
        sa.Column("ended_as", sa.String, nullable=False),
    ]


def _sums() -> list[sa.Column[object]]:
    """Whole numbers, so that sums are exact in any order."""
    names = (
        *("results", "prompt_tokens", "cached_prompt_tokens"),
        *("completion_tokens", "reasoning_tokens", "engine_microseconds"),
    )
    return [sa.Column(name, sa.BigInteger, nullable=False) for name in names]


# Appended with the mark that a result was counted; the compaction moves rows to `usage_days`.
usage_entries = sa.Table(
    "usage_entries",
    metadata,
    sa.Column("id", sa.BigInteger, sa.Identity(), primary_key=True),
    *_who(),
    *_sums(),
    postgresql_with=QUEUE,
)

usage_days = sa.Table(
    "usage_days",
    metadata,
    *_who(),
    *_sums(),
    sa.PrimaryKeyConstraint("team_id", "day", "token_id", "model_name", "adapter", "ended_as"),
    index("day"),
    postgresql_with=COUNTERS,
)

# Prices in the currency of the settings, each from a day on.
model_prices = sa.Table(
    "model_prices",
    metadata,
    # `*`: all models without a row of their own on that day.
    sa.Column("model_name", sa.String, primary_key=True),
    sa.Column("since", sa.Date, primary_key=True),
    # For a million tokens.
    sa.Column("prompt", sa.Float, nullable=False),
    sa.Column("completion", sa.Float, nullable=False),
    sa.Column("engine_second", sa.Float, nullable=False),
    sa.CheckConstraint("prompt >= 0 AND completion >= 0 AND engine_second >= 0", name="prices"),
)

# Monthly budgets, and their use as of the last check.
budgets = sa.Table(
    "budgets",
    metadata,
    sa.Column("team_id", sa.String, primary_key=True),
    # Empty: all tokens of the team together.
    sa.Column("token_id", sa.String, primary_key=True),
    # Prompt and completion tokens together; NULL: no bound.
    sa.Column("max_tokens", sa.BigInteger),
    sa.Column("max_cost", sa.Float),
    # Called as the use passes a threshold.
    sa.Column("webhook_url", sa.Text),
    # First day of the month of the use below; NULL: not checked yet.
    sa.Column("month", sa.Date),
    sa.Column("used_tokens", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("used_cost", sa.Float, nullable=False, server_default="0"),
    time("checked_at"),
    sa.CheckConstraint("num_nonnulls(max_tokens, max_cost) > 0", name="bounded"),
    sa.CheckConstraint("max_tokens > 0 AND max_cost > 0", name="positive"),
    postgresql_with=COUNTERS,
)

# Messages about thresholds: one for each of a budget and month.
budget_alerts = sa.Table(
    "budget_alerts",
    metadata,
    # Also identifies the message.
    sa.Column("id", UUID, primary_key=True),
    sa.Column("team_id", sa.String, nullable=False),
    sa.Column("token_id", sa.String, nullable=False),
    sa.Column("month", sa.Date, nullable=False),
    sa.Column("threshold", sa.SmallInteger, nullable=False),
    sa.Column("url", sa.Text, nullable=False),
    # The budget and its use as the threshold was passed.
    sa.Column("max_tokens", sa.BigInteger),
    sa.Column("max_cost", sa.Float),
    sa.Column("used_tokens", sa.BigInteger, nullable=False),
    sa.Column("used_cost", sa.Float, nullable=False),
    sa.Column("state", sa.String, nullable=False, server_default="pending"),
    sa.Column("attempts", sa.SmallInteger, nullable=False, server_default="0"),
    # Due time; a claim moves it beyond the time limit of one call.
    time("next_attempt_at", nullable=False, default=NOW),
    time("created_at", nullable=False, default=NOW),
    # Why the last call failed.
    sa.Column("error", sa.Text),
    sa.CheckConstraint("state IN ('pending', 'delivered', 'failed')", name="state"),
    sa.UniqueConstraint("team_id", "token_id", "month", "threshold"),
    index("next_attempt_at", where="state = 'pending'"),
)
