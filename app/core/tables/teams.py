"""Teams: limits, rates, retention, API keys and revoked tokens."""

from sqlalchemy import (
    CheckConstraint,
    Column,
    DateTime,
    Float,
    Index,
    Integer,
    LargeBinary,
    SmallInteger,
    String,
    Table,
    UniqueConstraint,
)
from sqlalchemy.dialects.postgresql import ARRAY, UUID

from app.core.storage_parameters import COUNTERS
from app.core.tables.schema import NOW, metadata, time

team_limits = Table(
    "team_limits",
    metadata,
    Column("team_id", String, primary_key=True),
    # `*`: all models without a row of their own.
    Column("model_name", String, primary_key=True, server_default="*"),
    # NULL: the default applies.
    Column("weight", Float),
    Column("max_queued", Integer),
    Column("max_running", Integer),
    Column("requests_per_minute", Integer),
    Column("tokens_per_minute", Integer),
    CheckConstraint("weight > 0", name="weight"),
)

# Retention of teams that differ from the settings.
team_retention = Table(
    "team_retention",
    metadata,
    Column("team_id", String, primary_key=True),
    # Seconds from the end; 0: no limit; NULL: the default of the settings.
    Column("results_seconds", Float),
    Column("prompts_seconds", Float),
    CheckConstraint("results_seconds >= 0 AND prompts_seconds >= 0", name="seconds"),
)

rate_buckets = Table(
    "rate_buckets",
    metadata,
    Column("team_id", String, primary_key=True),
    Column("model_name", String, primary_key=True),
    Column("name", String, primary_key=True),
    # Tokens left in the bucket at `filled_at`.
    Column("level", Float, nullable=False),
    time("filled_at", nullable=False),
    postgresql_with=COUNTERS,
)

api_keys = Table(
    "api_keys",
    metadata,
    Column("id", UUID, primary_key=True),
    Column("team_id", String, nullable=False),
    Column("name", String, nullable=False, server_default=""),
    # Public prefix of the key, and the SHA-256 of the whole key.
    Column("prefix", String, nullable=False),
    Column("key_hash", LargeBinary, nullable=False),
    Column("scopes", ARRAY(String), nullable=False),
    Column("max_priority", SmallInteger, nullable=False, server_default="0"),
    Column("created_at", DateTime(timezone=True), nullable=False, server_default=NOW),
    time("expires_at"),
    # Precise to the minute.
    time("last_used_at"),
    time("revoked_at"),
    UniqueConstraint("prefix"),
    CheckConstraint("octet_length(key_hash) = 32", name="whole_hash"),
    CheckConstraint("team_id <> ''", name="team"),
    Index("ix_api_keys_team_id_id", "team_id", "id"),
)

revoked_tokens = Table(
    "revoked_tokens",
    metadata,
    # JWTs by their claims. Rows are kept: a token without `exp` never expires.
    Column("team_id", String, primary_key=True),
    Column("token_id", String, primary_key=True),
    Column("revoked_at", DateTime(timezone=True), nullable=False, server_default=NOW),
)
