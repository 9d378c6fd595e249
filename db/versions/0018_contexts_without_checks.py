"""contexts without checks: results are stored under a lock of their context, which a foreign key repeats

Its check took a fifth of PostgreSQL's time for a result that is stored. A trigger deletes the results of
a deleted context, as the foreign key did.

Revision: 0018
Revises: 0017
"""

from alembic import op

from app.core import schema_changes

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None

_TABLES = ("contexts", "results")
_KEY = "fk_results_context_id"


def upgrade() -> None:
    schema_changes.lock_tables(*_TABLES)
    op.execute("""
        CREATE OR REPLACE FUNCTION delete_results_of_context() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
          DELETE FROM results WHERE context_id = OLD.id;
          RETURN NULL;
        END $$
    """)
    op.execute("""
        CREATE OR REPLACE TRIGGER delete_results AFTER DELETE ON contexts
        FOR EACH ROW EXECUTE FUNCTION delete_results_of_context()
    """)
    op.execute(f"ALTER TABLE results DROP CONSTRAINT IF EXISTS {_KEY}")


def downgrade() -> None:
    schema_changes.lock_tables(*_TABLES)
    op.execute(f"ALTER TABLE results DROP CONSTRAINT IF EXISTS {_KEY}")
    op.execute(
        f"ALTER TABLE results ADD CONSTRAINT {_KEY} FOREIGN KEY (context_id) "
        "REFERENCES contexts (id) ON DELETE CASCADE NOT VALID"
    )
    op.execute("DROP TRIGGER IF EXISTS delete_results ON contexts")
    op.execute("DROP FUNCTION IF EXISTS delete_results_of_context")
    with schema_changes.outside_transactions():
        schema_changes.validate("results", _KEY)
