"""A new migration in db/versions: the changes of app/core/tables that the present migrations lack.

    make migration MESSAGE="labels of results"

Starts a PostgreSQL of its own for it, and prints the path of the file. Exit status 1 if there is no change.
"""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config

from app.core.settings import Settings
from tests.conftest import ROOT, make_settings, migrate
from tests.postgres import start_postgres

_VERSIONS = ROOT / "db" / "versions"


def write_migration(settings: Settings, message: str, directory: Path = _VERSIONS) -> Path | None:
    """Write the changes that a migrated database lacks to a file; None if there are none."""
    config = Config(ROOT / "db" / "alembic.ini")
    config.attributes["settings"] = settings
    if directory != _VERSIONS:
        config.set_main_option("path_separator", "newline")
        config.set_main_option("version_locations", f"{_VERSIONS}\n{directory}")
    before = set(directory.glob("*.py"))
    command.revision(
        config,
        message,
        autogenerate=True,
        version_path=str(directory),
        process_revision_directives=_drop_if_empty,
    )
    for path in set(directory.glob("*.py")) - before:
        _tidy(path)
        return path
    return None


def _drop_if_empty(_context: Any, _revision: Any, directives: list[Any]) -> None:
    if directives[0].upgrade_ops.is_empty():
        directives.clear()


def _tidy(path: Path) -> None:
    """Format a migration, and remove the comments that Alembic puts into it."""
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if not line.startswith("    # ###")))
    ruff = Path(sys.executable).with_name("ruff")
    for arguments in (("check", "--fix", "--quiet"), ("format", "--quiet")):
        subprocess.run([ruff, *arguments, path], check=True, cwd=ROOT)  # noqa: S603


def main(message: str) -> int:
    """Write the migration for a checkout. Returns the exit status."""
    if not message:
        sys.stderr.write('Name the change: make migration MESSAGE="labels of results"\n')
        return 2
    sys.stderr.write("Starting a PostgreSQL, and migrating it to the last revision (10 s)\n")
    with tempfile.TemporaryDirectory() as directory, start_postgres(Path(directory)) as server:
        settings = make_settings(server, server.maintenance_database)
        migrate(settings)
        path = write_migration(settings, message)
    if path is None:
        sys.stderr.write("db/versions has all of app/core/tables: there is no migration to write\n")
        return 1
    sys.stdout.write(f"{path.relative_to(ROOT)}: see CONTRIBUTING.md, Add a column\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(" ".join(sys.argv[1:])))
