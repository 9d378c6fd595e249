"""Teams: limits, rates, reuse, retention, search, API keys and revoked tokens."""

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import ARRAY, UUID

from app.core.storage_parameters import COUNTERS
from app.core.tables.schema import NOW, index, metadata, time

team_limits = sa.Table(
    "team_limits",
    metadata,
    sa.Column("team_id", sa.String, primary_key=True),
    # `*`: all models without a row of their own.
    sa.Column("model_name", sa.String, primary_key=True, server_default="*"),
    # NULL: the default applies.
    sa.Column("weight", sa.Float),
    sa.Column("max_queued", sa.Integer),
    sa.Column("max_running", sa.Integer),
    sa.Column("requests_per_minute", sa.Integer),
    sa.Column("tokens_per_minute", sa.Integer),
    sa.Column("reuse", sa.Boolean),
    sa.CheckConstraint("weight > 0", name="weight"),
)

# Retention of teams that differ from the settings.
team_retention = sa.Table(
    "team_retention",
    metadata,
    sa.Column("team_id", sa.String, primary_key=True),
    # Seconds from the end; 0: no limit; NULL: the default of the settings.
    sa.Column("results_seconds", sa.Float),
    sa.Column("prompts_seconds", sa.Float),
    sa.CheckConstraint("results_seconds >= 0 AND prompts_seconds >= 0", name="seconds"),
)

# Search by words of teams that differ from the setting.
team_search = sa.Table(
    "team_search",
    metadata,
    sa.Column("team_id", sa.String, primary_key=True),
    sa.Column("search", sa.String, nullable=False),
    sa.CheckConstraint("search IN ('words', 'off')", name="search"),
)

rate_buckets = sa.Table(
    "rate_buckets",
    metadata,
    sa.Column("team_id", sa.String, primary_key=True),
    sa.Column("model_name", sa.String, primary_key=True),
    sa.Column("name", sa.String, primary_key=True),
    # Tokens left in the bucket at `filled_at`.
    sa.Column("level", sa.Float, nullable=False),
    time("filled_at", nullable=False),
    postgresql_with=COUNTERS,
)

api_keys = sa.Table(
    "api_keys",
    metadata,
    sa.Column("id", UUID, primary_key=True),
    sa.Column("team_id", sa.String, nullable=False),
    sa.Column("name", sa.String, nullable=False, server_default=""),
    # Public prefix of the key, and the SHA-256 of the whole key.
    sa.Column("prefix", sa.String, nullable=False),
    sa.Column("key_hash", sa.LargeBinary, nullable=False),
    sa.Column("scopes", ARRAY(sa.String), nullable=False),
    sa.Column("max_priority", sa.SmallInteger, nullable=False, server_default="0"),
    time("created_at", nullable=False, default=NOW),
    time("expires_at"),
    # Precise to the minute.
    time("last_used_at"),
    time("revoked_at"),
    sa.UniqueConstraint("prefix"),
    sa.CheckConstraint("octet_length(key_hash) = 32", name="whole_hash"),
    sa.CheckConstraint("team_id <> ''", name="team"),
    index("team_id", "id"),
)

revoked_tokens = sa.Table(
    "revoked_tokens",
    metadata,
    # JWTs by their claims. Rows are kept: a token without `exp` never expires.
    sa.Column("team_id", sa.String, primary_key=True),
    sa.Column("token_id", sa.String, primary_key=True),
    time("revoked_at", nullable=False, default=NOW),
)
