"""`make migration`: a file for the difference between the tables and a migrated database."""

import asyncio
import subprocess
from pathlib import Path

from app.core.schema_version import expected
from app.core.settings import Settings
from tests.conftest import ROOT, connect, migrate
from tests.integration.core.test_migrations import empty
from tools.new_migration import main, write_migration

__all__ = ["empty"]


async def _execute(settings: Settings, statement: str) -> None:
    connection = await connect(settings)
    try:
        await connection.execute(statement)
    finally:
        await connection.close()


def test_a_migration_has_the_next_number_and_passes_the_linter(
    empty: Settings, tmp_path: Path
) -> None:
    migrate(empty)
    assert write_migration(empty, "nothing", tmp_path) is None
    assert list(tmp_path.iterdir()) == []
    asyncio.run(_execute(empty, "ALTER TABLE results DROP COLUMN trace, DROP COLUMN attribution"))
    path = write_migration(empty, "traces of results", tmp_path)
    assert path is not None
    number = int(expected())
    assert path.name == f"{number + 1:04}_traces_of_results.py"
    text = path.read_text()
    assert f'revision = "{number + 1:04}"\ndown_revision = "{number:04}"\n' in text
    assert 'op.add_column("results", sa.Column("trace", sa.Text()' in text
    assert 'op.drop_column("results", "trace")' in text
    assert "postgresql.JSONB" in text
    assert "# ###" not in text
    ruff = ROOT / ".venv" / "bin" / "ruff"
    for arguments in (["check"], ["format", "--check"]):
        subprocess.run([ruff, *arguments, path], cwd=ROOT, check=True)


def test_a_migration_needs_a_name() -> None:
    assert main("") == 2
