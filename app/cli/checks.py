"""Checks of a deployment, from a machine where its processes run, with a remedy for each problem.

`fail`: the service does not work, or breaks a promise. `warn`: it works, and the operator should look.
The checks change nothing, and report no secret.
"""

import asyncio
import contextlib
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import asyncpg
import orjson
from pydantic import ValidationError

from app.api.startup_checks import check_startup
from app.core import schema_version
from app.core.addresses import is_loopback
from app.core.database import Database
from app.core.errors import ServiceError
from app.core.primary import NoPrimaryError
from app.core.queue_names import INDEX_QUEUES
from app.core.settings import Settings
from app.core.settings.fields import split_list
from app.inference.triton_client import IndexEntry, TritonClient

_now = time.time

_TRITON_TIMEOUT_SECONDS = 10.0  # seconds for one server to answer
_MIN_POSTGRES_VERSION = 15  # oldest version that the tests run on
_SKEW_WARN, _SKEW_FAIL = 1.0, 30.0  # seconds
_MIN_FREE_BYTES = 1_000_000_000  # bytes
_CONNECTIONS_OUTSIDE_POOL = 3  # of a process: listener, heartbeat, and one for the next listener
_LONG_TRANSACTION = 3600.0  # seconds
_WRAPAROUND = 1_500_000_000  # transactions; PostgreSQL stops at 2.1 billion
_BACKLOG = 10_000


class Level(StrEnum):
    """Severity of a finding."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(slots=True, frozen=True)
class Finding:
    """Result of one check."""

    part: str
    level: Level
    found: str
    to_do: str = ""

    def to_wire(self) -> dict[str, Any]:
        return asdict(self)


def _ok(part: str, found: str) -> Finding:
    return Finding(part, Level.OK, found)


def _warn(part: str, found: str, to_do: str) -> Finding:
    return Finding(part, Level.WARN, found, to_do)


def _fail(part: str, found: str, to_do: str) -> Finding:
    return Finding(part, Level.FAIL, found, to_do)


async def examine(settings: Settings) -> list[Finding]:
    """Run all checks."""
    findings = [*check_settings(settings), *_check_disk(settings)]
    servers = split_list(settings.triton_grpc)
    async with _connected(settings) as (connection, problem):
        if connection is None:
            findings.append(problem or _fail("database", "unknown", ""))
        else:
            findings += [one async for one in _check_database(connection, settings)]
            if await connection.fetchval("SELECT to_regclass('servers') IS NOT NULL"):
                rows = await connection.fetch("SELECT grpc FROM servers ORDER BY name")
                servers += [row["grpc"] for row in rows if row["grpc"] not in servers]
    findings += await _check_triton(servers, settings)
    return findings


def settings_errors(error: ValidationError) -> list[Finding]:
    """Findings of settings that are invalid."""
    return [
        _fail(
            "settings",
            f"{'.'.join(str(part) for part in one['loc']) or 'several'}: {one['msg']}",
            "Correct it: docs/settings.md.",
        )
        for one in error.errors()
    ]


# --- settings and this machine --------------------------------------------------------------------


def check_settings(settings: Settings) -> list[Finding]:
    """Check the settings, also in combination."""
    exposure = check_startup(settings)
    findings = [
        _warn("exposure", text, "See docs/authentication.md.") for text in exposure.warnings
    ]
    if exposure.refusal:
        findings.append(_fail("exposure", exposure.refusal, "The API does not start like this."))
    findings += _contradictions(settings)
    if not findings:
        findings.append(_ok("settings", "; ".join(exposure.notes) or "consistent"))
    return findings


def _contradictions(settings: Settings) -> Iterator[Finding]:
    part = "settings"
    if settings.default_deadline_seconds > settings.max_deadline_seconds:
        yield _warn(
            part,
            "LLM_DEFAULT_DEADLINE_SECONDS exceeds LLM_MAX_DEADLINE_SECONDS",
            "Requests that name no deadline have a later one than any may ask for: raise the latter.",
        )
    if settings.team_max_queued is not None and settings.team_max_queued > settings.max_queued:
        yield _warn(
            part,
            "LLM_TEAM_MAX_QUEUED exceeds LLM_MAX_QUEUED",
            "The former has no effect: lower it.",
        )
    if settings.flush_seconds >= settings.lease_seconds:
        yield _warn(
            part,
            "LLM_FLUSH_SECONDS is not below LLM_LEASE_SECONDS",
            "A lost worker's text is lost with it: flush more often.",
        )
    if not is_loopback(settings.metrics_host) and settings.metrics_port is not None:
        yield _warn(
            "exposure",
            f"metrics are served on {settings.metrics_host}:{settings.metrics_port} without a token",
            "They show how much each team uses: restrict access by a network policy, or bind "
            "127.0.0.1 (LLM_METRICS_HOST).",
        )
    if settings.webhook_allow_private:
        yield _warn(
            "exposure",
            "LLM_WEBHOOK_ALLOW_PRIVATE is set",
            "Clients can have the worker call internal addresses: unset it outside of development.",
        )
    if not settings.model_repository.is_dir():
        yield _warn(
            part,
            f"LLM_MODEL_REPOSITORY={settings.model_repository} is not a directory",
            "Chat and the check of lengths need its tokenizers and templates: mount the repository "
            "that Triton serves.",
        )


def _check_disk(settings: Settings) -> Iterator[Finding]:
    for path in {Path(tempfile.gettempdir()), Path.cwd()}:
        yield _space("disk", path)
    if settings.indexes_file is not None and settings.indexes_file.parent.is_dir():
        yield _space("disk", settings.indexes_file.parent)


def _space(part: str, path: Path) -> Finding:
    free = shutil.disk_usage(path).free
    text = f"{path}: {free / 1e9:.1f} GB are free"
    if free < _MIN_FREE_BYTES:
        return _warn(part, text, "Make room.")
    return _ok(part, text)


# --- database -------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _connected(
    settings: Settings,
) -> AsyncIterator[tuple[asyncpg.Connection | None, Finding | None]]:
    place = ", ".join(f"{host}:{port}" for host, port in settings.database_addresses())
    try:
        connection = await Database(settings, "llm doctor").connect()
    except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        yield None, _fail("database", f"{place}: {_reason(error)}", _remedy(error))
        return
    try:
        yield connection, None
    finally:
        await connection.close()


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _remedy(error: BaseException) -> str:
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


async def _check_database(
    connection: asyncpg.Connection, settings: Settings
) -> AsyncIterator[Finding]:
    facts = await connection.fetchrow(_FACTS)
    assert facts is not None
    yield _version(facts)
    for finding in (*_durability(facts), *_upkeep(facts)):
        yield finding
    yield _connections(facts, settings)
    yield await _clock(connection)
    place = await _database_disk(connection, settings, facts["size_bytes"])
    yield place
    found = await _revision(connection)
    reason = schema_version.fault(found)
    if reason is not None:
        yield _fail("schema", reason.partition(": ")[0], reason.partition(": ")[2])
        return
    yield _ok("schema", str(found))
    async for finding in _check_tables(connection):
        yield finding


def _version(facts: asyncpg.Record) -> Finding:
    name = f"PostgreSQL {facts['version_name']}"
    if facts["is_standby"] or facts["read_only"] == "on":
        return _fail("database", f"{name}, which may only be read", "Name the primary server.")
    if facts["encoding"] != "UTF8":
        to_do = "Create the database with ENCODING 'UTF8'."
        return _fail("database", f"{name}, encoding {facts['encoding']}", to_do)
    if facts["version"] < _MIN_POSTGRES_VERSION * 10_000:
        to_do = f"Use PostgreSQL {_MIN_POSTGRES_VERSION} or newer: no older one is tested."
        return _warn("database", name, to_do)
    return _ok("database", name)


def _durability(facts: asyncpg.Record) -> list[Finding]:
    findings = [
        _warn("durability", f"{name} is off", f"Accepted results can be lost {when}: turn it on.")
        for name, when in (
            ("fsync", "when the machine stops, and the database with them"),
            ("full_page_writes", "when the machine stops in the middle of a write"),
            ("synchronous_commit", "when the server stops, although clients have their ids"),
        )
        if facts[name] == "off"
    ]
    if facts["standby_names"]:
        findings += _standby(facts)
    return findings or [_ok("durability", "fsync and synchronous_commit are on")]


def _standby(facts: asyncpg.Record) -> Iterator[Finding]:
    names = f"synchronous_standby_names is {facts['standby_names']}"
    if facts["standbys"] == 0:
        to_do = "Every write waits, and is answered 503: start the standby (docs/failover.md)."
        yield _fail("durability", f"{names}, and none is connected", to_do)
    if facts["synchronous_commit"] in ("local", "remote_write"):
        to_do = "Accepted results can be lost with the primary: set synchronous_commit to on."
        found = f"{names}, but synchronous_commit is {facts['synchronous_commit']}"
        yield _warn("durability", found, to_do)


def _upkeep(facts: asyncpg.Record) -> list[Finding]:
    findings = []
    if "off" in (facts["autovacuum"], facts["track_counts"]):
        to_do = "Tables and indexes grow without end, and queries slow down: turn both on."
        findings.append(_warn("autovacuum", "autovacuum or track_counts is off", to_do))
    if (facts["oldest_seconds"] or 0) > _LONG_TRANSACTION:
        hours = facts["oldest_seconds"] / 3600
        to_do = "It keeps everything from being vacuumed: end it (pg_stat_activity)."
        findings.append(_warn("autovacuum", f"a transaction is {hours:.1f} h old", to_do))
    if facts["xid_age"] > _WRAPAROUND:
        to_do = "VACUUM (FREEZE), before PostgreSQL stops taking writes."
        findings.append(_fail("autovacuum", f"{facts['xid_age']} transactions unfrozen", to_do))
    return findings or [_ok("autovacuum", "on")]


def _connections(facts: asyncpg.Record, settings: Settings) -> Finding:
    """Check that the pools of all processes fit: at least one API process and one worker."""
    processes = max(2, facts["processes"])
    needed = processes * (settings.database_pool_size + _CONNECTIONS_OUTSIDE_POOL)
    most = facts["max_connections"] - facts["reserved"]
    text = f"{processes} processes may open {needed}, {facts['connections']} are open, of {most}"
    if needed > most:
        to_do = "Raise max_connections, or lower LLM_DATABASE_POOL_SIZE."
        return _warn("connections", text, to_do)
    return _ok("connections", text)


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
    return _ok("clock", text)


async def _database_disk(
    connection: asyncpg.Connection, settings: Settings, size_bytes: int
) -> Finding:
    size = f"the database has {size_bytes / 1e9:.2f} GB"
    hosts = [host for host, _ in settings.database_addresses()]
    with contextlib.suppress(asyncpg.InsufficientPrivilegeError, OSError):
        if all(map(is_loopback, hosts)):  # otherwise the path is another machine's
            return _space("database disk", Path(await connection.fetchval("SHOW data_directory")))
    return _ok("database disk", f"{size}; the space that is left cannot be seen from here")


async def _revision(connection: asyncpg.Connection) -> str | None:
    try:
        found: str | None = await connection.fetchval("SELECT version_num FROM alembic_version")
    except asyncpg.UndefinedTableError:
        return None
    return found


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
        yield _ok("workers", f"{len(hosts_of_workers)} renew their lease, on {hosts}")
    else:
        to_do = "Start one: `python -m app worker`. Results wait meanwhile."
        yield _warn("workers", "none renews its lease", to_do)
    backlog = await connection.fetchval(
        f"SELECT count(*) FROM (SELECT FROM undigested_results LIMIT {_BACKLOG + 1}) u"
    )
    if backlog > _BACKLOG:
        to_do = "Figures and searches lag behind: look at the workers' logs for not_digested."
        yield _warn("digest", f"more than {_BACKLOG} ended results are not digested", to_do)


# --- Triton ---------------------------------------------------------------------------------------


async def _check_triton(addresses: list[str], settings: Settings) -> list[Finding]:
    if not addresses:
        to_do = "Set TRITON_GRPC_SERVICE, register a server, or launch one. Results wait meanwhile."
        return [_warn("triton", "there is no server", to_do)]
    answers = await asyncio.gather(*(_ask(address) for address in addresses))
    is_any_up = any(not isinstance(answer, str) for answer in answers)
    findings = []
    ready = set[str]()
    for address, answer in zip(addresses, answers, strict=True):
        if isinstance(answer, str):
            to_do = "Start it, or correct its address (Triton's gRPC port). Results wait meanwhile."
            level = Level.WARN if is_any_up else Level.FAIL
            findings.append(Finding("triton", level, f"{address}: {answer}", to_do))
            continue
        findings.append(_ok("triton", f"{address}: answers"))
        ready |= {entry.name for entry in answer if entry.ready}
        for entry in answer:
            if not entry.ready and entry.reason not in ("", "unloaded"):
                text = f"{entry.name} on {address}: {entry.reason}"
                findings.append(_warn("models", text, "Triton's log has the details."))
    if ready:
        findings.append(_ok("models", f"ready: {', '.join(sorted(ready))}"))
    elif is_any_up:
        to_do = "Load one: POST /models/{name}/load. Results wait meanwhile."
        findings.append(_warn("models", "none is ready", to_do))
    if settings.default_model is not None and is_any_up and settings.default_model not in ready:
        text = f"LLM_DEFAULT_MODEL={settings.default_model} is not ready"
        findings.append(_warn("models", text, "Load it, or name another one."))
    return findings


async def _ask(address: str) -> list[IndexEntry] | str:
    """The models of a server; or the reason why they are unknown."""
    try:
        async with asyncio.timeout(_TRITON_TIMEOUT_SECONDS), TritonClient(address) as client:
            return await client.index()
    except ServiceError as error:
        return error.detail
    except TimeoutError:
        return f"no answer within {_TRITON_TIMEOUT_SECONDS:.0f} s"
