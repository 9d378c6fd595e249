"""Webhooks: deliveries and signing secrets."""

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB, UUID

from app.core.storage_parameters import LONG
from app.core.tables.schema import EMPTY_LIST, NOW, index, metadata, time

webhook_deliveries = sa.Table(
    "webhook_deliveries",
    metadata,
    # A result ends once, so it has one delivery; its id also identifies delivery and message. A job has one
    # delivery under its own id, which is due again when the job ends again after a retry.
    # No foreign key, see `delete_rows_of_results`.
    sa.Column("result_id", UUID, primary_key=True),
    sa.Column("is_job", sa.Boolean, nullable=False, server_default=sa.text("false")),
    sa.Column("team_id", sa.String, nullable=False),
    sa.Column("url", sa.Text, nullable=False),
    sa.Column("state", sa.String, nullable=False, server_default="pending"),
    sa.Column("attempts", sa.SmallInteger, nullable=False, server_default="0"),
    # Due time; a claim moves it beyond the time limit of one call.
    time("next_attempt_at", nullable=False, default=NOW),
    time("created_at", nullable=False, default=NOW),
    time("finished_at"),
    # Outcome of each call: [{"at", "status", "error", "seconds"}].
    sa.Column("log", JSONB, nullable=False, server_default=EMPTY_LIST),
    sa.CheckConstraint("state IN ('pending', 'delivered', 'failed')", name="state"),
    sa.CheckConstraint("(state = 'pending') = (finished_at IS NULL)", name="finished"),
    index("team_id", "result_id"),
    index("next_attempt_at", where="state = 'pending'"),
    # Few deliveries are undelivered: lists of them must not scan all others.
    index(
        "team_id",
        "result_id",
        name="ix_webhook_deliveries_team_id_result_id_open",
        where="state <> 'delivered'",
    ),
    postgresql_with=LONG,
)

webhook_secrets = sa.Table(
    "webhook_secrets",
    metadata,
    sa.Column("team_id", sa.String, primary_key=True),
    sa.Column("secret", sa.String, nullable=False),
    # After a rotation, messages are signed with both secrets for a time.
    sa.Column("previous_secret", sa.String),
    time("previous_expires_at"),
    time("rotated_at", nullable=False, default=NOW),
)
