"""`python -m app index`. Progress and problems go to standard error, results to output."""

import argparse
import asyncio
import os
import sys
import time
from pathlib import Path

from app.cli import index_help, index_remove
from app.cli.arguments import add_command, add_subcommands, whole_number
from app.cli.index_support import (
    INTERRUPTED,
    declared_indexes,
    fail,
    figures,
    needed_file,
    needed_index,
    reports_errors,
    summary,
    to_name,
    to_path,
)
from app.cli.progress_line import ProgressLine
from app.cli.table import write_table
from app.core.errors import EngineError
from app.inference.tokenizer_files import tokenizer_file
from app.infini_gram.build_options import GIB, BuildOptions
from app.infini_gram.builder import build
from app.infini_gram.declarations import (
    BYTES,
    MAX_DIRECTORIES,
    MAX_VOCABULARY,
    Declaration,
    DeclarationError,
    add_declaration,
    sole_writer,
    to_toml,
)
from app.infini_gram.download import download
from app.infini_gram.import_index import adopt
from app.infini_gram.manifest import ManifestError, remember_verified, unverified, verify
from app.infini_gram.published_index import S3_ENDPOINT
from app.infini_gram.reduced_engine import open_engine
from app.infini_gram.tokenizer import TokenizerError


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = index_help.EPILOG
    actions = add_subcommands(parser)
    build = add_command(
        actions, "build", "Build an index of a corpus.", _build, index_help.BUILD_EPILOG
    )
    build.add_argument("corpus", type=to_path, help="a .txt or .jsonl file, or a directory of them")
    text = "Import an index that the package infini-gram built."
    adopt = add_command(actions, "adopt", text, _adopt, index_help.ADOPT_EPILOG)
    text = "a directory of its files: tokenized.0, table.0, ...; several make one index"
    adopt.add_argument("directories", type=to_path, nargs="+", metavar="directory", help=text)
    text = "Download a published index; the same command again continues it."
    fetch = add_command(actions, "download", text, _download, index_help.DOWNLOAD_EPILOG)
    fetch.add_argument("source", help="s3://BUCKET/PREFIX, or an URL below which its files are")
    fetch.add_argument("--into", type=to_path, required=True, metavar="DIR", help="its directory")
    text = "files that are downloaded at the same time (4)"
    fetch.add_argument("--connections", type=whole_number(1, 32), default=4, metavar="N", help=text)
    text = f"of another service than Amazon's that has S3's routes ({S3_ENDPOINT})"
    fetch.add_argument("--endpoint", default=S3_ENDPOINT, metavar="URL", help=text)
    text = "Show the declared indexes, and whether each can be opened."
    listing = add_command(actions, "list", text, _list)
    text = "Read all files of an index, and compare them with its manifest."
    check = add_command(actions, "check", text, _check)
    check.add_argument("name", help="the index, as it is declared")
    removal = index_remove.add_to(actions)

    add = build.add_argument
    for command in (build, adopt):
        command.add_argument("--name", required=True, type=to_name, help="its name in requests")
    text = "parent of the index's own directory, which is called NAME (indexes)"
    add("--out", type=to_path, default=Path("indexes"), metavar="DIR", help=text)
    for command in (build, adopt):
        tokenizer = command.add_mutually_exclusive_group()
        text = "a tokenizer.json, or `bytes` (bytes)"
        tokenizer.add_argument("--tokenizer", metavar="FILE", help=text)
        text = "use the tokenizer of this model of LLM_MODEL_REPOSITORY"
        tokenizer.add_argument("--model", help=text)
    text = "replace an index of this name; running processes open it within seconds"
    add("--replace", action="store_true", help=text)
    for command in (build, adopt):
        text = "a description, for `list` and for people"
        command.add_argument("--description", default="", help=text)
    text = "documents of a .txt file: all of it, each block between blank lines, each line (file)"
    add("--split", choices=("file", "blocks", "lines"), default="file", help=text)
    text = "most memory for the indexer; more speeds up large indexes (1)"
    add("--memory", type=whole_number(1, 4096), default=1, metavar="GIB", help=text)
    add("--cpus", type=whole_number(1, 1024), default=2, metavar="N", help="processors to use (2)")
    text = "most open files of the indexer (65536, or what this user may open)"
    add("--ulimit", type=whole_number(64, 1_048_576), metavar="N", help=text)
    for command in (build, adopt):
        text = "id of the end-of-text token, if the tokenizer's files do not name it"
        command.add_argument(
            "--end-id", type=whole_number(0, MAX_VOCABULARY - 1), metavar="ID", help=text
        )
    file = os.environ.get("LLM_INDEXES_FILE") or None
    for command in (build, adopt, listing, check, removal):
        text = "TOML file of the declarations, instead of LLM_INDEXES_FILE"
        command.add_argument("--file", type=to_path, default=file, help=text)


# --- Commands ----------------------------------------------------------------------------------------


@reports_errors
def _build(options: argparse.Namespace) -> int:
    os.environ.setdefault("RAYON_NUM_THREADS", str(options.cpus))  # for the tokenizer
    file: Path | None = options.file
    directory: Path = options.out.absolute() / options.name
    declared = declared_indexes(file)
    if found := declared.get(options.name):
        if not options.replace:
            raise DeclarationError(
                f"{file} declares an index {options.name!r} already: --replace builds it again"
            )
        if found.path != directory:
            raise DeclarationError(f"{file} declares {options.name!r} elsewhere: in {found.path}")
    begun = time.monotonic()
    with ProgressLine() as line:
        manifest = build(
            BuildOptions(
                corpus=options.corpus,
                directory=directory,
                tokenizer=_tokenizer(options),
                end_id=options.end_id,
                split=options.split,
                memory=options.memory * GIB,
                cpus=options.cpus,
                open_files=options.ulimit,
                replace=options.replace,
            ),
            line.report,
        )
    inside = directory / "tokenizer.json"
    declaration = Declaration(
        name=options.name,
        path=directory,
        tokenizer=str(inside) if inside.exists() else BYTES,
        description=options.description,
    )
    sys.stdout.write(f"{summary([manifest])}, {directory} ({time.monotonic() - begun:.1f} s)\n")
    return _declare(file, declaration, declared.get(options.name))


@reports_errors
def _adopt(options: argparse.Namespace) -> int:
    file: Path | None = options.file
    paths: list[Path] = [one.absolute() for one in options.directories]
    if len(paths) > MAX_DIRECTORIES or len(set(paths)) < len(paths):
        raise DeclarationError(f"An index has at most {MAX_DIRECTORIES} directories, all different")
    if options.name in declared_indexes(file):
        raise DeclarationError(f"{file} declares an index {options.name!r} already")
    tokenizer = _tokenizer(options)
    place = tokenizer if tokenizer == BYTES else str(Path(tokenizer).absolute())
    declaration = Declaration(
        options.name, paths[0], place, options.description, more_paths=tuple(paths[1:])
    )
    with ProgressLine() as line:
        manifests = adopt(declaration, options.end_id, line.report)
    sys.stdout.write(f"{summary(manifests)}, {', '.join(map(str, paths))}\n")
    return _declare(file, declaration, None)


def _declare(file: Path | None, declaration: Declaration, declared: Declaration | None) -> int:
    if declared and declared.tokenizer == declaration.tokenizer:
        try:
            open_engine(declared)
        except (
            ManifestError
        ) as error:  # it has the new files: the removed documents do not fit them
            return fail(
                f"The index is built, and does not open: {error}. If its corpus has no removed documents "
                f"any more, delete the line `removed` from its table in {file}.",
                1,
            )
        sys.stdout.write(f"Declared in {file} already. Running APIs open it within seconds.\n")
        return 0
    if file is not None:
        try:
            with sole_writer(file):
                add_declaration(file, declaration)
        except (DeclarationError, OSError) as error:
            fail(f"The index is built, and not declared: {error}. The lines to add:")
        else:
            sys.stdout.write(f"Declared in {file}. Running APIs open it within seconds.\n")
            return 0
    else:
        sys.stderr.write(
            "LLM_INDEXES_FILE is not set. Put these lines into the file that it names:\n"
        )
    sys.stdout.write(f"\n{to_toml(declaration)}")
    return 0 if file is None else 1


@reports_errors
def _download(options: argparse.Namespace) -> int:
    directory: Path = options.into.absolute()
    with ProgressLine() as line:
        work = download(
            options.source,
            directory,
            connections=options.connections,
            endpoint=options.endpoint,
            report=lambda done, of, rate: line.report(
                "download", done / max(1, of), f"{done / 1e9:.2f} GB, {rate / 1e6:.1f} MB/s"
            ),
        )
        try:
            files = asyncio.run(work)
        except KeyboardInterrupt:
            return fail("Interrupted: the same command continues it.", INTERRUPTED)
    size = sum(file.size for file in files)
    sys.stdout.write(f"{len(files)} files, {size / 1e6:,.1f} MB, {directory}: adopt it now\n")
    return 0


@reports_errors
def _list(options: argparse.Namespace) -> int:
    rows = [["index", "documents", "tokens", "size", "tokenizer", "state"]]
    for one in declared_indexes(needed_file(options)).values():
        try:
            found = [verify(path, checksums=False) for path in one.all_paths]
            open_engine(one)
            unknown = [
                name
                for path, manifest in zip(one.all_paths, found, strict=True)
                for name in unverified(path, manifest)
            ]
            state = f"{unknown[0]} is unverified: check it" if unknown else "ok"
            rows.append([one.name, *figures(found[: len(one.paths)]), one.tokenizer, state])
        except (ManifestError, TokenizerError, EngineError) as error:
            rows.append([one.name, "-", "-", "-", one.tokenizer, str(error)])
    write_table(rows)
    return 0


@reports_errors
def _check(options: argparse.Namespace) -> int:
    file = needed_file(options)
    found = needed_index(file, options.name)
    try:
        with ProgressLine() as line:
            manifests = [
                verify(
                    path, report=lambda done, of: line.report("checksums", done / max(1, of), "")
                )
                for path in found.all_paths
            ]
        open_engine(found)
    except (ManifestError, TokenizerError) as error:
        return fail(str(error), 1)
    for path, manifest in zip(found.all_paths, manifests, strict=True):
        remember_verified(path, manifest)
    sys.stdout.write(f"{found.name} is unchanged: {summary(manifests[: len(found.paths)])}\n")
    return 0


# --- Arguments ---------------------------------------------------------------------------------------


def _tokenizer(options: argparse.Namespace) -> str:
    if options.model is None:
        named: str = options.tokenizer or BYTES
        return BYTES if named == BYTES else str(Path(named).expanduser())
    repository = Path(os.environ.get("LLM_MODEL_REPOSITORY", "models"))
    found = tokenizer_file(repository, options.model)
    if found is None:
        raise TokenizerError(
            f"{repository} has no model {options.model!r} with a tokenizer.json "
            "(LLM_MODEL_REPOSITORY names the directory)"
        )
    return str(found)
