"""The schema: SQLAlchemy metadata that Alembic compares with the database.

Queries are SQL, written where they are used. Creation times have no column: they are inside the
UUIDv7 ids.
"""

from app.core.tables import batches, history, jobs, results, servers, tags, teams, usage, webhooks
from app.core.tables.schema import metadata

# Importing a module declares its tables.
TABLES = (batches, history, jobs, results, servers, tags, teams, usage, webhooks)
__all__ = ["TABLES", "metadata"]
