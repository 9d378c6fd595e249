"""Workers, API processes, models, Triton servers, launches and downloads of models."""

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB, UUID

from app.core.tables.schema import EMPTY_OBJECT, NOW, index, metadata, time

workers = sa.Table(
    "workers",
    metadata,
    sa.Column("id", UUID, primary_key=True),
    sa.Column("host", sa.String, nullable=False),
    sa.Column("pid", sa.Integer, nullable=False),
    time("started_at", nullable=False, default=NOW),
    time("lease_expires_at", nullable=False),
    # A dead row is never renewed: a worker that was declared dead continues under a new id.
    time("dead_at"),
    # By model: {"running": results, "tokens_per_second": rate, "results_per_second": rate, "dead":
    # {server: {"since": time, "reason": text}}}; renewed with the lease.
    sa.Column("load", JSONB, nullable=False, server_default=EMPTY_OBJECT),
    sa.Column("servers", JSONB, nullable=False, server_default=EMPTY_OBJECT),  # results by server
    index("lease_expires_at", name="ix_workers_alive", where="dead_at IS NULL"),
)

# Processes of the API, renewed by each (queue/api_processes.py).
api_processes = sa.Table(
    "api_processes",
    metadata,
    sa.Column("id", UUID, primary_key=True),
    time("lease_expires_at", nullable=False),
)

models = sa.Table(
    "models",
    metadata,
    sa.Column("name", sa.String, primary_key=True),
    sa.Column("version", sa.Integer),
    time("first_seen_at", nullable=False, default=NOW),
)

# Registered Triton servers, in addition to those of the settings.
servers = sa.Table(
    "servers",
    metadata,
    sa.Column("name", sa.String, primary_key=True),
    # Addresses, `host:port`.
    sa.Column("grpc", sa.String, nullable=False),
    sa.Column("http", sa.String),
    sa.Column("metrics", sa.String),
    # Most results that each worker runs on it at the same time; NULL: LLM_WORKER_SLOTS.
    sa.Column("slots", sa.Integer),
    # A draining server gets no further results.
    sa.Column("is_draining", sa.Boolean, nullable=False, server_default=sa.text("false")),
    # In the header of every request to it (inference.triton_access); NULL: none.
    sa.Column("secret", sa.String),
    time("registered_at", nullable=False, default=NOW),
    sa.CheckConstraint("slots > 0", name="slots"),
    # A server under two names would get twice its capacity.
    sa.UniqueConstraint("grpc"),
)

# Launched servers: the reconciler follows each row until its job has ended.
launches = sa.Table(
    "launches",
    metadata,
    sa.Column("id", UUID, primary_key=True),
    sa.Column("team_id", sa.String, nullable=False),
    # Also the name of its server in `servers`.
    sa.Column("name", sa.String, nullable=False),
    sa.Column("provider", sa.String, nullable=False),
    sa.Column("profile", sa.String, nullable=False),
    sa.Column("model", sa.String, nullable=False),
    # The complete request: provisioning.spec.LaunchSpec.
    sa.Column("spec", JSONB, nullable=False),
    sa.Column("state", sa.String, nullable=False, server_default="submitted"),
    # Reason why it waits or ended, for people.
    sa.Column("reason", sa.Text, nullable=False, server_default=""),
    # Terminal state of a stopping launch.
    sa.Column("end_state", sa.String),
    sa.Column("job_id", sa.String),
    sa.Column("node", sa.String),
    # Name of the machine that runs its processes; workers of other machines cannot see them.
    sa.Column("machine", sa.String),
    # Its server's, which its job reads from a file; NULL before its submission.
    sa.Column("secret", sa.String),
    # Reported by the job: ports of gRPC and metrics on its node; of an older job, of HTTP between.
    sa.Column("ports", JSONB),
    # Addresses of its server, `host:port` each: {"grpc", "metrics"}; of an older job, also "http".
    sa.Column("address", JSONB),
    # Requests of its model, as counted by Triton: a change is a use.
    sa.Column("requests", sa.BigInteger, nullable=False, server_default="0"),
    # The end of its job's output.
    sa.Column("log", sa.Text, nullable=False, server_default=""),
    sa.Column("exit_code", sa.Integer),
    time("submitted_at"),
    time("started_at"),
    time("healthy_at"),
    time("last_used_at"),
    time("stopping_at"),
    time("ended_at"),
    # Time of the next check, and end of the lease of the process that does it.
    time("next_check_at", nullable=False, default=NOW),
    time("lease_expires_at"),
    # The process that holds its tunnel; others take over only if it is late.
    sa.Column("follower_id", UUID),
    sa.CheckConstraint(
        "state IN ('submitted', 'pending', 'starting', 'healthy', 'unhealthy', 'stopping', "
        "'stopped', 'timeout', 'failed')",
        name="state",
    ),
    sa.CheckConstraint(
        "(state IN ('stopped', 'timeout', 'failed')) = (ended_at IS NOT NULL)", name="ended"
    ),
    sa.CheckConstraint("end_state IN ('stopped', 'timeout', 'failed')", name="end_state"),
    index("team_id", "id"),
    index("name", name="ix_launches_name_open", unique=True, where="ended_at IS NULL"),
    index("next_check_at", where="ended_at IS NULL"),
)

# Downloads of Hugging Face models: a worker runs each until it has ended.
model_downloads = sa.Table(
    "model_downloads",
    metadata,
    sa.Column("id", UUID, primary_key=True),
    sa.Column("team_id", sa.String, nullable=False),
    sa.Column("profile", sa.String, nullable=False),
    sa.Column("model", sa.String, nullable=False),
    sa.Column("revision", sa.String, nullable=False),
    sa.Column("state", sa.String, nullable=False, server_default="queued"),
    # Reason why it waits or ended, for people.
    sa.Column("reason", sa.Text, nullable=False, server_default=""),
    sa.Column("attempt", sa.Integer, nullable=False, server_default="0"),  # claims
    # Attempts that its host or hub ended, since the last progress.
    sa.Column("failures", sa.Integer, nullable=False, server_default="0"),
    # Bytes of the snapshot that are there; the total is NULL until the files are listed.
    sa.Column("done_bytes", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("total_bytes", sa.BigInteger),
    sa.Column("commit", sa.String),  # of the complete snapshot
    time("started_at"),
    time("ended_at"),
    time("next_attempt_at", nullable=False, default=NOW),
    # End of the lease of the process that runs it, which renews it.
    time("lease_expires_at"),
    sa.CheckConstraint(
        "state IN ('queued', 'running', 'completed', 'failed', 'cancelled')", name="state"
    ),
    sa.CheckConstraint("(state IN ('queued', 'running')) = (ended_at IS NULL)", name="ended"),
    index("team_id", "id"),
    index(
        "team_id",
        "profile",
        "model",
        name="ix_model_downloads_open",
        unique=True,
        where="ended_at IS NULL",
    ),
)
