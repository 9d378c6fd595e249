"""Tags: an index of the pairs in the metadata of results."""

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import UUID

from app.core.storage_parameters import LONG
from app.core.tables.results import results
from app.core.tables.schema import metadata

# One row for each pair whose value is a text, a number or a boolean. Results without metadata have none.
result_tags = sa.Table(
    "result_tags",
    metadata,
    sa.Column("team_id", sa.String, primary_key=True),
    # Digest of key and value, the same as `tag_of` in results/tags.py: no value is too long for an index.
    sa.Column("tag", sa.LargeBinary, primary_key=True),
    # No foreign key, see `delete_rows_of_results`.
    sa.Column("result_id", UUID, primary_key=True),
    postgresql_with=LONG,
)

# A trigger serves every statement that stores results, also those of the former version. Rows without
# metadata do not fire it.
_INSERT_TAGS = (
    """CREATE FUNCTION tags_of_metadata(metadata jsonb) RETURNS SETOF bytea LANGUAGE sql STABLE AS $$
        SELECT substr(sha256(
          convert_to(e.key, 'UTF8') || '\\x00'::bytea || convert_to(e.value #>> '{}', 'UTF8')), 1, 16)
        FROM jsonb_each(metadata) e WHERE jsonb_typeof(e.value) IN ('string', 'number', 'boolean')
        $$""",
    """CREATE FUNCTION insert_tags_of_result() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
          INSERT INTO result_tags (team_id, tag, result_id)
          SELECT NEW.team_id, tag, NEW.id FROM tags_of_metadata(NEW.metadata) AS tag
          ON CONFLICT DO NOTHING;
          RETURN NULL;
        END $$""",
    """CREATE TRIGGER insert_tags AFTER INSERT ON results
        FOR EACH ROW WHEN (NEW.metadata <> '{}'::jsonb) EXECUTE FUNCTION insert_tags_of_result()""",
)
for statement in _INSERT_TAGS:
    sa.event.listen(results, "after_create", sa.DDL(statement))  # type: ignore[no-untyped-call]
