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
    # Since when its text is gone: `content` is empty then.
    time("erased_at"),
    # When the last of its results ended that are deleted: its prompt's time counts from then on.
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
    # The result that this one is a retry of; it may have been deleted since.
    Column("retry_of", UUID),
    # Of an attribution: the result whose text it is about; it may have been deleted since.
    Column("source_id", UUID),
    # The attribution that follows once this one has completed: its id, queue and parameters.
    Column("attribution", JSONB),
    # The context of its request's trace (W3C's `traceparent`); NULL while traces are off.
    Column("trace", Text),
    Column("context_id", UUID, ForeignKey("contexts.id", ondelete="CASCADE"), nullable=False),
    # --- the request ---
    Column("model_name", String, nullable=False),
    Column("model_version", Integer),
    # The rendered chat prompt; NULL where the context's content is the prompt itself.
    Column("prompt", Text),
    Column("parameters", JSONB, nullable=False),
    Column("priority", SmallInteger, nullable=False, server_default="0"),
    # Told when the result is terminal; the delivery itself is a row of webhook_deliveries.
    Column("webhook_url", Text),
    # What becomes of it when its client leaves, or its worker dies: a client of a synchronous
    # dialect cannot take up its stream again.
    Column("on_disconnect", String, nullable=False, server_default="continue"),
    time("deadline_at", nullable=False),
    # As it was asked for, which a retry asks for again; not known of results before 0002.
    Column("deadline_seconds", Float),
    Column("metadata", JSONB, nullable=False, server_default=EMPTY_OBJECT),
    # What a dialect keeps of the request to answer with it later: of a response, what it echoes.
    Column("request", JSONB),
    # Whether its texts outlive their delivery; if not, they are erased by `erasure`.
    Column("store", Boolean, nullable=False, server_default=text("true")),
    # How long it is kept from its end on, where its request says so (`retention`).
    Column("retain_seconds", Float),
    Column("resumable", Boolean, nullable=False, server_default=text("false")),  # `continuation`
    # --- the state: written by job_queue alone ---
    Column("state", String, nullable=False, server_default="pending"),
    # The place in the queue among results of the same priority: virtual time, docs/limits.md.
    Column("fair_key", Float, nullable=False, server_default="0"),
    time("not_before"),
    # No foreign key: the fence must hold even when the workers table was cleaned.
    Column("worker_id", UUID),
    # Raised by every claim: with worker_id it names the one attempt that may write.
    Column("attempt", Integer, nullable=False, server_default="0"),
    # Attempts that Triton took and lost, and those of them in which the engine died.
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
    # Its end and `retain_seconds`; written by its end, where there are any.
    time("expires_at"),
    # --- the answer ---
    Column("output", Text),
    Column("finish_reason", String),
    Column("prompt_tokens", Integer),
    Column("completion_tokens", Integer),
    Column("logprobs", JSONB),
    Column("error_code", String),
    Column("error_message", Text),
    Column("error_retryable", Boolean),
    # Since when prompt, output and the rest of its texts are gone.
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
        # Said so, not by the state: a list by code must have no other partial index to choose.
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
        # No deadline is NULL. Said so, this index is there for questions of deadlines alone: where
        # statistics know of no queue, it would look as good to the others as the queue's own.
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
    # Tokens of the whole text up to the end of this chunk, earlier attempts included.
    Column("prompt_tokens", Integer),
    Column("completion_tokens", Integer),
    # Of the tokens of this chunk, where they were asked for: a JSON list. It is never searched.
    Column("logprobs", Text),
    Column("token_ids", LargeBinary),  # of this chunk, little-endian INT32; NULL if unknown
    postgresql_with=QUEUE,
)

idempotency_keys = Table(
    "idempotency_keys",
    metadata,
    Column("team_id", String, primary_key=True),
    Column("key", String, primary_key=True),
    # SHA-256 of the request in a canonical form: the same key with another request is refused.
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
    # SHA-256 of the ticket: who reads the table cannot use it.
    Column("ticket_hash", LargeBinary, primary_key=True),
    Column("team_id", String, nullable=False),
    Column("result_id", UUID, nullable=False),
    time("expires_at", nullable=False),
    Index("ix_stream_tickets_expires_at", "expires_at"),
)
