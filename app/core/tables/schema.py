"""The metadata of all tables, and what their columns share."""

from collections.abc import Sequence

import sqlalchemy as sa

metadata = sa.MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "pk": "pk_%(table_name)s",
    }
)

NOW = sa.text("now()")
EMPTY_OBJECT = sa.text("'{}'::jsonb")
EMPTY_LIST = sa.text("'[]'::jsonb")


def time(
    name: str, *, nullable: bool = True, default: sa.TextClause | None = None
) -> sa.Column[object]:
    return sa.Column(name, sa.DateTime(timezone=True), nullable=nullable, server_default=default)


def index(
    *columns: str | sa.TextClause,
    name: str | None = None,
    unique: bool = False,
    where: str | None = None,
    include: Sequence[str] | None = None,
) -> sa.Index:
    """An index, named after its columns by default, of all rows or of those `where` is true.

    `include`: further columns of its entries, so that tests of them need not read the rows.
    """
    condition = None if where is None else sa.text(where)
    return sa.Index(
        name, *columns, unique=unique, postgresql_where=condition, postgresql_include=include
    )
