"""Workers, models, Triton servers and launches."""

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    DateTime,
    Index,
    Integer,
    String,
    Table,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB, UUID

from app.core.tables.schema import EMPTY_OBJECT, NOW, metadata, time

workers = Table(
    "workers",
    metadata,
    Column("id", UUID, primary_key=True),
    Column("host", String, nullable=False),
    Column("pid", Integer, nullable=False),
    Column("started_at", DateTime(timezone=True), nullable=False, server_default=NOW),
    time("lease_expires_at", nullable=False),
    # A dead row is never renewed: a worker that was declared dead continues under a new id.
    time("dead_at"),
    # By model: {"running": results, "tokens_per_second": rate, "results_per_second": rate, "dead":
    # {server: {"since": time, "reason": text}}}; renewed with the lease.
    Column("load", JSONB, nullable=False, server_default=EMPTY_OBJECT),
    Column("servers", JSONB, nullable=False, server_default=EMPTY_OBJECT),  # results by server
    Index("ix_workers_alive", "lease_expires_at", postgresql_where=text("dead_at IS NULL")),
)

models = Table(
    "models",
    metadata,
    Column("name", String, primary_key=True),
    Column("version", Integer),
    Column("first_seen_at", DateTime(timezone=True), nullable=False, server_default=NOW),
)

# Registered Triton servers, in addition to those of the settings.
servers = Table(
    "servers",
    metadata,
    Column("name", String, primary_key=True),
    # Addresses, `host:port`.
    Column("grpc", String, nullable=False),
    Column("http", String),
    Column("metrics", String),
    # Most results that each worker runs on it at the same time; NULL: LLM_WORKER_SLOTS.
    Column("slots", Integer),
    # A draining server gets no further results.
    Column("is_draining", Boolean, nullable=False, server_default=text("false")),
    Column("registered_at", DateTime(timezone=True), nullable=False, server_default=NOW),
    CheckConstraint("slots > 0", name="slots"),
    # A server under two names would get twice its capacity.
    UniqueConstraint("grpc"),
)

# Launched servers: the reconciler follows each row until its job has ended.
launches = Table(
    "launches",
    metadata,
    Column("id", UUID, primary_key=True),
    Column("team_id", String, nullable=False),
    # Also the name of its server in `servers`.
    Column("name", String, nullable=False),
    Column("provider", String, nullable=False),
    Column("profile", String, nullable=False),
    Column("model", String, nullable=False),
    # The complete request: provisioning.spec.LaunchSpec.
    Column("spec", JSONB, nullable=False),
    Column("state", String, nullable=False, server_default="submitted"),
    # Reason why it waits or ended, for people.
    Column("reason", Text, nullable=False, server_default=""),
    # Terminal state of a stopping launch.
    Column("end_state", String),
    Column("job_id", String),
    Column("node", String),
    # Name of the machine that runs its processes; workers of other machines cannot see them.
    Column("machine", String),
    # Reported by the job: {"grpc", "http", "metrics"}, ports on its node.
    Column("ports", JSONB),
    # Addresses of its server, `host:port` each: {"grpc", "http", "metrics"}.
    Column("address", JSONB),
    # Requests of its model, as counted by Triton: a change is a use.
    Column("requests", BigInteger, nullable=False, server_default="0"),
    # The end of its job's output.
    Column("log", Text, nullable=False, server_default=""),
    Column("exit_code", Integer),
    time("submitted_at"),
    time("started_at"),
    time("healthy_at"),
    time("last_used_at"),
    time("stopping_at"),
    time("ended_at"),
    # Time of the next check, and end of the lease of the process that does it.
    Column("next_check_at", DateTime(timezone=True), nullable=False, server_default=NOW),
    time("lease_expires_at"),
    # The process that holds its tunnel; others take over only if it is late.
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
