"""`python -m app index remove`: removes documents from an index without a new build."""

import argparse
import sys
from pathlib import Path

from app.cli import index_help
from app.cli.arguments import Subcommands, add_command
from app.cli.index_support import fail, needed_file, needed_index, reports_errors, to_path
from app.cli.progress_line import ProgressLine
from app.infini_gram.declarations import (
    Declaration,
    DeclarationError,
    declare_removed,
    removed_line,
    sole_writer,
)
from app.infini_gram.reduced_engine import open_engine
from app.infini_gram.removal import remove


def add_to(actions: Subcommands) -> argparse.ArgumentParser:
    text = "Remove documents from an index, which is not built again."
    command = add_command(actions, "remove", text, _remove, index_help.REMOVE_EPILOG)
    command.add_argument("name", help="the index, as it is declared")
    text = "a document: its number (documentIndex), or PATH:LINE of its metadata"
    command.add_argument("documents", nargs="*", metavar="document", help=text)
    text = "a file with more of them, one a line"
    command.add_argument("--from", dest="listed", type=to_path, metavar="FILE", help=text)
    text = "documents are values of this member of the corpus's metadata, such as `url`"
    command.add_argument("--by", metavar="MEMBER", help=text)
    return command


@reports_errors
def _remove(options: argparse.Namespace) -> int:
    file = needed_file(options)
    needed_index(file, options.name)
    with sole_writer(file):
        return _change(options, file, needed_index(file, options.name))


def _change(options: argparse.Namespace, file: Path, found: Declaration) -> int:
    entries: list[str] = [*options.documents, *_listed(options.listed)]
    if not entries:
        raise DeclarationError("Name documents, or a file of them with --from")
    with ProgressLine() as line:
        removal = remove(found, entries, options.by, line.report)
        open_engine(removal.declaration)
    sys.stdout.write(
        f"{removal.added:,} documents removed from {found.name}, {removal.total:,} in all\n"
    )
    if removal.declaration == found:
        if removal.added:
            sys.stdout.write("Running APIs leave them out within seconds.\n")
        return 0
    try:
        if found.removed_paths:
            raise DeclarationError("it has a line `removed` already")
        declare_removed(file, removal.declaration)
    except (DeclarationError, OSError) as error:
        fail(f"They are not left out yet: {error}. The line for the index's table in {file}:")
        sys.stdout.write(f"\n{removed_line(removal.declaration, file.absolute().parent)}\n")
        return 1
    sys.stdout.write(f"Declared in {file}. Running APIs leave them out within seconds.\n")
    return 0


def _listed(file: Path | None) -> list[str]:
    if file is None:
        return []
    return [one.strip() for one in file.read_text(encoding="utf-8").splitlines() if one.strip()]
