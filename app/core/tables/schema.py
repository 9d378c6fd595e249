"""The metadata of all tables, and what their columns share."""

from sqlalchemy import Column, DateTime, MetaData, text

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "pk": "pk_%(table_name)s",
    }
)

NOW = text("now()")
EMPTY_OBJECT = text("'{}'::jsonb")
EMPTY_LIST = text("'[]'::jsonb")


def time(name: str, *, nullable: bool = True) -> Column[object]:
    """A column of a point in time."""
    return Column(name, DateTime(timezone=True), nullable=nullable)
