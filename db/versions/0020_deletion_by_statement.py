"""deletion by statement: one query deletes what belongs to deleted results, instead of one for each row

Foreign keys ran a query for each deleted row, and one for each inserted row.

Revision: 0020
Revises: 0019
"""

from alembic import op

from app.core import schema_changes

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None

_OWNED = ("result_search", "idempotency_keys", "webhook_deliveries")


def upgrade() -> None:
    schema_changes.lock_tables("contexts", "results", *_OWNED)
    op.execute("""
        CREATE OR REPLACE FUNCTION delete_rows_of_results() RETURNS trigger LANGUAGE plpgsql AS $$
        DECLARE
          ids uuid[] := ARRAY(SELECT id FROM gone);
        BEGIN
          DELETE FROM result_search WHERE result_id = ANY (ids);
          DELETE FROM idempotency_keys WHERE result_id = ANY (ids);
          DELETE FROM webhook_deliveries WHERE result_id = ANY (ids);
          RETURN NULL;
        END $$
    """)
    op.execute("""
        CREATE OR REPLACE TRIGGER delete_rows AFTER DELETE ON results REFERENCING OLD TABLE AS gone
        FOR EACH STATEMENT EXECUTE FUNCTION delete_rows_of_results()
    """)
    for table in _OWNED:
        op.execute(f"ALTER TABLE {table} DROP CONSTRAINT IF EXISTS fk_{table}_result_id")
    op.execute("""
        CREATE OR REPLACE FUNCTION delete_results_of_contexts() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
          DELETE FROM results WHERE context_id = ANY (ARRAY(SELECT id FROM gone));
          RETURN NULL;
        END $$
    """)
    op.execute("DROP TRIGGER IF EXISTS delete_results ON contexts")
    op.execute("""
        CREATE TRIGGER delete_results AFTER DELETE ON contexts REFERENCING OLD TABLE AS gone
        FOR EACH STATEMENT EXECUTE FUNCTION delete_results_of_contexts()
    """)
    op.execute("DROP FUNCTION IF EXISTS delete_results_of_context")


def downgrade() -> None:
    schema_changes.lock_tables("contexts", "results", *_OWNED)
    op.execute("""
        CREATE OR REPLACE FUNCTION delete_results_of_context() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
          DELETE FROM results WHERE context_id = OLD.id;
          RETURN NULL;
        END $$
    """)
    op.execute("DROP TRIGGER IF EXISTS delete_results ON contexts")
    op.execute("""
        CREATE TRIGGER delete_results AFTER DELETE ON contexts
        FOR EACH ROW EXECUTE FUNCTION delete_results_of_context()
    """)
    op.execute("DROP FUNCTION IF EXISTS delete_results_of_contexts")
    for table in _OWNED:
        key = f"fk_{table}_result_id"
        op.execute(f"ALTER TABLE {table} DROP CONSTRAINT IF EXISTS {key}")
        op.execute(
            f"ALTER TABLE {table} ADD CONSTRAINT {key} FOREIGN KEY (result_id) "
            "REFERENCES results (id) ON DELETE CASCADE NOT VALID"
        )
    op.execute("DROP TRIGGER IF EXISTS delete_rows ON results")
    op.execute("DROP FUNCTION IF EXISTS delete_rows_of_results")
    with schema_changes.outside_transactions():
        for table in _OWNED:
            schema_changes.validate(table, f"fk_{table}_result_id")
