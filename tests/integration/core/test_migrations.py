"""Migrations on real PostgreSQL: up, down, up with rows in it, and no drift from tables.py."""

import asyncio
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator

import asyncpg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.util import CommandError
from sqlalchemy import Connection

from app.core.migration_engine import make_engine
from app.core.settings import Settings
from app.core.tables import metadata
from app.results.tags import tag_of
from tests.conftest import ROOT, connect, make_settings, migrate
from tests.postgres import PostgresServer

SCHEMA = """
SELECT 'column ' || table_name || '.' || column_name || ' ' || data_type || ' ' || is_nullable
       || coalesce(' ' || column_default, '')
FROM information_schema.columns WHERE table_schema = 'public' AND table_name <> 'alembic_version'
UNION ALL SELECT indexdef FROM pg_indexes
WHERE schemaname = 'public' AND tablename <> 'alembic_version'
UNION ALL SELECT conname || ' ' || pg_get_constraintdef(oid) FROM pg_constraint
WHERE connamespace = 'public'::regnamespace AND conrelid <> 'alembic_version'::regclass
UNION ALL SELECT pg_get_triggerdef(oid) FROM pg_trigger WHERE NOT tgisinternal
UNION ALL SELECT coalesce(m.relname || ' toast ', c.relname || ' ') || array_to_string(
    ARRAY(SELECT o FROM unnest(c.reloptions) AS o ORDER BY o), ',')
FROM pg_class c LEFT JOIN pg_class m ON m.reltoastrelid = c.oid
WHERE c.reloptions IS NOT NULL AND c.relkind IN ('r', 't')
  AND c.relnamespace IN ('public'::regnamespace, 'pg_toast'::regnamespace)
ORDER BY 1
"""

CONTEXT = "'01890000-0000-7000-8000-000000000001'"
RESULT = "'01890000-0000-7000-8000-00000000000{}'"
# One of each state, as revision 0001 knows them.
OLD_ROWS = [
    f"INSERT INTO contexts (id, content, metadata) VALUES ({CONTEXT}, 'kept', '{{\"a\": 1}}')",
    f"""INSERT INTO results (id, context_id, model_name, parameters, deadline_at, state, worker_id,
          finished_at, output, error_code, error_message, error_retryable, attempt_history) VALUES
        ({RESULT.format(2)}, {CONTEXT}, 'm', '{{}}', now(), 'pending', NULL, NULL, NULL, NULL, NULL,
         NULL, '[]'),
        ({RESULT.format(3)}, {CONTEXT}, 'm', '{{"max_tokens": 2}}', now(), 'completed', {CONTEXT},
         now(), 'text', NULL, NULL, NULL, '[]'),
        ({RESULT.format(4)}, {CONTEXT}, 'm', '{{}}', now(), 'failed', {CONTEXT}, now(), 'te',
         'model_error', 'why', true, '[{{"attempt": 1}}]')""",
    f"""INSERT INTO result_chunks (result_id, attempt, "offset", text)
        VALUES ({RESULT.format(2)}, 1, 0, 'te')""",
    f"""INSERT INTO workers (id, host, pid, lease_expires_at) VALUES ({CONTEXT}, 'h', 1, now())""",
    "INSERT INTO models (name, version) VALUES ('m', 1)",
]
NEW_ROWS = [
    f"""INSERT INTO results (id, context_id, model_name, parameters, deadline_at, retry_of,
          webhook_url) VALUES ({RESULT.format(5)}, {CONTEXT}, 'm', '{{}}', now(),
          {RESULT.format(4)}, 'https://example.org/')""",
    f"INSERT INTO idempotency_keys VALUES ('default', 'k', 'hash', {RESULT.format(5)}, now())",
    f"""INSERT INTO webhook_deliveries (result_id, team_id, url)
        VALUES ({RESULT.format(4)}, 'default', 'https://example.org/')""",
]
EVERYTHING = """
SELECT to_jsonb(c)::text FROM contexts c
UNION ALL SELECT (to_jsonb(r) - 'retry_of' - 'webhook_url' - 'deadline_seconds')::text FROM results r
UNION ALL SELECT to_jsonb(c)::text FROM result_chunks c
UNION ALL SELECT to_jsonb(w)::text FROM workers w
UNION ALL SELECT to_jsonb(m)::text FROM models m
ORDER BY 1
"""


OWNED = ("result_search", "webhook_deliveries", "idempotency_keys")


@pytest.fixture
def empty(postgres_server: PostgresServer) -> Iterator[Settings]:
    """Settings of a database without any table."""
    name = f"test_{secrets.token_hex(6)}"
    asyncio.run(postgres_server.execute(f"CREATE DATABASE {name}"))
    yield make_settings(postgres_server, name)
    asyncio.run(postgres_server.execute(f"DROP DATABASE {name} WITH (FORCE)"))


@pytest.mark.trial
def test_up_down_up(empty: Settings) -> None:
    migrate(empty)
    first = asyncio.run(rows(empty, SCHEMA))
    assert any("ix_results_queue" in line for line in first)
    migrate(empty, "base", down=True)
    assert asyncio.run(rows(empty, SCHEMA)) == []
    migrate(empty)
    assert asyncio.run(rows(empty, SCHEMA)) == first


@pytest.mark.trial
def test_up_is_idempotent_and_keeps_rows(empty: Settings) -> None:
    migrate(empty)
    context = secrets.token_hex(16)
    asyncio.run(rows(empty, f"INSERT INTO contexts (id, content) VALUES ('{context}', 'kept')"))
    asyncio.run(
        rows(
            empty,
            "INSERT INTO results (id, context_id, model_name, parameters, deadline_at) "
            f"VALUES ('{secrets.token_hex(16)}', '{context}', 'm', '{{}}', now())",
        )
    )
    migrate(empty)
    assert asyncio.run(rows(empty, "SELECT content FROM contexts")) == ["kept"]
    assert asyncio.run(rows(empty, "SELECT state || team_id || kind FROM results")) == [
        "pendingdefaultgeneration"
    ]
    migrate(empty, "base", down=True)  # down works with rows in the tables too
    migrate(empty)
    assert asyncio.run(rows(empty, "SELECT content FROM contexts")) == []


@pytest.mark.parametrize(("before", "after"), [("0017", "0018"), ("0019", "0020")])
@pytest.mark.trial
def test_results_go_with_their_context_in_either_version(
    empty: Settings, before: str, after: str
) -> None:
    """And what belongs to a result goes with it."""
    migrate(empty, before)
    migrate(empty)
    for revision in (after, before, after):
        migrate(empty, revision, down=revision == before)
        deleted, kept = secrets.token_hex(16), secrets.token_hex(16)
        for context in (deleted, kept):
            for statement in (
                "INSERT INTO contexts (id, content) VALUES ('{0}', 'c')",
                "INSERT INTO results (id, context_id, model_name, parameters, deadline_at) "
                "VALUES ('{0}', '{0}', 'm', '{{}}', now())",
                "INSERT INTO result_search (result_id, team_id) VALUES ('{0}', 'default')",
                "INSERT INTO webhook_deliveries (result_id, team_id, url) VALUES ('{0}', 'default', 'u')",
                "INSERT INTO idempotency_keys (team_id, key, request_hash, result_id, expires_at) "
                "VALUES ('default', '{0}', '', '{0}', now())",
            ):
                asyncio.run(rows(empty, statement.format(context)))
        asyncio.run(rows(empty, f"DELETE FROM contexts WHERE id = '{deleted}'"))
        for query in (
            "SELECT replace(id::text, '-', '') FROM results",
            *(f"SELECT replace(result_id::text, '-', '') FROM {table}" for table in OWNED),
        ):
            left = asyncio.run(rows(empty, query))
            assert deleted not in left
            assert kept in left


def test_a_database_with_rows_goes_from_one_revision_to_the_next_and_back(
    empty: Settings,
) -> None:
    migrate(empty, "0001")
    schema = asyncio.run(rows(empty, SCHEMA))
    for statement in OLD_ROWS:
        asyncio.run(rows(empty, statement))
    before = asyncio.run(rows(empty, EVERYTHING))
    assert len(before) == 7
    migrate(empty, "0002")
    # The old service's rows are unchanged, and have no webhook and no first try.
    new = asyncio.run(rows(empty, "SELECT to_jsonb(r) ->> 'retry_of' FROM results r"))
    assert new == [None, None, None]
    assert asyncio.run(rows(empty, EVERYTHING)) == before
    for statement in NEW_ROWS:
        asyncio.run(rows(empty, statement))
    # The downgrade leaves what the old service knows, rows of the new one included.
    migrate(empty, "0001", down=True)
    assert asyncio.run(rows(empty, SCHEMA)) == schema
    after = asyncio.run(rows(empty, EVERYTHING))
    assert len(after) == 8
    assert set(before) < set(after)
    migrate(empty, "0002")
    assert asyncio.run(rows(empty, EVERYTHING)) == after


@pytest.mark.trial
def test_rows_of_0002_live_through_what_follows_and_back(empty: Settings) -> None:
    migrate(empty, "0002")
    schema = asyncio.run(rows(empty, SCHEMA))
    for statement in (*OLD_ROWS, *NEW_ROWS):
        asyncio.run(rows(empty, statement))
    before = asyncio.run(rows(empty, EVERYTHING))
    migrate(empty)
    assert set(asyncio.run(rows(empty, "SELECT on_disconnect FROM results"))) == {"continue"}
    migrate(empty, "0002", down=True)
    assert asyncio.run(rows(empty, SCHEMA)) == schema
    assert asyncio.run(rows(empty, EVERYTHING)) == before


@pytest.mark.trial
def test_erased_answers_go_back_as_empty_ones(empty: Settings) -> None:
    """The service before knows none that are gone; batches and files it does not know at all."""
    migrate(empty)
    for statement in OLD_ROWS:
        asyncio.run(rows(empty, statement))
    asyncio.run(
        rows(
            empty,
            "UPDATE results SET store = false, request = '{}', output = NULL, erased_at = now()"
            " WHERE state = 'completed'",
        )
    )
    migrate(empty, "0005", down=True, force=True)
    assert asyncio.run(rows(empty, "SELECT output FROM results WHERE state = 'completed'")) == [""]
    migrate(empty)
    assert set(asyncio.run(rows(empty, "SELECT store::text FROM results"))) == {"true"}


def test_keys_are_bound_to_what_a_key_is(empty: Settings) -> None:
    """Revision 0003, up and down with rows in its tables."""
    migrate(empty, "0002")
    schema = asyncio.run(rows(empty, SCHEMA))
    migrate(empty, "0003")
    insert = """INSERT INTO api_keys (id, team_id, prefix, key_hash, scopes)
                VALUES (gen_random_uuid(), '{}', '{}', {}, '{{use}}')"""
    good = "sha256('x')"
    asyncio.run(rows(empty, insert.format("t", "llm_1", good)))
    asyncio.run(rows(empty, "INSERT INTO revoked_tokens VALUES ('t', 'x')"))
    for team, prefix, value, constraint in (
        ("t", "llm_1", good, "uq_api_keys_prefix"),
        ("t", "llm_2", "'short'", "ck_api_keys_whole_hash"),
        ("", "llm_2", good, "ck_api_keys_team"),
    ):
        with pytest.raises(asyncpg.IntegrityConstraintViolationError, match=constraint):
            asyncio.run(rows(empty, insert.format(team, prefix, value)))
    with pytest.raises(CommandError, match="revoked JWTs would be good again"):
        migrate(empty, "0002", down=True)
    assert asyncio.run(rows(empty, "SELECT token_id FROM revoked_tokens")) == ["x"]
    migrate(empty, "0002", down=True, force=True)
    assert asyncio.run(rows(empty, SCHEMA)) == schema
    migrate(empty)


@pytest.mark.parametrize(
    "change", ["store = false", "store = false, output = NULL, erased_at = now()"]
)
@pytest.mark.trial
def test_a_way_back_does_not_forget_what_is_to_be_erased_or_was(
    empty: Settings, change: str
) -> None:
    migrate(empty)
    for statement in OLD_ROWS:
        asyncio.run(rows(empty, statement))
    migrate(empty, "0005", down=True)  # nothing is forgotten
    migrate(empty)
    asyncio.run(rows(empty, f"UPDATE results SET {change} WHERE state = 'completed'"))
    with pytest.raises(CommandError, match="--force"):
        migrate(empty, "0005", down=True)
    # Nothing has changed: the service goes on.
    kept = asyncio.run(rows(empty, "SELECT store::text FROM results WHERE state = 'completed'"))
    assert kept == ["false"]
    migrate(empty)
    migrate(empty, "0005", down=True, force=True)
    assert asyncio.run(rows(empty, "SELECT version_num FROM alembic_version")) == ["0005"]


def test_the_context_of_a_trace_comes_and_goes(empty: Settings) -> None:
    """Revision 0013, up and down with rows in the table."""
    migrate(empty, "0011")
    schema = asyncio.run(rows(empty, SCHEMA))
    for statement in OLD_ROWS:
        asyncio.run(rows(empty, statement))
    everything = asyncio.run(rows(empty, EVERYTHING))
    migrate(empty, "0013")
    assert asyncio.run(rows(empty, "SELECT trace FROM results")) == [None] * 3
    asyncio.run(rows(empty, "UPDATE results SET trace = '00-a-b-01'"))
    migrate(empty, "0011", down=True)
    assert asyncio.run(rows(empty, SCHEMA)) == schema
    assert asyncio.run(rows(empty, EVERYTHING)) == everything
    migrate(empty)


def test_kept_text_of_a_lost_attempt_is_dropped_on_the_way_back(empty: Settings) -> None:
    """Revision 0015, up and down with rows in its tables: dropped parts are generated again."""
    migrate(empty, "0014")
    schema = asyncio.run(rows(empty, SCHEMA))
    for statement in OLD_ROWS:
        asyncio.run(rows(empty, statement))
    everything = asyncio.run(rows(empty, EVERYTHING))
    migrate(empty, "0015")
    # Older waiting results start over, as before.
    assert set(asyncio.run(rows(empty, "SELECT resumable::text FROM results"))) == {"false"}
    kept = """UPDATE results SET resumable = true, text_attempt = 1, continuations = 2, attempt = 2
              WHERE state = 'pending'"""
    asyncio.run(rows(empty, kept))
    asyncio.run(rows(empty, "UPDATE result_chunks SET token_ids = 'abcd'"))
    migrate(empty, "0014", down=True)
    assert asyncio.run(rows(empty, SCHEMA)) == schema
    assert asyncio.run(rows(empty, "SELECT text FROM result_chunks")) == []
    asyncio.run(rows(empty, "UPDATE results SET attempt = 0 WHERE state = 'pending'"))
    left = asyncio.run(rows(empty, EVERYTHING))
    assert set(left) < set(everything)
    assert len(left) == len(everything) - 1
    migrate(empty)


def test_pending_results_stay_when_api_processes_are_named(empty: Settings) -> None:
    """Revision 0016, up and down with rows in its tables."""
    migrate(empty, "0015")
    schema = asyncio.run(rows(empty, SCHEMA))
    for statement in OLD_ROWS:
        asyncio.run(rows(empty, statement))
    everything = asyncio.run(rows(empty, EVERYTHING))
    migrate(empty, "0016")
    assert asyncio.run(rows(empty, "SELECT 1 FROM results WHERE waiter_id IS NOT NULL")) == []
    asyncio.run(rows(empty, f"INSERT INTO api_processes VALUES ({CONTEXT}, now())"))
    asyncio.run(rows(empty, f"UPDATE results SET waiter_id = {CONTEXT} WHERE state = 'pending'"))
    migrate(empty, "0015", down=True)
    assert asyncio.run(rows(empty, SCHEMA)) == schema
    assert asyncio.run(rows(empty, EVERYTHING)) == everything
    migrate(empty)


def test_servers_with_a_secret_are_not_forgotten(empty: Settings) -> None:
    """Revision 0017, up and down: the former service could not reach a server with a secret."""
    migrate(empty, "0016")
    schema = asyncio.run(rows(empty, SCHEMA))
    launch = """INSERT INTO launches (id, team_id, name, provider, profile, model, spec)
                VALUES (gen_random_uuid(), 'red', 'old', 'local', 'local', 'demo', '{}')"""
    asyncio.run(rows(empty, launch))
    asyncio.run(rows(empty, "INSERT INTO servers (name, grpc) VALUES ('old', 'a:1')"))
    migrate(empty, "0017")
    both = "SELECT secret FROM servers UNION ALL SELECT secret FROM launches"
    assert asyncio.run(rows(empty, both)) == [None, None]
    migrate(empty, "0016", down=True)  # no server needs a secret
    assert asyncio.run(rows(empty, SCHEMA)) == schema
    for table in ("servers", "launches"):
        migrate(empty, "0017")
        asyncio.run(rows(empty, f"UPDATE {table} SET secret = md5('x')"))
        with pytest.raises(CommandError, match="out of reach"):
            migrate(empty, "0016", down=True)
        migrate(empty, "0016", down=True, force=True)
    assert asyncio.run(rows(empty, "SELECT name FROM servers")) == ["old"]
    migrate(empty)


@pytest.mark.trial
def test_jobs_come_beside_rows_and_are_not_forgotten(empty: Settings) -> None:
    """Revision 0021, up and down with rows in its tables."""
    migrate(empty, "0020")
    schema = asyncio.run(rows(empty, SCHEMA))
    for statement in OLD_ROWS:
        asyncio.run(rows(empty, statement))
    everything = asyncio.run(rows(empty, EVERYTHING))
    migrate(empty, "0021")
    assert asyncio.run(rows(empty, "SELECT 1 FROM results WHERE job_id IS NOT NULL")) == []
    migrate(empty, "0020", down=True)  # there is no job
    assert asyncio.run(rows(empty, SCHEMA)) == schema
    assert asyncio.run(rows(empty, EVERYTHING)) == everything
    migrate(empty, "0021")
    job = f"INSERT INTO jobs (id, team_id, priority, max_rows) VALUES ({CONTEXT}, 'red', 0, 9)"
    asyncio.run(rows(empty, job))
    asyncio.run(rows(empty, f"UPDATE results SET job_id = {CONTEXT} WHERE state = 'pending'"))
    # As a worker of the former version ends it.
    end = "UPDATE results SET state = 'completed', output = '', finished_at = now() WHERE state = 'pending'"
    asyncio.run(rows(empty, end))
    asyncio.run(rows(empty, "DELETE FROM results WHERE state = 'completed'"))
    assert asyncio.run(rows(empty, "SELECT ended_as FROM job_events")) == ["completed"]
    one = f"""INSERT INTO results (id, context_id, model_name, parameters, deadline_at, job_id)
              VALUES ({RESULT.format(6)}, {CONTEXT}, 'm', '{{}}', now(), {CONTEXT})"""
    asyncio.run(rows(empty, one))
    asyncio.run(rows(empty, f"DELETE FROM results WHERE id = {RESULT.format(6)}"))
    ends = asyncio.run(rows(empty, "SELECT ended_as FROM job_events ORDER BY id"))
    assert ends == ["completed", "deleted"]
    with pytest.raises(CommandError, match="would run again"):
        migrate(empty, "0020", down=True)
    migrate(empty, "0020", down=True, force=True)
    assert asyncio.run(rows(empty, SCHEMA)) == schema
    assert asyncio.run(rows(empty, "SELECT state FROM results")) == ["failed"]
    migrate(empty)


def test_deliveries_of_jobs_are_dropped_on_the_way_back(empty: Settings) -> None:
    """Revision 0023, up and down with rows in its table."""
    migrate(empty, "0022")
    schema = asyncio.run(rows(empty, SCHEMA))
    for statement in (*OLD_ROWS, NEW_ROWS[2]):
        asyncio.run(rows(empty, statement))
    migrate(empty, "0023")
    assert asyncio.run(rows(empty, "SELECT is_job::text FROM webhook_deliveries")) == ["false"]
    of_job = f"""INSERT INTO webhook_deliveries (result_id, is_job, team_id, url)
                 VALUES ({CONTEXT}, true, 'default', 'https://example.org/')"""
    asyncio.run(rows(empty, of_job))
    migrate(empty, "0022", down=True)
    assert asyncio.run(rows(empty, SCHEMA)) == schema
    assert len(asyncio.run(rows(empty, "SELECT url FROM webhook_deliveries"))) == 1
    migrate(empty)


@pytest.mark.trial
def test_log_probabilities_of_prompts_are_not_forgotten(empty: Settings) -> None:
    """Revision 0025, up and down with rows in its table."""
    migrate(empty, "0024")
    schema = asyncio.run(rows(empty, SCHEMA))
    for statement in OLD_ROWS:
        asyncio.run(rows(empty, statement))
    everything = asyncio.run(rows(empty, EVERYTHING))
    migrate(empty, "0025")
    assert asyncio.run(rows(empty, "SELECT prompt_logprobs FROM results")) == [None] * 3
    migrate(empty, "0024", down=True)
    assert asyncio.run(rows(empty, SCHEMA)) == schema
    assert asyncio.run(rows(empty, EVERYTHING)) == everything
    migrate(empty, "0025")
    asyncio.run(rows(empty, "UPDATE results SET prompt_logprobs = '[null]'"))
    with pytest.raises(CommandError, match="log probabilities"):
        migrate(empty, "0024", down=True)
    migrate(empty, "0024", down=True, force=True)
    assert asyncio.run(rows(empty, SCHEMA)) == schema
    migrate(empty)


def test_embeddings_are_not_forgotten(empty: Settings) -> None:
    """Revision 0027, up and down with rows in its table."""
    migrate(empty, "0026")
    schema = asyncio.run(rows(empty, SCHEMA))
    for statement in OLD_ROWS:
        asyncio.run(rows(empty, statement))
    everything = asyncio.run(rows(empty, EVERYTHING))
    migrate(empty, "0027")
    assert asyncio.run(rows(empty, "SELECT vector FROM results")) == [None] * 3
    migrate(empty, "0026", down=True)
    assert asyncio.run(rows(empty, SCHEMA)) == schema
    assert asyncio.run(rows(empty, EVERYTHING)) == everything
    migrate(empty, "0027")
    asyncio.run(rows(empty, "UPDATE results SET kind = 'score' WHERE state = 'failed'"))
    embedding = (
        "UPDATE results SET kind = 'embedding', vector = '\\x0000803f' WHERE state = 'completed'"
    )
    asyncio.run(rows(empty, embedding))
    with pytest.raises(CommandError, match="embeddings"):
        migrate(empty, "0026", down=True)
    migrate(empty, "0026", down=True, force=True)
    assert asyncio.run(rows(empty, SCHEMA)) == schema
    assert asyncio.run(rows(empty, "SELECT state FROM results")) == ["pending"]
    migrate(empty)


def test_reused_results_are_not_forgotten(empty: Settings) -> None:
    """Revision 0028, up and down with rows in its table."""
    migrate(empty, "0027")
    schema = asyncio.run(rows(empty, SCHEMA))
    for statement in OLD_ROWS:
        asyncio.run(rows(empty, statement))
    everything = asyncio.run(rows(empty, EVERYTHING))
    migrate(empty, "0028")
    assert asyncio.run(rows(empty, "SELECT reuse_digest FROM results")) == [None] * 3
    migrate(empty, "0027", down=True)
    assert asyncio.run(rows(empty, SCHEMA)) == schema
    assert asyncio.run(rows(empty, EVERYTHING)) == everything
    migrate(empty, "0028")
    asyncio.run(rows(empty, "UPDATE results SET reused_from = id"))
    with pytest.raises(CommandError, match="reused results"):
        migrate(empty, "0027", down=True)
    migrate(empty, "0027", down=True, force=True)
    assert asyncio.run(rows(empty, SCHEMA)) == schema
    migrate(empty)


def test_indexes_of_failed_results(empty: Settings) -> None:
    """Revision 0029, up and down with rows in its table."""
    migrate(empty, "0028")
    schema = asyncio.run(rows(empty, SCHEMA))
    for statement in OLD_ROWS:
        asyncio.run(rows(empty, statement))
    everything = asyncio.run(rows(empty, EVERYTHING))
    migrate(empty, "0029")
    assert sum("INCLUDE" in line for line in asyncio.run(rows(empty, SCHEMA))) == 4
    migrate(empty, "0028", down=True)
    assert asyncio.run(rows(empty, SCHEMA)) == schema
    assert asyncio.run(rows(empty, EVERYTHING)) == everything
    migrate(empty, "0029")
    assert asyncio.run(rows(empty, EVERYTHING)) == everything
    migrate(empty)


def test_reuse_of_teams(empty: Settings) -> None:
    """Revision 0030, up and down with rows in its table."""
    migrate(empty, "0029")
    schema = asyncio.run(rows(empty, SCHEMA))
    asyncio.run(rows(empty, "INSERT INTO team_limits (team_id, max_queued) VALUES ('red', 7)"))
    read = "SELECT to_jsonb(l)::text FROM team_limits l ORDER BY 1"
    limits = asyncio.run(rows(empty, read))
    migrate(empty, "0030")
    assert asyncio.run(rows(empty, "SELECT reuse FROM team_limits")) == [None]
    asyncio.run(rows(empty, "UPDATE team_limits SET reuse = true"))
    migrate(empty, "0029", down=True)
    assert asyncio.run(rows(empty, SCHEMA)) == schema
    assert asyncio.run(rows(empty, read)) == limits
    migrate(empty)
    assert asyncio.run(rows(empty, "SELECT reuse FROM team_limits")) == [None]


def test_existing_results_get_tags(empty: Settings) -> None:
    """Revision 0031, up and down with rows in its table, and again after an interruption."""
    migrate(empty, "0030")
    schema = asyncio.run(rows(empty, SCHEMA))
    for statement in OLD_ROWS:
        asyncio.run(rows(empty, statement))
    pairs = '{"run": "a", "n": 7, "is": true, "list": [1], "none": null}'
    add = f"UPDATE results SET metadata = '{pairs}' WHERE id = {RESULT.format(3)}"
    asyncio.run(rows(empty, add))
    read = "SELECT team_id || result_id || encode(tag, 'hex') FROM result_tags ORDER BY tag"
    tags = [tag_of("run", "a"), tag_of("n", "7"), tag_of("is", "true")]
    wanted = [f"default{RESULT.format(3)[1:-1]}{tag.hex()}" for tag in sorted(tags)]
    migrate(empty, "0031")
    assert asyncio.run(rows(empty, read)) == wanted
    # Interrupted after the first step: the schema is there, the revision is not, some tags are.
    asyncio.run(rows(empty, f"DELETE FROM result_tags WHERE tag = '\\x{max(tags).hex()}'"))
    asyncio.run(rows(empty, "UPDATE alembic_version SET version_num = '0030'"))
    migrate(empty, "0031")
    assert asyncio.run(rows(empty, read)) == wanted
    # The downgrade leaves a schema in which results come and go.
    migrate(empty, "0030", down=True)
    assert asyncio.run(rows(empty, SCHEMA)) == schema
    copy = f"""
        INSERT INTO results (id, context_id, model_name, parameters, deadline_at, metadata)
        SELECT '{{}}', context_id, model_name, parameters, deadline_at, metadata FROM results
        WHERE id = {RESULT.format(3)}"""
    for last in (8, 9):
        asyncio.run(rows(empty, copy.format(RESULT.format(last)[1:-1])))
    asyncio.run(rows(empty, f"DELETE FROM results WHERE id = {RESULT.format(8)}"))
    migrate(empty)
    assert len(asyncio.run(rows(empty, read))) == 2 * len(tags)
    asyncio.run(rows(empty, f"DELETE FROM results WHERE id = {RESULT.format(9)}"))
    assert asyncio.run(rows(empty, read)) == wanted


def migrating(settings: Settings) -> subprocess.Popen[bytes]:
    """A process of its own that migrates."""
    environment = os.environ | {
        "LLM_DATABASE_URL": settings.database_host,
        "LLM_DATABASE_ADMIN_USER": settings.database_user,
        "LLM_DATABASE_PASSWORD": settings.database_password.get_secret_value(),
        "LLM_DATABASE_DB": settings.database_name,
    }
    return subprocess.Popen([sys.executable, "-m", "app", "migrate"], cwd=ROOT, env=environment)


@pytest.mark.trial
def test_two_processes_may_migrate_at_once(empty: Settings) -> None:
    processes = [migrating(empty) for _ in range(2)]
    assert [process.wait(60) for process in processes] == [0, 0]
    assert len(asyncio.run(rows(empty, "SELECT version_num FROM alembic_version"))) == 1


def test_the_migrations_make_what_tables_says(empty: Settings) -> None:
    migrate(empty)

    def differences(connection: Connection) -> list[object]:
        context = MigrationContext.configure(
            connection, opts={"compare_type": True, "compare_server_default": True}
        )
        return list(compare_metadata(context, metadata))

    async def compare() -> list[object]:
        engine = make_engine(empty)
        async with engine.connect() as connection:
            found = await connection.run_sync(differences)
        await engine.dispose()
        return found

    assert asyncio.run(compare()) == []


def test_downloads_that_run_are_not_forgotten(empty: Settings) -> None:
    """Revision 0032, up and down."""
    migrate(empty, "0031")
    schema = asyncio.run(rows(empty, SCHEMA))
    migrate(empty, "0032")
    download = """INSERT INTO model_downloads (id, team_id, profile, model, revision)
                  VALUES (gen_random_uuid(), 'red', 'here', 'owner/name', 'main')"""
    asyncio.run(rows(empty, download))
    with pytest.raises(asyncpg.UniqueViolationError, match="ix_model_downloads_open"):
        asyncio.run(rows(empty, download))
    with pytest.raises(CommandError, match="would be forgotten"):
        migrate(empty, "0031", down=True)
    with pytest.raises(asyncpg.CheckViolationError, match="ck_model_downloads_ended"):
        asyncio.run(rows(empty, "UPDATE model_downloads SET state = 'failed'"))
    with pytest.raises(asyncpg.CheckViolationError, match="ck_model_downloads_state"):
        asyncio.run(rows(empty, "UPDATE model_downloads SET state = 'x', ended_at = now()"))
    asyncio.run(rows(empty, "UPDATE model_downloads SET state = 'failed', ended_at = now()"))
    asyncio.run(rows(empty, download))
    migrate(empty, "0031", down=True, force=True)
    assert asyncio.run(rows(empty, SCHEMA)) == schema
    migrate(empty, "0032")
    migrate(empty, "0031", down=True)
    assert asyncio.run(rows(empty, SCHEMA)) == schema


@pytest.mark.trial
def test_checks_and_partial_indexes_too(empty: Settings) -> None:
    """The parts that autogenerate does not compare: the conditions of checks and of partial indexes."""
    migrate(empty)
    migrated = asyncio.run(rows(empty, SCHEMA))
    migrate(empty, "base", down=True)

    async def create() -> None:
        engine = make_engine(empty)
        async with engine.begin() as connection:
            await connection.run_sync(metadata.create_all)
        await engine.dispose()

    asyncio.run(create())
    assert asyncio.run(rows(empty, SCHEMA)) == migrated


@pytest.mark.parametrize(
    ("change", "constraint"),
    [
        ("state = 'running', finished_at = now()", "ck_results_state"),
        ("state = 'completed', output = ''", "ck_results_finished"),
        ("state = 'completed', finished_at = now()", "ck_results_completed_has_output"),
        ("state = 'failed', finished_at = now()", "ck_results_failed_has_error"),
        ("state = 'failed', finished_at = now(), error_code = 'x'", "ck_results_whole_error"),
        (
            "error_code = 'x', error_message = 'y', error_retryable = true",
            "ck_results_failed_has_error",
        ),
        ("finished_at = now()", "ck_results_finished"),
        ("on_disconnect = 'x'", "ck_results_on_disconnect"),
        ("kind = 'x'", "ck_results_kind"),
        ("parameters = '[]'", "ck_results_parameters_object"),
        ("erased_at = now()", "ck_results_erased_at_end"),
    ],
)
def test_impossible_rows_are_refused(empty: Settings, change: str, constraint: str) -> None:
    migrate(empty)
    context = secrets.token_hex(16)
    asyncio.run(rows(empty, f"INSERT INTO contexts (id, content) VALUES ('{context}', 'x')"))
    asyncio.run(
        rows(
            empty,
            "INSERT INTO results (id, context_id, model_name, parameters, deadline_at) "
            f"VALUES ('{context}', '{context}', 'm', '{{}}', now())",
        )
    )
    with pytest.raises(asyncpg.IntegrityConstraintViolationError, match=f'"{constraint}"'):
        asyncio.run(rows(empty, f"UPDATE results SET {change}"))
    with pytest.raises(asyncpg.CheckViolationError, match="ck_contexts_one_form"):
        asyncio.run(rows(empty, "UPDATE contexts SET messages = '[]'"))


async def rows(settings: Settings, query: str) -> list[str]:
    connection = await connect(settings)
    try:
        return [row[0] for row in await connection.fetch(query)]
    finally:
        await connection.close()
