"""Results: prompts, their results, and the text of attempts that run."""

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    SmallInteger,
    String,
    Table,
    Text,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB, UUID

from app.core.storage_parameters import LONG, LONG_WITH_TEXTS, QUEUE
from app.core.tables.schema import EMPTY_LIST, EMPTY_OBJECT, metadata, time

contexts = Table(
    "contexts",
    metadata,
    Column("id", UUID, primary_key=True),
    Column("team_id", String, nullable=False, server_default="default"),
    # A prompt is either plain text or a list of chat messages.
    Column("content", Text),
    Column("messages", JSONB),
    Column("metadata", JSONB, nullable=False, server_default=EMPTY_OBJECT),
    # Time of its erasure; `content` is empty since then.
    time("erased_at"),
    # End of the last of its deleted results; its retention counts from then.
    time("unused_since"),
    CheckConstraint("num_nonnulls(content, messages) = 1", name="one_form"),
    Index("ix_contexts_team_id_id", "team_id", "id"),
    Index(
        "ix_contexts_team_id_unused_since",
        "team_id",
        "unused_since",
        postgresql_where=text("unused_since IS NOT NULL"),
    ),
    postgresql_with=LONG_WITH_TEXTS,
)

_UNCLAIMED = text("state = 'pending' AND worker_id IS NULL")

_CLAIMED = text("state = 'pending' AND worker_id IS NOT NULL")

results = Table(
    "results",
    metadata,
    Column("id", UUID, primary_key=True),
    Column("team_id", String, nullable=False, server_default="default"),
    Column("kind", String, nullable=False, server_default="generation"),
    # Results of one request (n choices, k prompts) share a group.
    Column("group_id", UUID),
    # The result that this one retries; it may have been deleted since.
    Column("retry_of", UUID),
    # Source result of an attribution; it may have been deleted since.
    Column("source_id", UUID),
    # The attribution that follows once this one has completed: its id, queue and parameters.
    Column("attribution", JSONB),
    # Trace context of its request (W3C's `traceparent`); NULL while traces are off.
    Column("trace", Text),
    Column("context_id", UUID, ForeignKey("contexts.id", ondelete="CASCADE"), nullable=False),
    # --- the request ---
    Column("model_name", String, nullable=False),
    Column("model_version", Integer),
    # The rendered chat prompt; NULL where the context's content is the prompt itself.
    Column("prompt", Text),
    Column("parameters", JSONB, nullable=False),
    Column("priority", SmallInteger, nullable=False, server_default="0"),
    # Called when the result is terminal; the delivery is a row of webhook_deliveries.
    Column("webhook_url", Text),
    # Whether a disconnect of the client, or a lost worker, ends it: a client of a synchronous
    # dialect cannot resume its stream.
    Column("on_disconnect", String, nullable=False, server_default="continue"),
    time("deadline_at", nullable=False),
    # As requested, for retries; NULL for results older than migration 0002.
    Column("deadline_seconds", Float),
    Column("metadata", JSONB, nullable=False, server_default=EMPTY_OBJECT),
    # Members of the request that a dialect returns with the result.
    Column("request", JSONB),
    # False: its texts are erased after their delivery.
    Column("store", Boolean, nullable=False, server_default=text("true")),
    # Retention from its end that its request set.
    Column("retain_seconds", Float),
    Column("resumable", Boolean, nullable=False, server_default=text("false")),  # `continuation`
    # --- the state: written by app/queue alone ---
    Column("state", String, nullable=False, server_default="pending"),
    # Virtual time: the order in the queue among results of one priority (docs/limits.md).
    Column("fair_key", Float, nullable=False, server_default="0"),
    time("not_before"),
    # No foreign key: the fence holds even after the workers table was cleaned.
    Column("worker_id", UUID),
    # Each claim increments it: with worker_id it identifies the one attempt that may write.
    Column("attempt", Integer, nullable=False, server_default="0"),
    # Attempts that Triton accepted and lost, and those of them in which the engine died.
    Column("lost_attempts", SmallInteger, nullable=False, server_default="0"),
    Column("engine_deaths", SmallInteger, nullable=False, server_default="0"),
    Column("attempt_history", JSONB, nullable=False, server_default=EMPTY_LIST),
    Column("text_attempt", Integer),  # first attempt of the present text; NULL: the present one
    Column("continuations", SmallInteger, nullable=False, server_default="0"),  # of that text
    time("cancel_requested_at"),
    # Set by a claim, cleared by a release: pending with started_at is running, without is queued.
    time("started_at"),
    time("first_token_at"),
    time("finished_at"),
    # End plus retain_seconds; set at its end.
    time("expires_at"),
    # --- the output ---
    Column("output", Text),
    Column("finish_reason", String),
    Column("prompt_tokens", Integer),
    Column("completion_tokens", Integer),
    Column("logprobs", JSONB),
    Column("error_code", String),
    Column("error_message", Text),
    Column("error_retryable", Boolean),
    # Time at which prompt, output and its other texts were erased.
    time("erased_at"),
    CheckConstraint("state IN ('pending', 'completed', 'failed')", name="state"),
    CheckConstraint("kind IN ('generation', 'attribution')", name="kind"),
    CheckConstraint("on_disconnect IN ('continue', 'cancel')", name="on_disconnect"),
    CheckConstraint("(state = 'pending') = (finished_at IS NULL)", name="finished"),
    CheckConstraint("(state = 'failed') = (error_code IS NOT NULL)", name="failed_has_error"),
    CheckConstraint(
        "num_nonnulls(error_code, error_message, error_retryable) IN (0, 3)", name="whole_error"
    ),
    CheckConstraint(
        "state <> 'completed' OR output IS NOT NULL OR erased_at IS NOT NULL",
        name="completed_has_output",
    ),
    CheckConstraint("erased_at IS NULL OR state <> 'pending'", name="erased_at_end"),
    CheckConstraint("jsonb_typeof(parameters) = 'object'", name="parameters_object"),
    # Lists, newest first, by each filter.
    Index("ix_results_team_id_id", "team_id", "id"),
    Index("ix_results_team_id_model_name_id", "team_id", "model_name", "id"),
    Index("ix_results_context_id_id", "context_id", "id"),
    Index("ix_results_group_id", "group_id", postgresql_where=text("group_id IS NOT NULL")),
    Index(
        "ix_results_source_id_id", "source_id", "id", postgresql_where=text("source_id IS NOT NULL")
    ),
    Index(
        "ix_results_team_id_id_pending", "team_id", "id", postgresql_where=text("state = 'pending'")
    ),
    Index(
        "ix_results_team_id_id_failed", "team_id", "id", postgresql_where=text("state = 'failed'")
    ),
    Index(
        "ix_results_team_id_error_code_id",
        "team_id",
        "error_code",
        "id",
        # By error_code, not by state: a list by code must match no other partial index.
        postgresql_where=text("error_code IS NOT NULL"),
    ),
    # The queue: claims read only unclaimed rows, rescues only claimed ones.
    Index(
        "ix_results_queue",
        "model_name",
        text("priority DESC"),
        "fair_key",
        "id",
        postgresql_where=_UNCLAIMED,
    ),
    Index(
        "ix_results_queue_team",
        "model_name",
        "team_id",
        text("priority DESC"),
        "fair_key",
        "id",
        postgresql_where=_UNCLAIMED,
    ),
    Index(
        "ix_results_unclaimed_deadline_at",
        "deadline_at",
        # No deadline is NULL. The condition reserves this index for queries by deadline: with
        # statistics of an empty queue it would look as cheap to other queries as the queue's own.
        postgresql_where=text(f"{_UNCLAIMED.text} AND deadline_at IS NOT NULL"),
    ),
    Index("ix_results_worker_id", "worker_id", postgresql_where=_CLAIMED),
    Index(
        "ix_results_suspects",
        "model_name",
        "id",
        postgresql_where=text("state = 'pending' AND engine_deaths >= 2"),
    ),
    Index(
        "ix_results_finished_at_to_erase",
        "finished_at",
        postgresql_where=text("NOT store AND erased_at IS NULL AND finished_at IS NOT NULL"),
    ),
    Index("ix_results_expires_at", "expires_at", postgresql_where=text("expires_at IS NOT NULL")),
    postgresql_with=LONG_WITH_TEXTS,
)

result_chunks = Table(
    "result_chunks",
    metadata,
    # No foreign key: checking it would lock the result's row at each flush; `finish` and deletes
    # remove the chunks in the statement that ends the result.
    Column("result_id", UUID, primary_key=True),
    Column("attempt", Integer, primary_key=True),
    Column("offset", BigInteger, primary_key=True),  # code points of the output before this chunk
    Column("text", Text, nullable=False),
    # Tokens of the whole text up to the end of this chunk, including earlier attempts.
    Column("prompt_tokens", Integer),
    Column("completion_tokens", Integer),
    # Log probabilities of the tokens of this chunk if requested: a JSON list, never searched.
    Column("logprobs", Text),
    Column("token_ids", LargeBinary),  # of this chunk, little-endian INT32; NULL if unknown
    postgresql_with=QUEUE,
)

idempotency_keys = Table(
    "idempotency_keys",
    metadata,
    Column("team_id", String, primary_key=True),
    Column("key", String, primary_key=True),
    # SHA-256 of the canonical request: the same key with another request is refused.
    Column("request_hash", LargeBinary, nullable=False),
    Column("result_id", UUID, ForeignKey("results.id", ondelete="CASCADE"), nullable=False),
    time("expires_at", nullable=False),
    Index("ix_idempotency_keys_result_id", "result_id"),
    Index("ix_idempotency_keys_expires_at", "expires_at"),
    postgresql_with=LONG,
)

stream_tickets = Table(
    "stream_tickets",
    metadata,
    # SHA-256 of the ticket: a reader of the table cannot use it.
    Column("ticket_hash", LargeBinary, primary_key=True),
    Column("team_id", String, nullable=False),
    Column("result_id", UUID, nullable=False),
    time("expires_at", nullable=False),
    Index("ix_stream_tickets_expires_at", "expires_at"),
)
