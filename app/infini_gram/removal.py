"""Removes documents from an index without a new build: makes the index of its removed documents.

That index has the tokens and the metadata that the documents have in the index, so no corpus is needed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import orjson

from app.infini_gram.build_options import BuildError, BuildOptions, Report
from app.infini_gram.builder import build_of
from app.infini_gram.declarations import Declaration
from app.infini_gram.engine import Engine
from app.infini_gram.reduced_engine import ReducedEngine
from app.infini_gram.shards import Shard
from app.infini_gram.token_files import TokenFiles, WrittenTokens
from app.infini_gram.tokenizer import open_tokenizer

_NAMED_ENTRIES = 5  # of those that name no document, in an error


@dataclass(frozen=True, slots=True)
class Removal:
    """Numbers of documents removed now and in all, and the index's declaration without them."""

    added: int
    total: int
    declaration: Declaration


def directory_of(declaration: Declaration) -> Path:
    """The directory of the index of documents that the command removed."""
    return declaration.path.with_name(f"{declaration.path.name}.removed")


def remove(
    declaration: Declaration, entries: Sequence[str], member: str | None, report: Report
) -> Removal:
    """Remove the documents that the entries name, in addition to those that are removed already.

    An entry is a document's number, or PATH:LINE of its metadata; with `member`, a value of this member of
    the corpus's own metadata. Raises BuildError, ManifestError, TokenizerError, EngineError or OSError,
    and leaves the removed documents as they were.
    """
    directory = directory_of(declaration)
    is_declared = directory in declaration.removed_paths
    if directory.exists() and not is_declared:
        raise BuildError(
            f"{directory} exists, and is not declared as removed documents of {declaration.name!r}: "
            "move it away, or declare it"
        )
    index = Engine(replace(declaration, removed_paths=()))
    wanted = find_documents(index, entries, member)
    others = _removed(declaration, [one for one in declaration.removed_paths if one != directory])
    ours = _removed(declaration, [directory] if is_declared else [])
    added = wanted - others - ours
    if added:
        _build(index, directory, ours | added, report, replaces=is_declared)
    paths = declaration.removed_paths if is_declared else (*declaration.removed_paths, directory)
    reduced = replace(declaration, removed_paths=paths if added else declaration.removed_paths)
    return Removal(len(added), len(others | ours | added), reduced)


def _removed(declaration: Declaration, paths: Sequence[Path]) -> set[int]:
    if not paths:
        return set()
    return ReducedEngine(replace(declaration, removed_paths=tuple(paths))).removed.numbers


def find_documents(index: Engine, entries: Sequence[str], member: str | None = None) -> set[int]:
    """The numbers of the documents that the entries name. Raises BuildError if one names none."""
    found: set[int] = set()
    numbers = {one for one in entries if one.isdecimal() and member is None}
    missing = {one for one in numbers if int(one) >= index.numbered_documents}
    found.update(int(one) for one in numbers - missing)
    texts = set(entries) - numbers
    named: set[str] = set()
    for number, (shard, document) in enumerate(_documents(index) if texts else ()):
        if (name := _name(shard.metadata(document), member)) in texts:
            found.add(number)
            named.add(name)
    if missing := missing | (texts - named):
        first = ", ".join(sorted(missing)[:_NAMED_ENTRIES])
        raise BuildError(f"{len(missing):,} entries name no document of the index: {first}")
    return found


def _documents(index: Engine) -> Iterator[tuple[Shard, int]]:
    for shard in index.shards:
        for document in range(shard.documents):
            yield shard, document


def _name(line: bytes, member: str | None) -> str:
    """The entry that names the document; empty if its metadata has none."""
    try:
        row = orjson.loads(line)
        return f"{row['path']}:{row['linenum']}" if member is None else str(row["metadata"][member])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return ""


def _build(
    index: Engine, directory: Path, numbers: set[int], report: Report, *, replaces: bool
) -> None:
    declaration = index.declaration
    tokenizer = open_tokenizer(declaration.tokenizer, index.end_id)
    tokenizer.dtype = index.token_dtype  # of an imported index, it may be wider than needed

    def write(new: Path) -> WrittenTokens:
        with TokenFiles(new, tokenizer) as files:
            for number, (shard, document) in enumerate(_documents(index)):
                if number in numbers:
                    # The engine cannot map an empty file.
                    files.add(shard.content(document), shard.metadata(document) or b"{}\n")
            files.write_unigrams()
        return files.written

    options = BuildOptions(
        declaration.path,
        directory,
        declaration.tokenizer,
        end_id=index.end_id,
        replace=replaces,
    )
    build_of(options, tokenizer, write, report)
