"""Schema changes on tables in use: no reader or writer waits longer than a moment.

Adding a column with a constant default or a constraint that is not yet valid takes milliseconds under
an exclusive lock (`lock_tables`). Steps that read a whole table (an index, the validation of a
constraint) run outside transactions, concurrently with readers and writers. They may be interrupted,
so each of them tolerates the leftovers of an earlier run.
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

# Later statements queue behind a waiting lock: a short wait, and a pause that lets them pass.
_LOCK_MILLISECONDS = 500
_PAUSE_SECONDS = 0.5
_TRIES = 300
_LOCK_NOT_AVAILABLE = "55P03"

Columns = Sequence[str | sa.TextClause]


def lock_tables(*tables: str) -> None:
    """Lock tables exclusively until the transaction ends, for changes that take no time.

    Name all tables that the transaction changes: none is held while another is awaited. Raises
    DBAPIError if another transaction holds one of them for minutes.
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
    """Add a column without a default or with a constant one; no row is written."""
    op.add_column(table, column, if_not_exists=True)


def replace_check(table: str, name: str, condition: str) -> None:
    """Replace a constraint for new rows; `validate` checks the existing ones."""
    op.drop_constraint(op.f(name), table, if_exists=True)
    op.create_check_constraint(op.f(name), table, condition, postgresql_not_valid=True)


@contextlib.contextmanager
def outside_transactions() -> Iterator[None]:
    """Commit, and run each statement of the block in a transaction of its own.

    The statements wait for older transactions without a time limit; they block no others meanwhile.
    """
    with op.get_context().autocommit_block():
        op.execute("SET lock_timeout = 0")
        yield
        op.execute("RESET lock_timeout")


def validate(table: str, *names: str) -> None:
    for name in names:
        op.execute(f"ALTER TABLE {table} VALIDATE CONSTRAINT {name}")


def create_index(
    name: str,
    table: str,
    columns: Columns,
    where: sa.TextClause | None = None,
    *,
    unique: bool = False,
    include: Sequence[str] = (),
) -> None:
    """Build an index concurrently; call it `outside_transactions`.

    An interrupted build leaves an invalid index of that name, which is dropped first.
    """
    drop_index(name, table)
    op.create_index(
        name,
        table,
        columns,
        unique=unique,
        postgresql_where=where,
        postgresql_include=include,
        postgresql_concurrently=True,
    )


def replace_index(
    name: str,
    table: str,
    columns: Columns,
    where: sa.TextClause | None = None,
    *,
    include: Sequence[str] = (),
) -> None:
    """Replace an index by one on other columns; the old one serves until then."""
    create_index(f"{name}_new", table, columns, where, include=include)
    drop_index(name, table)
    op.execute(f"ALTER INDEX {name}_new RENAME TO {name}")


def drop_index(name: str, table: str) -> None:
    op.drop_index(name, table, if_exists=True, postgresql_concurrently=True)


def refuse_to_forget(query: str, what: str) -> None:
    """Refuse a downgrade that would lose data, unless `migrate --force` is given.

    `query` finds the rows concerned; `what` describes the loss in a sentence.
    """
    if context.get_x_argument(as_dictionary=True).get("force") == "yes":
        return
    if op.get_bind().exec_driver_sql(f"SELECT EXISTS ({query})").scalar_one():
        raise CommandError(f"The downgrade is refused: {what} Add --force to accept that.")
