"""Checks of the database."""

import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import asyncpg
import orjson

from app.cli.doctor.findings import Finding, Level, fail, ok, warn
from app.cli.doctor.local import disk_space
from app.cli.doctor.pooler import check_pooler
from app.core import pooler, schema_version
from app.core.addresses import is_loopback
from app.core.database import Database
from app.core.primary import NoPrimaryError
from app.core.program import PROGRAM
from app.core.queue_names import INDEX_QUEUES
from app.core.settings import Settings

_now = time.time
_MIN_POSTGRES_VERSION = 15  # oldest version that the tests run on
_SKEW_WARN, _SKEW_FAIL = 1.0, 30.0  # seconds
_CONNECTIONS_OUTSIDE_POOL = 3  # of a process: listener, heartbeat, and one for the next listener
_LONG_TRANSACTION = 3600.0  # seconds
_WRAPAROUND = 1_500_000_000  # transactions; PostgreSQL stops at 2.1 billion
_BACKLOG = 10_000


@contextlib.asynccontextmanager
async def connected(
    settings: Settings,
) -> AsyncIterator[tuple[asyncpg.Connection | None, Finding | None]]:
    place = ", ".join(f"{host}:{port}" for host, port in settings.direct_addresses())
    try:
        connection = await Database(settings, "llm doctor").connect()
    except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        yield None, fail("database", f"{place}: {_reason(error)}", _remedy(error))
        return
    try:
        yield connection, None
    finally:
        await connection.close()


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _remedy(error: BaseException) -> str:
    if explained := pooler.refusal(error):
        return str(explained).partition(": ")[2]
    if isinstance(error, asyncpg.InvalidCatalogNameError):
        return "Create the database, or correct LLM_DATABASE_DB."
    if isinstance(
        error, (asyncpg.InvalidPasswordError, asyncpg.InvalidAuthorizationSpecificationError)
    ):
        return "Correct LLM_DATABASE_ADMIN_USER and LLM_DATABASE_PASSWORD, or pg_hba.conf."
    if isinstance(error, asyncpg.TooManyConnectionsError):
        return "Raise max_connections, or lower LLM_DATABASE_POOL_SIZE."
    if isinstance(error, asyncpg.TargetServerAttributeNotMatched):
        return "It is a standby: name the primary server, or all of them."
    if isinstance(error, NoPrimaryError):
        return "Start the primary server, or promote a standby."
    return "Start PostgreSQL, or correct LLM_DATABASE_URL."


_FACTS = """
SELECT current_setting('server_version_num')::int AS version,
  current_setting('server_version') AS version_name,
  current_setting('server_encoding') AS encoding, pg_is_in_recovery() AS is_standby,
  current_setting('default_transaction_read_only') AS read_only,
  current_setting('fsync') AS fsync, current_setting('full_page_writes') AS full_page_writes,
  current_setting('synchronous_commit') AS synchronous_commit,
  current_setting('synchronous_standby_names') AS standby_names,
  (SELECT count(*) FROM pg_stat_replication)::int AS standbys,
  current_setting('autovacuum') AS autovacuum, current_setting('track_counts') AS track_counts,
  current_setting('max_connections')::int AS max_connections,
  current_setting('superuser_reserved_connections')::int AS reserved,
  (SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend')::int AS connections,
  (SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()
     AND starts_with(query, 'SELECT ''listening'''))::int AS processes,
  (SELECT max(extract(epoch FROM now() - xact_start)) FROM pg_stat_activity
   WHERE datname = current_database() AND backend_type = 'client backend')::float8 AS oldest_seconds,
  (SELECT age(datfrozenxid) FROM pg_database WHERE datname = current_database()) AS xid_age,
  pg_database_size(current_database()) AS size_bytes
"""


@dataclass(frozen=True, slots=True)
class _Facts:
    version: int
    version_name: str
    encoding: str
    is_standby: bool
    read_only: str
    fsync: str
    full_page_writes: str
    synchronous_commit: str
    standby_names: str
    standbys: int
    autovacuum: str
    track_counts: str
    max_connections: int
    reserved: int
    connections: int
    processes: int
    oldest_seconds: float | None
    xid_age: int
    size_bytes: int


async def check_database(
    connection: asyncpg.Connection, settings: Settings
) -> AsyncIterator[Finding]:
    row = await connection.fetchrow(_FACTS)
    assert row is not None
    facts = _Facts(**row)
    yield _version(facts)
    for finding in (*_durability(facts), *_upkeep(facts)):
        yield finding
    yield _connections(facts, settings)
    async for finding in check_pooler(connection, settings):
        yield finding
    yield await _clock(connection)
    yield await _database_disk(connection, settings, facts.size_bytes)
    found = await schema_version.read(connection)
    reason = schema_version.fault(found)
    if reason is not None:
        fault, _, to_do = reason.partition(": ")
        yield fail("schema", fault, to_do)
        return
    yield ok("schema", str(found))
    async for finding in _check_tables(connection):
        yield finding


def _version(facts: _Facts) -> Finding:
    name = f"PostgreSQL {facts.version_name}"
    if facts.is_standby or facts.read_only == "on":
        return fail("database", f"{name}, which may only be read", "Name the primary server.")
    if facts.encoding != "UTF8":
        to_do = "Create the database with ENCODING 'UTF8'."
        return fail("database", f"{name}, encoding {facts.encoding}", to_do)
    if facts.version < _MIN_POSTGRES_VERSION * 10_000:
        to_do = f"Use PostgreSQL {_MIN_POSTGRES_VERSION} or newer: no older one is tested."
        return warn("database", name, to_do)
    return ok("database", name)


def _durability(facts: _Facts) -> list[Finding]:
    findings = [
        warn("durability", f"{name} is off", f"Accepted results can be lost {when}: turn it on.")
        for name, when in (
            ("fsync", "when the machine stops, and the database with them"),
            ("full_page_writes", "when the machine stops in the middle of a write"),
            ("synchronous_commit", "when the server stops, although clients have their ids"),
        )
        if getattr(facts, name) == "off"
    ]
    if facts.standby_names:
        findings += _standby(facts)
    return findings or [ok("durability", "fsync and synchronous_commit are on")]


def _standby(facts: _Facts) -> Iterator[Finding]:
    names = f"synchronous_standby_names is {facts.standby_names}"
    if facts.standbys == 0:
        to_do = "Every write waits, and gets a 503: start the standby (docs/failover.md)."
        yield fail("durability", f"{names}, and none is connected", to_do)
    if facts.synchronous_commit in ("local", "remote_write"):
        to_do = "Accepted results can be lost with the primary: set synchronous_commit to on."
        found = f"{names}, but synchronous_commit is {facts.synchronous_commit}"
        yield warn("durability", found, to_do)


def _upkeep(facts: _Facts) -> list[Finding]:
    findings = []
    if "off" in (facts.autovacuum, facts.track_counts):
        to_do = "Tables and indexes grow without end, and queries slow down: turn both on."
        findings.append(warn("autovacuum", "autovacuum or track_counts is off", to_do))
    if (seconds := facts.oldest_seconds or 0) > _LONG_TRANSACTION:
        hours = seconds / 3600
        to_do = "It blocks all vacuuming: end it (pg_stat_activity)."
        findings.append(warn("autovacuum", f"a transaction is {hours:.1f} h old", to_do))
    if facts.xid_age > _WRAPAROUND:
        to_do = "VACUUM (FREEZE), before PostgreSQL stops taking writes."
        findings.append(fail("autovacuum", f"{facts.xid_age} transactions unfrozen", to_do))
    return findings or [ok("autovacuum", "on")]


def _connections(facts: _Facts, settings: Settings) -> Finding:
    """Check that the pools of all processes fit: at least one API process and one worker."""
    processes = max(2, facts.processes)
    pool = 0 if settings.has_pooler else settings.database_pool_size
    needed = processes * (pool + _CONNECTIONS_OUTSIDE_POOL)
    most = facts.max_connections - facts.reserved
    past = " past PgBouncer" * settings.has_pooler
    text = f"{processes} processes may open {needed}{past}, {facts.connections} are open, of {most}"
    if needed > most:
        to_do = "Raise max_connections, or lower LLM_DATABASE_POOL_SIZE."
        return warn("connections", text, to_do)
    return ok("connections", text)


async def _clock(connection: asyncpg.Connection) -> Finding:
    before = _now()
    theirs = await connection.fetchval("SELECT extract(epoch FROM clock_timestamp())::float8")
    after = _now()
    skew = theirs - (before + after) / 2
    text = f"the database is {abs(skew):.2f} s {'ahead' if skew > 0 else 'behind'}"
    doubt = (after - before) / 2
    if abs(skew) - doubt > _SKEW_WARN:
        level = Level.FAIL if abs(skew) > _SKEW_FAIL else Level.WARN
        to_do = "Times of results and the validity of tokens are wrong by that: synchronise (NTP)."
        return Finding("clock", level, text, to_do)
    return ok("clock", text)


async def _database_disk(
    connection: asyncpg.Connection, settings: Settings, size_bytes: int
) -> Finding:
    size = f"the database has {size_bytes / 1e9:.2f} GB"
    hosts = [host for host, _ in settings.direct_addresses()]
    with contextlib.suppress(asyncpg.InsufficientPrivilegeError, OSError):
        if all(map(is_loopback, hosts)):  # otherwise the path is another machine's
            return disk_space(
                "database disk", Path(await connection.fetchval("SHOW data_directory"))
            )
    return ok("database disk", f"{size}; its free space is not visible from here")


async def _check_tables(connection: asyncpg.Connection) -> AsyncIterator[Finding]:
    rows = await connection.fetch(
        "SELECT host, load FROM workers WHERE dead_at IS NULL AND lease_expires_at > now()"
    )
    hosts_of_workers = [
        row["host"]
        for row in rows
        if not any(name.startswith(INDEX_QUEUES) for name in orjson.loads(row["load"]))
    ]
    if hosts_of_workers:
        hosts = ", ".join(sorted(set(hosts_of_workers)))
        yield ok("workers", f"{len(hosts_of_workers)} renew their lease, on {hosts}")
    else:
        to_do = f"Start one: `{PROGRAM} worker`. Results wait meanwhile."
        yield warn("workers", "none renews its lease", to_do)
    backlog = await connection.fetchval(
        f"SELECT count(*) FROM (SELECT FROM undigested_results LIMIT {_BACKLOG + 1}) u"
    )
    if backlog > _BACKLOG:
        to_do = "Figures and searches lag behind: look at the workers' logs for not_digested."
        yield warn("digest", f"more than {_BACKLOG} ended results are not digested", to_do)
