"""The schema: SQLAlchemy metadata that Alembic compares with the database.

Queries are written in SQL where they are used (`job_queue`, `contexts`, ...); this file is what
they may rely on. Creation times have no column: they are inside the UUIDv7 ids.
"""

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    DateTime,
    Float,
    ForeignKey,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    String,
    Table,
    Text,
    UniqueConstraint,
    text,
)  # fmt: skip
from sqlalchemy.dialects.postgresql import ARRAY, JSONB, TSVECTOR, UUID

from app.core.storage_parameters import COUNTERS, LONG, LONG_WITH_TEXTS, QUEUE

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "pk": "pk_%(table_name)s",
    }
)

_NOW = text("now()")
_EMPTY_OBJECT = text("'{}'::jsonb")
_EMPTY_LIST = text("'[]'::jsonb")


def _time(name: str, *, nullable: bool = True) -> Column[object]:
    return Column(name, DateTime(timezone=True), nullable=nullable)


contexts = Table(
    "contexts",
    metadata,
    Column("id", UUID, primary_key=True),
    Column("team_id", String, nullable=False, server_default="default"),
    # A prompt is either plain text or a list of chat messages.
    Column("content", Text),
    Column("messages", JSONB),
    Column("metadata", JSONB, nullable=False, server_default=_EMPTY_OBJECT),
    # Since when its text is gone: `content` is empty then.
    _time("erased_at"),
    # When the last of its results ended that are deleted: its prompt's time counts from then on.
    _time("unused_since"),
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
    _time("deadline_at", nullable=False),
    # As it was asked for, which a retry asks for again; not known of results before 0002.
    Column("deadline_seconds", Float),
    Column("metadata", JSONB, nullable=False, server_default=_EMPTY_OBJECT),
    # What a dialect keeps of the request to answer with it later: of a response, what it echoes.
    Column("request", JSONB),
    # Whether its texts outlive their delivery; if not, they are erased by `erasure`.
    Column("store", Boolean, nullable=False, server_default=text("true")),
    # How long it is kept from its end on, where its request says so (`retention`).
    Column("retain_seconds", Float),
    Column("resumable", Boolean, nullable=False, server_default=text("false")),  # `continuation`
    # --- the state: written by the queue alone ---
    Column("state", String, nullable=False, server_default="pending"),
    # The place in the queue among results of the same priority: virtual time, docs/limits.md.
    Column("fair_key", Float, nullable=False, server_default="0"),
    _time("not_before"),
    # No foreign key: the fence must hold even when the workers table was cleaned.
    Column("worker_id", UUID),
    # Raised by every claim: with worker_id it names the one attempt that may write.
    Column("attempt", Integer, nullable=False, server_default="0"),
    # Attempts that Triton took and lost, and those of them in which the engine died.
    Column("lost_attempts", SmallInteger, nullable=False, server_default="0"),
    Column("engine_deaths", SmallInteger, nullable=False, server_default="0"),
    Column("attempt_history", JSONB, nullable=False, server_default=_EMPTY_LIST),
    Column("text_attempt", Integer),  # first attempt of the present text; NULL: the present one
    Column("continuations", SmallInteger, nullable=False, server_default="0"),  # of that text
    _time("cancel_requested_at"),
    # Set by a claim, cleared by a release: pending with started_at is running, without is queued.
    _time("started_at"),
    _time("first_token_at"),
    _time("finished_at"),
    # Its end and `retain_seconds`; written by its end, where there are any.
    _time("expires_at"),
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
    _time("erased_at"),
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

# A result that ended, until `digest` has counted it: one row, put in by the statement that ends it.
undigested_results = Table(
    "undigested_results",
    metadata,
    # In the order of ends, so that who takes them begins where it was, behind what is gone.
    Column("place", BigInteger, Identity(), primary_key=True),
    # No foreign key: what was deleted before it was digested is passed over.
    Column("result_id", UUID, nullable=False),
    postgresql_with=QUEUE,
)

# Each result that is digested has one row: the mark that it was counted.
result_search = Table(
    "result_search",
    metadata,
    Column("result_id", UUID, ForeignKey("results.id", ondelete="CASCADE"), primary_key=True),
    Column("team_id", String, nullable=False),
    # Of prompt, output and error, and one that no text has: the team's. NULL: nothing to be found by.
    Column("words", TSVECTOR),
    Index(
        "ix_result_search_words",
        "words",
        postgresql_using="gin",
        # In kB. What was inserted last waits in a list that each search reads through.
        postgresql_with={"gin_pending_list_limit": 1024},
    ),
    postgresql_with=LONG,
)

# No foreign keys: what was stays, whatever is deleted.
minute_stats = Table(
    "minute_stats",
    metadata,
    Column("team_id", String, primary_key=True),
    # When they ended.
    Column("minute", DateTime(timezone=True), primary_key=True),
    Column("model_name", String, primary_key=True),
    # `completed`, or the code of the error.
    Column("ended_as", String, primary_key=True),
    Column("results", Integer, nullable=False),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("completion_tokens", BigInteger, nullable=False),
    # Results by how long it took, in the buckets of `histogram`.
    Column("queue_seconds", ARRAY(Integer), nullable=False),
    Column("first_token_seconds", ARRAY(Integer), nullable=False),
    Column("seconds", ARRAY(Integer), nullable=False),
    Index("ix_minute_stats_minute", "minute"),
    postgresql_with=COUNTERS,
)

queue_samples = Table(
    "queue_samples",
    metadata,
    Column("minute", DateTime(timezone=True), primary_key=True),
    Column("name", String, primary_key=True),
    Column("queued", Integer, nullable=False),
    Column("running", Integer, nullable=False),
)

# One row: how far the digest of results that were there before it has come, and the last sample.
digest_state = Table(
    "digest_state",
    metadata,
    Column("id", SmallInteger, primary_key=True, autoincrement=False),
    Column("passes_left", SmallInteger, nullable=False, server_default="2"),
    # Results from this id on were looked at in this pass.
    Column(
        "digested_from", UUID, nullable=False, server_default="ffffffff-ffff-ffff-ffff-ffffffffffff"
    ),
    Column("resumes_at", DateTime(timezone=True), nullable=False, server_default=_NOW),
    _time("sampled_minute"),
    CheckConstraint("id = 1", name="one"),
)

idempotency_keys = Table(
    "idempotency_keys",
    metadata,
    Column("team_id", String, primary_key=True),
    Column("key", String, primary_key=True),
    # SHA-256 of the request in a canonical form: the same key with another request is refused.
    Column("request_hash", LargeBinary, nullable=False),
    Column("result_id", UUID, ForeignKey("results.id", ondelete="CASCADE"), nullable=False),
    _time("expires_at", nullable=False),
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
    _time("expires_at", nullable=False),
    Index("ix_stream_tickets_expires_at", "expires_at"),
)

webhook_deliveries = Table(
    "webhook_deliveries",
    metadata,
    # A result ends once, so it has one delivery: its id is the delivery's and the message's.
    Column("result_id", UUID, ForeignKey("results.id", ondelete="CASCADE"), primary_key=True),
    Column("team_id", String, nullable=False),
    Column("url", Text, nullable=False),
    Column("state", String, nullable=False, server_default="pending"),
    Column("attempts", SmallInteger, nullable=False, server_default="0"),
    # When it is due; a worker that takes it moves this beyond the time that a call may take.
    Column("next_attempt_at", DateTime(timezone=True), nullable=False, server_default=_NOW),
    Column("created_at", DateTime(timezone=True), nullable=False, server_default=_NOW),
    _time("finished_at"),
    # What became of each call: [{"at", "status", "error", "seconds"}].
    Column("log", JSONB, nullable=False, server_default=_EMPTY_LIST),
    CheckConstraint("state IN ('pending', 'delivered', 'failed')", name="state"),
    CheckConstraint("(state = 'pending') = (finished_at IS NULL)", name="finished"),
    Index("ix_webhook_deliveries_team_id_result_id", "team_id", "result_id"),
    Index(
        "ix_webhook_deliveries_next_attempt_at",
        "next_attempt_at",
        postgresql_where=text("state = 'pending'"),
    ),
    # What is not delivered is little: lists of it must not walk through all that was.
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
    # After a rotation messages are signed with both for a while.
    Column("previous_secret", String),
    _time("previous_expires_at"),
    Column("rotated_at", DateTime(timezone=True), nullable=False, server_default=_NOW),
)

team_limits = Table(
    "team_limits",
    metadata,
    Column("team_id", String, primary_key=True),
    # `*`: each model that has no row of its own.
    Column("model_name", String, primary_key=True, server_default="*"),
    # Of what is NULL the default holds.
    Column("weight", Float),
    Column("max_queued", Integer),
    Column("max_running", Integer),
    Column("requests_per_minute", Integer),
    Column("tokens_per_minute", Integer),
    CheckConstraint("weight > 0", name="weight"),
)

# How long what is done is kept, where a team has its own word on it (`retention`).
team_retention = Table(
    "team_retention",
    metadata,
    Column("team_id", String, primary_key=True),
    # Seconds from the end; 0: for ever; NULL: as the settings say.
    Column("results_seconds", Float),
    Column("prompts_seconds", Float),
    CheckConstraint("results_seconds >= 0 AND prompts_seconds >= 0", name="seconds"),
)

# One row: the time that retention goes by, and when it last looked.
retention_state = Table(
    "retention_state",
    metadata,
    Column("id", SmallInteger, primary_key=True, autoincrement=False),
    _time("looked_at"),
    # It follows the database's clock, but never jumps ahead with it.
    _time("trusted_at"),
    _time("cleaned_at"),
    # Rows of `result_search` that went since its index was built: their words are in there still.
    Column("words_gone", BigInteger, nullable=False, server_default="0"),
    CheckConstraint("id = 1", name="one"),
)

# How far the prompts of a team's results were judged: those of smaller ids are done with.
retention_marks = Table(
    "retention_marks",
    metadata,
    Column("team_id", String, primary_key=True),
    Column("prompts_to", UUID, nullable=False),
)

rate_buckets = Table(
    "rate_buckets",
    metadata,
    Column("team_id", String, primary_key=True),
    Column("model_name", String, primary_key=True),
    Column("name", String, primary_key=True),
    # What may still be used, as it was at `filled_at`.
    Column("level", Float, nullable=False),
    _time("filled_at", nullable=False),
    postgresql_with=COUNTERS,
)

api_keys = Table(
    "api_keys",
    metadata,
    Column("id", UUID, primary_key=True),
    Column("team_id", String, nullable=False),
    Column("name", String, nullable=False, server_default=""),
    # The part of the key that names it, and the SHA-256 of all of it.
    Column("prefix", String, nullable=False),
    Column("key_hash", LargeBinary, nullable=False),
    Column("scopes", ARRAY(String), nullable=False),
    Column("max_priority", SmallInteger, nullable=False, server_default="0"),
    Column("created_at", DateTime(timezone=True), nullable=False, server_default=_NOW),
    _time("expires_at"),
    # To the minute.
    _time("last_used_at"),
    _time("revoked_at"),
    UniqueConstraint("prefix"),
    CheckConstraint("octet_length(key_hash) = 32", name="whole_hash"),
    CheckConstraint("team_id <> ''", name="team"),
    Index("ix_api_keys_team_id_id", "team_id", "id"),
)

revoked_tokens = Table(
    "revoked_tokens",
    metadata,
    # Of JWTs, by their claims. Kept for good: a token without `exp` never ends by itself.
    Column("team_id", String, primary_key=True),
    Column("token_id", String, primary_key=True),
    Column("revoked_at", DateTime(timezone=True), nullable=False, server_default=_NOW),
)

workers = Table(
    "workers",
    metadata,
    Column("id", UUID, primary_key=True),
    Column("host", String, nullable=False),
    Column("pid", Integer, nullable=False),
    Column("started_at", DateTime(timezone=True), nullable=False, server_default=_NOW),
    _time("lease_expires_at", nullable=False),
    # A dead row never renews: a worker that finds itself dead comes back under a new id.
    _time("dead_at"),
    # By model: {"running": results, "tokens_per_second": rate, "results_per_second": rate, "dead":
    # {server: {"since": time, "reason": text}}}; renewed with the lease.
    Column("load", JSONB, nullable=False, server_default=_EMPTY_OBJECT),
    Column("servers", JSONB, nullable=False, server_default=_EMPTY_OBJECT),  # results by server
    Index("ix_workers_alive", "lease_expires_at", postgresql_where=text("dead_at IS NULL")),
)

files = Table(
    "files",
    metadata,
    Column("id", UUID, primary_key=True),
    Column("team_id", String, nullable=False),
    Column("purpose", String, nullable=False),
    Column("filename", Text, nullable=False),
    # Set with the last part: until then nobody sees the file.
    Column("size", BigInteger),
    _time("expires_at"),
    Index("ix_files_team_id_id", "team_id", "id", postgresql_where=text("size IS NOT NULL")),
    Index("ix_files_expires_at", "expires_at", postgresql_where=text("expires_at IS NOT NULL")),
    Index("ix_files_unfinished", "id", postgresql_where=text("size IS NULL")),
)

file_parts = Table(
    "file_parts",
    metadata,
    Column("file_id", UUID, ForeignKey("files.id", ondelete="CASCADE"), primary_key=True),
    Column("place", Integer, primary_key=True),
    Column("content", LargeBinary, nullable=False),
)

_ACTIVE = text("state IN ('validating', 'in_progress', 'cancelling', 'finalizing')")

batches = Table(
    "batches",
    metadata,
    Column("id", UUID, primary_key=True),
    Column("team_id", String, nullable=False),
    Column("endpoint", String, nullable=False),
    # No foreign keys: a batch tells its files even when they are deleted.
    Column("input_file_id", UUID, nullable=False),
    Column("output_file_id", UUID),
    Column("error_file_id", UUID),
    Column("completion_window", String, nullable=False),
    Column("metadata", JSONB, nullable=False, server_default=_EMPTY_OBJECT),
    Column("state", String, nullable=False, server_default="validating"),
    # What is wrong with the input file: [{"code", "line", "message", "param"}].
    Column("errors", JSONB, nullable=False, server_default=_EMPTY_LIST),
    Column("total", Integer, nullable=False, server_default="0"),
    Column("completed", Integer, nullable=False, server_default="0"),
    Column("failed", Integer, nullable=False, server_default="0"),
    # Of its output files, from their making; NULL: they are kept.
    Column("output_seconds", Integer),
    _time("expires_at", nullable=False),
    _time("in_progress_at"),
    # Since when it is being stopped: its client's wish, or its time is over.
    _time("cancelling_at"),
    _time("expiring_at"),
    _time("finalizing_at"),
    # When it became what it is: completed, failed, expired or cancelled.
    _time("ended_at"),
    # The process that feeds it, and until when nobody else may.
    Column("feeder_id", UUID),
    _time("lease_expires_at"),
    # Under which the same request finds it, until then.
    Column("idempotency_key", String),
    Column("request_hash", LargeBinary),
    _time("key_expires_at"),
    CheckConstraint(
        "state IN ('validating', 'failed', 'in_progress', 'finalizing', 'completed', 'expired', "
        "'cancelling', 'cancelled')",
        name="state",
    ),
    CheckConstraint(
        "(state IN ('failed', 'completed', 'expired', 'cancelled')) = (ended_at IS NOT NULL)",
        name="ended",
    ),
    Index("ix_batches_team_id_id", "team_id", "id"),
    CheckConstraint(
        "num_nonnulls(idempotency_key, request_hash, key_expires_at) IN (0, 3)", name="whole_key"
    ),
    Index("ix_batches_active", "id", postgresql_where=_ACTIVE),
    Index("ix_batches_team_id_active", "team_id", postgresql_where=_ACTIVE),
    Index(
        "ix_batches_team_id_idempotency_key",
        "team_id",
        "idempotency_key",
        unique=True,
        postgresql_where=text("idempotency_key IS NOT NULL"),
    ),
    postgresql_with=COUNTERS,
)

batch_lines = Table(
    "batch_lines",
    metadata,
    Column("batch_id", UUID, ForeignKey("batches.id", ondelete="CASCADE"), primary_key=True),
    # From 1, as the input file counts.
    Column("line", Integer, primary_key=True),
    Column("custom_id", Text, nullable=False),
    Column("state", String, nullable=False, server_default="waiting"),
    # The request, until it is done: a JSON object.
    Column("body", Text),
    # Given before the line is sent: who sends it again makes nothing twice.
    Column("result_ids", ARRAY(UUID)),
    # Of a line that is done: what its file tells.
    Column("is_completed", Boolean),
    Column("outcome", Text),
    CheckConstraint("state IN ('waiting', 'sent', 'done')", name="state"),
    CheckConstraint("state = 'done' OR body IS NOT NULL", name="open_has_body"),
    CheckConstraint("state <> 'sent' OR result_ids IS NOT NULL", name="sent_has_results"),
    CheckConstraint(
        "(state = 'done') = (num_nonnulls(outcome, is_completed) = 2)", name="done_has_outcome"
    ),
    Index(
        "ix_batch_lines_batch_id_line_waiting",
        "batch_id",
        "line",
        postgresql_where=text("state = 'waiting'"),
    ),
    Index(
        "ix_batch_lines_batch_id_line_sent",
        "batch_id",
        "line",
        postgresql_where=text("state = 'sent'"),
    ),
    postgresql_with=LONG_WITH_TEXTS,
)

models = Table(
    "models",
    metadata,
    Column("name", String, primary_key=True),
    Column("version", Integer),
    Column("first_seen_at", DateTime(timezone=True), nullable=False, server_default=_NOW),
)

# Triton servers besides those that the settings name.
servers = Table(
    "servers",
    metadata,
    Column("name", String, primary_key=True),
    # Addresses, `host:port`.
    Column("grpc", String, nullable=False),
    Column("http", String),
    Column("metrics", String),
    # Most results that each worker runs on it at a time; NULL: LLM_WORKER_SLOTS.
    Column("slots", Integer),
    # It is given nothing more to do.
    Column("is_draining", Boolean, nullable=False, server_default=text("false")),
    Column("registered_at", DateTime(timezone=True), nullable=False, server_default=_NOW),
    CheckConstraint("slots > 0", name="slots"),
    # Under two names a server would be given twice what it can take.
    UniqueConstraint("grpc"),
)

# Servers that this service launched: each row is followed until its job is gone.
launches = Table(
    "launches",
    metadata,
    Column("id", UUID, primary_key=True),
    Column("team_id", String, nullable=False),
    # Also its server's in `servers`.
    Column("name", String, nullable=False),
    Column("provider", String, nullable=False),
    Column("profile", String, nullable=False),
    Column("model", String, nullable=False),
    # The whole request: `launches.spec.LaunchSpec`.
    Column("spec", JSONB, nullable=False),
    Column("state", String, nullable=False, server_default="submitted"),
    # For people: why it waits, or why it ended.
    Column("reason", Text, nullable=False, server_default=""),
    # What a stopping one becomes.
    Column("end_state", String),
    Column("job_id", String),
    Column("node", String),
    # Of a launch by processes of a machine: its name. Workers of others cannot see them.
    Column("machine", String),
    # What the job told: {"grpc", "http", "metrics"}, ports on its node.
    Column("ports", JSONB),
    # Where its server is reached, `host:port` each: {"grpc", "http", "metrics"}.
    Column("address", JSONB),
    # Of its model, as Triton counts them: a change is a use.
    Column("requests", BigInteger, nullable=False, server_default="0"),
    # The end of its job's output.
    Column("log", Text, nullable=False, server_default=""),
    Column("exit_code", Integer),
    _time("submitted_at"),
    _time("started_at"),
    _time("healthy_at"),
    _time("last_used_at"),
    _time("stopping_at"),
    _time("ended_at"),
    # When it is to be looked at again, and until when nobody but its follower may.
    Column("next_check_at", DateTime(timezone=True), nullable=False, server_default=_NOW),
    _time("lease_expires_at"),
    # The process that holds its tunnel: others take it over only if that one is late.
    Column("follower_id", UUID),
    CheckConstraint(
        "state IN ('submitted', 'pending', 'starting', 'healthy', 'unhealthy', 'stopping', "
        "'stopped', 'timeout', 'failed')",
        name="state",
    ),
    CheckConstraint(
        "(state IN ('stopped', 'timeout', 'failed')) = (ended_at IS NOT NULL)", name="ended"
    ),
    CheckConstraint("end_state IN ('stopped', 'timeout', 'failed')", name="end_state"),
    Index("ix_launches_team_id_id", "team_id", "id"),
    Index("ix_launches_name_open", "name", unique=True, postgresql_where=text("ended_at IS NULL")),
    Index("ix_launches_next_check_at", "next_check_at", postgresql_where=text("ended_at IS NULL")),
)
