"""result tags: an index of the pairs in the metadata of results, filled for the existing ones

A trigger writes the tags of new results, also of those that older processes store; older processes read
none. The existing results follow in pieces, beside a service in use. After an interruption all of it runs
again.

Revision: 0031
Revises: 0030
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.exc import DBAPIError

from app.core import schema_changes

revision = "0031"
down_revision = "0030"
branch_labels = None
depends_on = None

_PIECE = 5_000  # results of a transaction
_DEADLOCK = "40P01"

_DELETE_ROWS = """
CREATE OR REPLACE FUNCTION delete_rows_of_results() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
  ids uuid[] := ARRAY(SELECT id FROM gone);
BEGIN
  DELETE FROM result_search WHERE result_id = ANY (ids);
  DELETE FROM idempotency_keys WHERE result_id = ANY (ids);
  DELETE FROM webhook_deliveries WHERE result_id = ANY (ids);
  {tags}
  INSERT INTO job_events (job_id, result_id, ended_as, rows)
  SELECT job_id, id, 'deleted', 1 FROM gone WHERE job_id IS NOT NULL AND state = 'pending';
  RETURN NULL;
END $$
"""
_DELETE_TAGS = """DELETE FROM result_tags WHERE ctid = ANY (ARRAY(
    SELECT t.place FROM gone g CROSS JOIN LATERAL tags_of_metadata(g.metadata) AS tag
    CROSS JOIN LATERAL (SELECT ctid AS place FROM result_tags
      WHERE (team_id, tag, result_id) = (g.team_id, tag.tag, g.id) OFFSET 0) t
    WHERE g.metadata <> '{}'));"""

# Results are held, in the order of ids: their deletion waits, and then deletes their tags.
_FILL = """
WITH page AS MATERIALIZED (
  SELECT id, metadata <> '{}' AS is_tagged FROM results WHERE id > $1 ORDER BY id LIMIT $2
), held AS MATERIALIZED (
  SELECT id, team_id, metadata FROM results
  WHERE id = ANY (ARRAY(SELECT id FROM page WHERE is_tagged)) ORDER BY id FOR KEY SHARE
), filled AS (
  INSERT INTO result_tags (team_id, tag, result_id)
  SELECT h.team_id, tag, h.id FROM held h CROSS JOIN LATERAL tags_of_metadata(h.metadata) AS tag
  ON CONFLICT DO NOTHING
)
SELECT id FROM page ORDER BY id DESC LIMIT 1
"""


def upgrade() -> None:
    schema_changes.lock_tables("results")
    op.create_table(
        "result_tags",
        sa.Column("team_id", sa.String(), nullable=False),
        sa.Column("tag", sa.LargeBinary(), nullable=False),
        sa.Column("result_id", sa.UUID(), nullable=False),
        sa.PrimaryKeyConstraint("team_id", "tag", "result_id", name=op.f("pk_result_tags")),
        if_not_exists=True,
        postgresql_with={
            "autovacuum_vacuum_scale_factor": 0.05,
            "autovacuum_vacuum_insert_scale_factor": 0.05,
            "autovacuum_analyze_scale_factor": 0.05,
        },
    )
    op.execute(r"""
        CREATE OR REPLACE FUNCTION tags_of_metadata(metadata jsonb) RETURNS SETOF bytea
        LANGUAGE sql STABLE AS $$
        SELECT substr(sha256(
          convert_to(e.key, 'UTF8') || '\x00'::bytea || convert_to(e.value #>> '{}', 'UTF8')), 1, 16)
        FROM jsonb_each(metadata) e WHERE jsonb_typeof(e.value) IN ('string', 'number', 'boolean')
        $$
    """)
    op.execute("""
        CREATE OR REPLACE FUNCTION insert_tags_of_result() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
          INSERT INTO result_tags (team_id, tag, result_id)
          SELECT NEW.team_id, tag, NEW.id FROM tags_of_metadata(NEW.metadata) AS tag
          ON CONFLICT DO NOTHING;
          RETURN NULL;
        END $$
    """)
    op.execute(_DELETE_ROWS.format(tags=_DELETE_TAGS))
    op.execute("""
        CREATE OR REPLACE TRIGGER insert_tags AFTER INSERT ON results
        FOR EACH ROW WHEN (NEW.metadata <> '{}'::jsonb) EXECUTE FUNCTION insert_tags_of_result()
    """)
    with schema_changes.outside_transactions():
        last: str | None = "00000000-0000-0000-0000-000000000000"
        while last is not None:
            last = _fill_behind(last)


def _fill_behind(last: str) -> str | None:
    """Fill a piece; its last id, or None at the end of the table."""
    while True:
        try:
            filled: str | None = op.get_bind().exec_driver_sql(_FILL, (last, _PIECE)).scalar()
        except DBAPIError as error:
            # Processes of the former version delete a context's pending results before its ended ones.
            if getattr(error.orig, "sqlstate", None) != _DEADLOCK:
                raise
        else:
            return filled


def downgrade() -> None:
    schema_changes.lock_tables("results", "result_tags")
    op.execute("DROP TRIGGER insert_tags ON results")
    op.execute("DROP FUNCTION insert_tags_of_result")
    op.execute(_DELETE_ROWS.format(tags=""))
    op.execute("DROP FUNCTION tags_of_metadata")
    op.drop_table("result_tags")
