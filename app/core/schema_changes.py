"""How migrations change tables that are in use: no reader and no writer waits longer than a moment.

A column with a constant default or a constraint that is not valid yet is a matter of milliseconds,
once a lock is had that nobody else may hold (`lock_tables`). What reads a whole table (an index, the
validation of a constraint) runs outside of transactions, beside readers and writers. It may be
interrupted there, so each of these steps gets over what its own first run has left.
https://www.postgresql.org/docs/current/sql-createindex.html#SQL-CREATEINDEX-CONCURRENTLY
"""

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import sqlalchemy as sa
from alembic import context, op
from alembic.util import CommandError
from sqlalchemy.exc import DBAPIError

# Whoever comes while a lock is waited for waits behind it: a short wait, and a pause to let them by.
_LOCK_MILLISECONDS = 500
_PAUSE_SECONDS = 0.5
_TRIES = 300
_LOCK_NOT_AVAILABLE = "55P03"

Columns = Sequence[str | sa.TextClause]


def lock_tables(*tables: str) -> None:
    """Have tables alone until the transaction ends, for changes that take no time.

    All that the transaction changes, at once: none is held while another is waited for. Raises
    DBAPIError if others hold one of them for minutes.
    """
    connection = op.get_bind()
    for left in reversed(range(_TRIES)):
        try:
            with connection.begin_nested():
                connection.exec_driver_sql(f"SET LOCAL lock_timeout = {_LOCK_MILLISECONDS}")
                connection.exec_driver_sql(
                    f"LOCK TABLE {', '.join(tables)} IN ACCESS EXCLUSIVE MODE"
                )
        except DBAPIError as error:
            if getattr(error.orig, "sqlstate", None) != _LOCK_NOT_AVAILABLE or not left:
                raise
            time.sleep(_PAUSE_SECONDS)
        else:
            return


def add_column(table: str, column: sa.Column[Any]) -> None:
    """Add a column without a default, or with a constant one: no row is written."""
    op.add_column(table, column, if_not_exists=True)


def replace_check(table: str, name: str, condition: str) -> None:
    """Have a constraint hold for what is written from now on; `validate` judges what is there."""
    op.drop_constraint(op.f(name), table, if_exists=True)
    op.create_check_constraint(op.f(name), table, condition, postgresql_not_valid=True)


@contextlib.contextmanager
def outside_transactions() -> Iterator[None]:
    """Commit what was done, and run each statement of the block by itself.

    They wait for transactions that are older than they, as long as it takes: meanwhile they are in
    nobody's way.
    """
    with op.get_context().autocommit_block():
        op.execute("SET lock_timeout = 0")
        yield
        op.execute("RESET lock_timeout")


def validate(table: str, *names: str) -> None:
    """Judge the rows by constraints that are not valid yet; call it `outside_transactions`."""
    for name in names:
        op.execute(f"ALTER TABLE {table} VALIDATE CONSTRAINT {name}")


def create_index(
    name: str,
    table: str,
    columns: Columns,
    where: sa.TextClause | None = None,
    *,
    unique: bool = False,
) -> None:
    """Build an index beside readers and writers; call it `outside_transactions`.

    What an interrupted building has left is an invalid index under its name: it is built anew.
    """
    drop_index(name, table)
    op.create_index(
        name, table, columns, unique=unique, postgresql_where=where, postgresql_concurrently=True
    )


def replace_index(
    name: str,
    table: str,
    columns: Columns,
    where: sa.TextClause | None = None,
) -> None:
    """Build an index anew with other columns; until it is there the old one serves."""
    create_index(f"{name}_new", table, columns, where)
    drop_index(name, table)
    op.execute(f"ALTER INDEX {name}_new RENAME TO {name}")


def drop_index(name: str, table: str) -> None:
    """Drop an index, if there is one; call it `outside_transactions`."""
    op.drop_index(name, table, if_exists=True, postgresql_concurrently=True)


def refuse_to_forget(query: str, what: str) -> None:
    """Stop a downgrade that would forget a promise, unless `-x force=yes` asks for that.

    `query` finds one of the rows in question, and `what` says what would become of them.
    """
    if context.get_x_argument(as_dictionary=True).get("force") == "yes":
        return
    if op.get_bind().exec_driver_sql(f"SELECT EXISTS ({query})").scalar_one():
        raise CommandError(f"The downgrade is refused: {what} Add `-x force=yes` to accept that.")
