"""Webhooks: deliveries and signing secrets."""

from sqlalchemy import (
    CheckConstraint,
    Column,
    DateTime,
    ForeignKey,
    Index,
    SmallInteger,
    String,
    Table,
    Text,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB, UUID

from app.core.storage_parameters import LONG
from app.core.tables.schema import EMPTY_LIST, NOW, metadata, time

webhook_deliveries = Table(
    "webhook_deliveries",
    metadata,
    # A result ends once, so it has one delivery; its id also identifies delivery and message.
    Column("result_id", UUID, ForeignKey("results.id", ondelete="CASCADE"), primary_key=True),
    Column("team_id", String, nullable=False),
    Column("url", Text, nullable=False),
    Column("state", String, nullable=False, server_default="pending"),
    Column("attempts", SmallInteger, nullable=False, server_default="0"),
    # Due time; a claim moves it beyond the time limit of one call.
    Column("next_attempt_at", DateTime(timezone=True), nullable=False, server_default=NOW),
    Column("created_at", DateTime(timezone=True), nullable=False, server_default=NOW),
    time("finished_at"),
    # Outcome of each call: [{"at", "status", "error", "seconds"}].
    Column("log", JSONB, nullable=False, server_default=EMPTY_LIST),
    CheckConstraint("state IN ('pending', 'delivered', 'failed')", name="state"),
    CheckConstraint("(state = 'pending') = (finished_at IS NULL)", name="finished"),
    Index("ix_webhook_deliveries_team_id_result_id", "team_id", "result_id"),
    Index(
        "ix_webhook_deliveries_next_attempt_at",
        "next_attempt_at",
        postgresql_where=text("state = 'pending'"),
    ),
    # Few deliveries are undelivered: lists of them must not scan all others.
    Index(
        "ix_webhook_deliveries_team_id_result_id_open",
        "team_id",
        "result_id",
        postgresql_where=text("state <> 'delivered'"),
    ),
    postgresql_with=LONG,
)

webhook_secrets = Table(
    "webhook_secrets",
    metadata,
    Column("team_id", String, primary_key=True),
    Column("secret", String, nullable=False),
    # After a rotation, messages are signed with both secrets for a time.
    Column("previous_secret", String),
    time("previous_expires_at"),
    Column("rotated_at", DateTime(timezone=True), nullable=False, server_default=NOW),
)
