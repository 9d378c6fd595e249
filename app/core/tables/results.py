"""Results: prompts, their results, and the text of attempts that run."""

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB, UUID

from app.core.storage_parameters import LONG, LONG_WITH_TEXTS, QUEUE
from app.core.tables.schema import EMPTY_LIST, EMPTY_OBJECT, index, metadata, time

contexts = sa.Table(
    "contexts",
    metadata,
    sa.Column("id", UUID, primary_key=True),
    sa.Column("team_id", sa.String, nullable=False, server_default="default"),
    # A prompt is either plain text or a list of chat messages.
    sa.Column("content", sa.Text),
    sa.Column("messages", JSONB),
    sa.Column("metadata", JSONB, nullable=False, server_default=EMPTY_OBJECT),
    # Time of its erasure; `content` is empty since then.
    time("erased_at"),
    # End of the last of its deleted results; its retention counts from then.
    time("unused_since"),
    sa.CheckConstraint("num_nonnulls(content, messages) = 1", name="one_form"),
    index("team_id", "id"),
    index("team_id", "unused_since", where="unused_since IS NOT NULL"),
    postgresql_with=LONG_WITH_TEXTS,
)

_DELETE_RESULTS = (
    """CREATE FUNCTION delete_results_of_contexts() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
          DELETE FROM results WHERE context_id = ANY (ARRAY(SELECT id FROM gone));
          RETURN NULL;
        END $$""",
    """CREATE TRIGGER delete_results AFTER DELETE ON contexts REFERENCING OLD TABLE AS gone
        FOR EACH STATEMENT EXECUTE FUNCTION delete_results_of_contexts()""",
)
for statement in _DELETE_RESULTS:
    sa.event.listen(contexts, "after_create", sa.DDL(statement))  # type: ignore[no-untyped-call]

_UNCLAIMED = "state = 'pending' AND worker_id IS NULL"
_CLAIMED = "state = 'pending' AND worker_id IS NOT NULL"

results = sa.Table(
    "results",
    metadata,
    sa.Column("id", UUID, primary_key=True),
    sa.Column("team_id", sa.String, nullable=False, server_default="default"),
    sa.Column("kind", sa.String, nullable=False, server_default="generation"),
    # Results of one request (n choices, k prompts) share a group.
    sa.Column("group_id", UUID),
    # SHA-256 of its request, if an equal result may answer it (queue/reuse.py).
    sa.Column("reuse_digest", sa.LargeBinary),
    # The result whose text this one has; it may have been deleted since.
    sa.Column("reused_from", UUID),
    # The result that this one retries; it may have been deleted since.
    sa.Column("retry_of", UUID),
    # Job of which it is a row; the job may have been deleted since.
    sa.Column("job_id", UUID),
    # Source result of an attribution; it may have been deleted since.
    sa.Column("source_id", UUID),
    # The attribution that follows once this one has completed: its id, queue and parameters.
    sa.Column("attribution", JSONB),
    # Trace context of its request (W3C's `traceparent`); NULL while traces are off.
    sa.Column("trace", sa.Text),
    # No foreign key: statements that store results lock their context, and its trigger deletes them.
    sa.Column("context_id", UUID, nullable=False),
    # --- the request ---
    sa.Column("model_name", sa.String, nullable=False),
    sa.Column("model_version", sa.Integer),
    # The rendered chat prompt; NULL where the context's content is the prompt itself.
    sa.Column("prompt", sa.Text),
    sa.Column("parameters", JSONB, nullable=False),
    sa.Column("priority", sa.SmallInteger, nullable=False, server_default="0"),
    # Called when the result is terminal; the delivery is a row of webhook_deliveries.
    sa.Column("webhook_url", sa.Text),
    # Whether a disconnect of the client, or a lost worker, ends it: a client of a synchronous
    # dialect cannot resume its stream.
    sa.Column("on_disconnect", sa.String, nullable=False, server_default="continue"),
    # The API process of that client; the result is cancelled once the process is gone.
    sa.Column("waiter_id", UUID),
    time("deadline_at", nullable=False),
    # As requested, for retries; NULL for results older than migration 0002.
    sa.Column("deadline_seconds", sa.Float),
    sa.Column("metadata", JSONB, nullable=False, server_default=EMPTY_OBJECT),
    # Members of the request that a dialect returns with the result.
    sa.Column("request", JSONB),
    # False: its texts are erased after their delivery.
    sa.Column("store", sa.Boolean, nullable=False, server_default=sa.text("true")),
    # Retention from its end that its request set.
    sa.Column("retain_seconds", sa.Float),
    # Token of its request: a JWT's `token_id`, or an API key's prefix. NULL: none, or an older version.
    sa.Column("token_id", sa.String),
    # Whether its text may be continued (queue/continuation.py).
    sa.Column("resumable", sa.Boolean, nullable=False, server_default=sa.text("false")),
    # --- the state: written by app/queue alone ---
    sa.Column("state", sa.String, nullable=False, server_default="pending"),
    # Virtual time: the order in the queue among results of one priority (docs/limits.md).
    sa.Column("fair_key", sa.Float, nullable=False, server_default="0"),
    time("not_before"),
    # No foreign key: the fence holds even after the workers table was cleaned.
    sa.Column("worker_id", UUID),
    # Each claim increments it: with worker_id it identifies the one attempt that may write.
    sa.Column("attempt", sa.Integer, nullable=False, server_default="0"),
    # Attempts that Triton accepted and lost, and those of them in which the engine died.
    sa.Column("lost_attempts", sa.SmallInteger, nullable=False, server_default="0"),
    # Deaths of its engine, or of its worker's process, while it ran: two make it a suspect.
    sa.Column("engine_deaths", sa.SmallInteger, nullable=False, server_default="0"),
    sa.Column("attempt_history", JSONB, nullable=False, server_default=EMPTY_LIST),
    # First attempt of the present text; NULL: the present one.
    sa.Column("text_attempt", sa.Integer),
    sa.Column("continuations", sa.SmallInteger, nullable=False, server_default="0"),  # of that text
    time("cancel_requested_at"),
    # Set by a claim, cleared by a release: pending with started_at is running, without is queued.
    time("started_at"),
    time("first_token_at"),
    time("finished_at"),
    # End plus retain_seconds; set at its end.
    time("expires_at"),
    # --- the output ---
    sa.Column("output", sa.Text),
    sa.Column("finish_reason", sa.String),
    sa.Column("prompt_tokens", sa.Integer),
    sa.Column("completion_tokens", sa.Integer),
    sa.Column("logprobs", JSONB),
    # JSON: each token's own entry is the first one, and jsonb would sort them.
    sa.Column("prompt_logprobs", sa.Text),
    # The numbers of an embedding, or the scores of documents: little-endian float32.
    sa.Column("vector", sa.LargeBinary),
    sa.Column("error_code", sa.String),
    sa.Column("error_message", sa.Text),
    sa.Column("error_retryable", sa.Boolean),
    # Time at which prompt, output and its other texts were erased.
    time("erased_at"),
    sa.CheckConstraint("state IN ('pending', 'completed', 'failed')", name="state"),
    sa.CheckConstraint("kind IN ('generation', 'attribution', 'embedding', 'score')", name="kind"),
    sa.CheckConstraint("on_disconnect IN ('continue', 'cancel')", name="on_disconnect"),
    sa.CheckConstraint("(state = 'pending') = (finished_at IS NULL)", name="finished"),
    sa.CheckConstraint("(state = 'failed') = (error_code IS NOT NULL)", name="failed_has_error"),
    sa.CheckConstraint(
        "num_nonnulls(error_code, error_message, error_retryable) IN (0, 3)", name="whole_error"
    ),
    sa.CheckConstraint(
        "state <> 'completed' OR output IS NOT NULL OR erased_at IS NOT NULL",
        name="completed_has_output",
    ),
    sa.CheckConstraint("erased_at IS NULL OR state <> 'pending'", name="erased_at_end"),
    sa.CheckConstraint("jsonb_typeof(parameters) = 'object'", name="parameters_object"),
    # Lists, newest first, by each filter.
    index("team_id", "id"),
    index("team_id", "model_name", "id"),
    index("context_id", "id"),
    index("group_id", where="group_id IS NOT NULL"),
    index("source_id", "id", where="source_id IS NOT NULL"),
    index("team_id", "reuse_digest", "id", where="reuse_digest IS NOT NULL"),
    index("team_id", "id", name="ix_results_team_id_id_pending", where="state = 'pending'"),
    # Failed results by each filter, with what the others test. Each has its own condition or order of
    # columns (results/pages.py).
    index(
        "team_id",
        "id",
        name="ix_results_team_id_id_failed",
        where="state = 'failed'",
        include=["context_id"],
    ),
    index(
        "team_id",
        "error_code",
        "id",
        where="error_code IS NOT NULL",
        include=["context_id", "model_name", "error_retryable"],
    ),
    index(
        "team_id",
        "error_retryable",
        "id",
        where="error_retryable IS NOT NULL",
        include=["context_id", "model_name", "error_code"],
    ),
    index(
        "model_name",
        "team_id",
        "id",
        name="ix_results_model_name_team_id_id_failed",
        where="state = 'failed'",
        include=["context_id", "error_code", "error_retryable"],
    ),
    # The queue: claims read only unclaimed rows, rescues only claimed ones.
    index(
        "model_name",
        sa.text("priority DESC"),
        "fair_key",
        "id",
        name="ix_results_queue",
        where=_UNCLAIMED,
    ),
    index(
        "model_name",
        "team_id",
        sa.text("priority DESC"),
        "fair_key",
        "id",
        name="ix_results_queue_team",
        where=_UNCLAIMED,
    ),
    # No deadline is NULL. The condition reserves this index for queries by deadline: with
    # statistics of an empty queue it would look as cheap to other queries as the queue's own.
    index(
        "deadline_at",
        name="ix_results_unclaimed_deadline_at",
        where=f"{_UNCLAIMED} AND deadline_at IS NOT NULL",
    ),
    index("worker_id", where=_CLAIMED),
    index(
        "model_name",
        "id",
        name="ix_results_suspects",
        where="state = 'pending' AND engine_deaths >= 2",
    ),
    index(
        "finished_at",
        name="ix_results_finished_at_to_erase",
        where="NOT store AND erased_at IS NULL AND finished_at IS NOT NULL",
    ),
    index("expires_at", where="expires_at IS NOT NULL"),
    postgresql_with=LONG_WITH_TEXTS,
)

# Tables whose rows belong to a result, by `result_id`. Statements that insert such a row hold the result,
# or insert it too; this trigger deletes the rows, in a snapshot that has all that were committed before.
# For each statement: checks of foreign keys would run a query for each row (decision 0021).
_DELETE_ROWS = (
    """CREATE FUNCTION delete_rows_of_results() RETURNS trigger LANGUAGE plpgsql AS $$
        DECLARE
          ids uuid[] := ARRAY(SELECT id FROM gone);
        BEGIN
          DELETE FROM result_search WHERE result_id = ANY (ids);
          DELETE FROM idempotency_keys WHERE result_id = ANY (ids);
          DELETE FROM webhook_deliveries WHERE result_id = ANY (ids);
          DELETE FROM result_tags WHERE ctid = ANY (ARRAY(
            SELECT t.place FROM gone g CROSS JOIN LATERAL tags_of_metadata(g.metadata) AS tag
            CROSS JOIN LATERAL (SELECT ctid AS place FROM result_tags
              WHERE (team_id, tag, result_id) = (g.team_id, tag.tag, g.id) OFFSET 0) t
            WHERE g.metadata <> '{}'));
          INSERT INTO job_events (job_id, result_id, ended_as, rows)
          SELECT job_id, id, 'deleted', 1 FROM gone WHERE job_id IS NOT NULL AND state = 'pending';
          RETURN NULL;
        END $$""",
    """CREATE TRIGGER delete_rows AFTER DELETE ON results REFERENCING OLD TABLE AS gone
        FOR EACH STATEMENT EXECUTE FUNCTION delete_rows_of_results()""",
)
for statement in _DELETE_ROWS:
    sa.event.listen(results, "after_create", sa.DDL(statement))  # type: ignore[no-untyped-call]

result_chunks = sa.Table(
    "result_chunks",
    metadata,
    # No foreign key: checking it would lock the result's row at each flush; `finish` and deletes
    # remove the chunks in the statement that ends the result.
    sa.Column("result_id", UUID, primary_key=True),
    sa.Column("attempt", sa.Integer, primary_key=True),
    # Code points of the output before this chunk.
    sa.Column("offset", sa.BigInteger, primary_key=True),
    sa.Column("text", sa.Text, nullable=False),
    # Tokens of the whole text up to the end of this chunk, including earlier attempts.
    sa.Column("prompt_tokens", sa.Integer),
    sa.Column("completion_tokens", sa.Integer),
    # Log probabilities of the tokens of this chunk if requested: a JSON list, never searched.
    sa.Column("logprobs", sa.Text),
    sa.Column("token_ids", sa.LargeBinary),  # of this chunk, little-endian INT32; NULL if unknown
    postgresql_with=QUEUE,
)

idempotency_keys = sa.Table(
    "idempotency_keys",
    metadata,
    sa.Column("team_id", sa.String, primary_key=True),
    sa.Column("key", sa.String, primary_key=True),
    # SHA-256 of the canonical request: the same key with another request is refused.
    sa.Column("request_hash", sa.LargeBinary, nullable=False),
    # No foreign key, see `delete_rows_of_results`.
    sa.Column("result_id", UUID, nullable=False),
    time("expires_at", nullable=False),
    index("result_id"),
    index("expires_at"),
    postgresql_with=LONG,
)

stream_tickets = sa.Table(
    "stream_tickets",
    metadata,
    # SHA-256 of the ticket: a reader of the table cannot use it.
    sa.Column("ticket_hash", sa.LargeBinary, primary_key=True),
    sa.Column("team_id", sa.String, nullable=False),
    sa.Column("result_id", UUID, nullable=False),
    time("expires_at", nullable=False),
    index("expires_at"),
)
