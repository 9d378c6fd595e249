"""history: words of results to search by, totals by the minute, samples of the queues

Only new tables: workers index existing results in the background.

Revision: 0011
Revises: 0010
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

from app.core import schema_changes

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

_HIGHEST = "ffffffff-ffff-ffff-ffff-ffffffffffff"


def _time(name: str, *, now: bool = False, nullable: bool = False) -> sa.Column[object]:
    return sa.Column(
        name,
        sa.DateTime(timezone=True),
        server_default=sa.text("now()") if now else None,
        nullable=nullable,
    )


def _counts(name: str) -> sa.Column[object]:
    return sa.Column(name, postgresql.ARRAY(sa.Integer()), nullable=False)


def upgrade() -> None:
    # A foreign key needs the table that it refers to, for a moment.
    schema_changes.lock_tables("results")
    op.create_table(
        "result_search",
        sa.Column("result_id", sa.UUID(), nullable=False),
        sa.Column("team_id", sa.String(), nullable=False),
        sa.Column("words", postgresql.TSVECTOR()),
        sa.ForeignKeyConstraint(
            ["result_id"],
            ["results.id"],
            name=op.f("fk_result_search_result_id"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("result_id", name=op.f("pk_result_search")),
    )
    op.create_index("ix_result_search_words", "result_search", ["words"], postgresql_using="gin")
    # In kB. The latest entries wait in a list that each search reads through.
    op.execute("ALTER INDEX ix_result_search_words SET (gin_pending_list_limit = 1024)")
    op.create_table(
        "undigested_results",
        sa.Column("place", sa.BigInteger(), sa.Identity(), nullable=False),
        sa.Column("result_id", sa.UUID(), nullable=False),
        sa.PrimaryKeyConstraint("place", name=op.f("pk_undigested_results")),
    )
    op.create_table(
        "minute_stats",
        sa.Column("team_id", sa.String(), nullable=False),
        _time("minute"),
        sa.Column("model_name", sa.String(), nullable=False),
        sa.Column("ended_as", sa.String(), nullable=False),
        sa.Column("results", sa.Integer(), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("completion_tokens", sa.BigInteger(), nullable=False),
        *(_counts(name) for name in ("queue_seconds", "first_token_seconds", "seconds")),
        sa.PrimaryKeyConstraint(
            "team_id", "minute", "model_name", "ended_as", name=op.f("pk_minute_stats")
        ),
    )
    op.create_index("ix_minute_stats_minute", "minute_stats", ["minute"])
    op.create_table(
        "queue_samples",
        _time("minute"),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("queued", sa.Integer(), nullable=False),
        sa.Column("running", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("minute", "name", name=op.f("pk_queue_samples")),
    )
    op.create_table(
        "digest_state",
        sa.Column("id", sa.SmallInteger(), autoincrement=False, nullable=False),
        sa.Column("passes_left", sa.SmallInteger(), server_default="2", nullable=False),
        sa.Column("digested_from", sa.UUID(), server_default=_HIGHEST, nullable=False),
        _time("resumes_at", now=True),
        _time("sampled_minute", nullable=True),
        sa.CheckConstraint("id = 1", name=op.f("ck_digest_state_one")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_digest_state")),
    )
    op.execute("INSERT INTO digest_state (id) VALUES (1)")


def downgrade() -> None:
    schema_changes.lock_tables("results", "result_search", "undigested_results")
    for table in (
        "digest_state",
        "queue_samples",
        "minute_stats",
        "undigested_results",
        "result_search",
    ):
        op.drop_table(table)
