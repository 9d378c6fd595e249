"""`python -m app index`. Progress and problems go to standard error, results to output."""

import argparse
import asyncio
import os
import signal
import sys
import time
from pathlib import Path

from app.cli import index_help
from app.cli.arguments import Run, add_command, add_subcommands, whole_number
from app.cli.progress_line import ProgressLine
from app.cli.table import write_table
from app.core.errors import EngineError
from app.inference.tokenizer_files import tokenizer_file
from app.infini_gram.build_options import GIB, BuildError, BuildOptions
from app.infini_gram.builder import build
from app.infini_gram.corpus import CorpusError
from app.infini_gram.declarations import (
    BYTES,
    MAX_DIRECTORIES,
    MAX_VOCABULARY,
    Declaration,
    DeclarationError,
    add_declaration,
    check_name,
    read_declarations,
    to_toml,
)
from app.infini_gram.download import download
from app.infini_gram.engine import Engine
from app.infini_gram.import_index import adopt
from app.infini_gram.manifest import Manifest, ManifestError, remember_verified, unverified, verify
from app.infini_gram.published_index import S3_ENDPOINT, DownloadError
from app.infini_gram.tokenizer import TokenizerError

_INTERRUPTED = 130


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = index_help.EPILOG
    actions = add_subcommands(parser)
    build = add_command(
        actions, "build", "Build an index of a corpus.", _build, index_help.BUILD_EPILOG
    )
    build.add_argument("corpus", type=_path, help="a .txt or .jsonl file, or a directory of them")
    text = "Import an index that the package infini-gram built."
    adopt = add_command(actions, "adopt", text, _adopt, index_help.ADOPT_EPILOG)
    text = "a directory of its files: tokenized.0, table.0, ...; several make one index"
    adopt.add_argument("directories", type=_path, nargs="+", metavar="directory", help=text)
    text = "Download a published index; the same command again continues it."
    fetch = add_command(actions, "download", text, _download, index_help.DOWNLOAD_EPILOG)
    fetch.add_argument("source", help="s3://BUCKET/PREFIX, or an URL below which its files are")
    fetch.add_argument("--into", type=_path, required=True, metavar="DIR", help="its directory")
    text = "files that are downloaded at the same time (4)"
    fetch.add_argument("--connections", type=whole_number(1, 32), default=4, metavar="N", help=text)
    text = f"of another service than Amazon's that has S3's routes ({S3_ENDPOINT})"
    fetch.add_argument("--endpoint", default=S3_ENDPOINT, metavar="URL", help=text)
    text = "Show the declared indexes, and whether each can be opened."
    listing = add_command(actions, "list", text, _list)
    text = "Read all files of an index, and compare them with its manifest."
    check = add_command(actions, "check", text, _check)
    check.add_argument("name", help="the index, as it is declared")

    add = build.add_argument
    for command in (build, adopt):
        command.add_argument("--name", required=True, type=_name, help="its name in requests")
    text = "parent of the index's own directory, which is called NAME (indexes)"
    add("--out", type=_path, default=Path("indexes"), metavar="DIR", help=text)
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
    for command in (build, adopt, listing, check):
        text = "TOML file of the declarations, instead of LLM_INDEXES_FILE"
        command.add_argument("--file", type=_path, default=file, help=text)


def _path(text: str) -> Path:
    return Path(text).expanduser()


def _name(text: str) -> str:
    try:
        return check_name(text)
    except DeclarationError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _command(work: Run) -> Run:
    """Decorator of the commands: they clean up at a signal, and report errors in one line."""

    def run(options: argparse.Namespace) -> int:
        # Ctrl-C also if a shell started this process with SIGINT ignored.
        before = {
            number: signal.signal(number, signal.default_int_handler)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            return work(options)
        except (BuildError, CorpusError, DeclarationError, ManifestError, TokenizerError) as error:
            return _fail(str(error))
        except OSError as error:
            place = f"{error.filename}: " if error.filename else ""
            return _fail(f"{place}{error.strerror or error}")
        except DownloadError as error:
            return _fail(str(error), 1)
        except EngineError as error:
            return _fail(error.detail, 1)
        except KeyboardInterrupt:
            return _fail("Interrupted: no files are left.", _INTERRUPTED)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    return run


# --- Commands ----------------------------------------------------------------------------------------


@_command
def _build(options: argparse.Namespace) -> int:
    os.environ.setdefault("RAYON_NUM_THREADS", str(options.cpus))  # for the tokenizer
    file: Path | None = options.file
    directory: Path = options.out.absolute() / options.name
    declared = _declared(file)
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
    sys.stdout.write(f"{_summary([manifest])}, {directory} ({time.monotonic() - begun:.1f} s)\n")
    return _declare(file, declaration, declared.get(options.name))


@_command
def _adopt(options: argparse.Namespace) -> int:
    file: Path | None = options.file
    paths: list[Path] = [one.absolute() for one in options.directories]
    if len(paths) > MAX_DIRECTORIES or len(set(paths)) < len(paths):
        raise DeclarationError(f"An index has at most {MAX_DIRECTORIES} directories, all different")
    if options.name in _declared(file):
        raise DeclarationError(f"{file} declares an index {options.name!r} already")
    tokenizer = _tokenizer(options)
    place = tokenizer if tokenizer == BYTES else str(Path(tokenizer).absolute())
    declaration = Declaration(
        options.name, paths[0], place, options.description, more_paths=tuple(paths[1:])
    )
    with ProgressLine() as line:
        manifests = adopt(declaration, options.end_id, line.report)
    sys.stdout.write(f"{_summary(manifests)}, {', '.join(map(str, paths))}\n")
    return _declare(file, declaration, None)


def _declare(file: Path | None, declaration: Declaration, declared: Declaration | None) -> int:
    if declared and declared.tokenizer == declaration.tokenizer:
        sys.stdout.write(f"Declared in {file} already. Running APIs open it within seconds.\n")
        return 0
    if file is not None:
        try:
            add_declaration(file, declaration)
        except (DeclarationError, OSError) as error:
            _fail(f"The index is built, and not declared: {error}. The lines to add:")
        else:
            sys.stdout.write(f"Declared in {file}. Running APIs open it within seconds.\n")
            return 0
    else:
        sys.stderr.write(
            "LLM_INDEXES_FILE is not set. Put these lines into the file that it names:\n"
        )
    sys.stdout.write(f"\n{to_toml(declaration)}")
    return 0 if file is None else 1


@_command
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
            return _fail("Interrupted: the same command continues it.", _INTERRUPTED)
    size = sum(file.size for file in files)
    sys.stdout.write(f"{len(files)} files, {size / 1e6:,.1f} MB, {directory}: adopt it now\n")
    return 0


@_command
def _list(options: argparse.Namespace) -> int:
    rows = [["index", "documents", "tokens", "size", "tokenizer", "state"]]
    for one in _declared(_needed_file(options)).values():
        try:
            found = [verify(path, checksums=False) for path in one.paths]
            Engine(one)
            unknown = [
                name
                for path, manifest in zip(one.paths, found, strict=True)
                for name in unverified(path, manifest)
            ]
            state = f"{unknown[0]} is unverified: check it" if unknown else "ok"
            rows.append([one.name, *_figures(found), one.tokenizer, state])
        except (ManifestError, TokenizerError, EngineError) as error:
            rows.append([one.name, "-", "-", "-", one.tokenizer, str(error)])
    write_table(rows)
    return 0


@_command
def _check(options: argparse.Namespace) -> int:
    file = _needed_file(options)
    declared = _declared(file)
    found = declared.get(options.name)
    if found is None:
        known = ", ".join(declared) or "none"
        raise DeclarationError(f"{file} declares no index {options.name!r}; there are: {known}")
    try:
        with ProgressLine() as line:
            manifests = [
                verify(
                    path, report=lambda done, of: line.report("checksums", done / max(1, of), "")
                )
                for path in found.paths
            ]
        Engine(found)
    except (ManifestError, TokenizerError) as error:
        return _fail(str(error), 1)
    for path, manifest in zip(found.paths, manifests, strict=True):
        remember_verified(path, manifest)
    sys.stdout.write(f"{found.name} is unchanged: {_summary(manifests)}\n")
    return 0


# --- Arguments ---------------------------------------------------------------------------------------


def _needed_file(options: argparse.Namespace) -> Path:
    if options.file is None:
        raise DeclarationError("LLM_INDEXES_FILE is not set: name the file with it, or with --file")
    file: Path = options.file
    return file


def _declared(file: Path | None) -> dict[str, Declaration]:
    found = read_declarations(file if file and file.exists() else None)
    return {one.name: one for one in found}


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


# --- Output ------------------------------------------------------------------------------------------


def _figures(manifests: list[Manifest]) -> list[str]:
    size = sum(one.size for one in manifests)
    text = f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
    documents, tokens = (
        f"{sum(getattr(one, name) for one in manifests):,}" for name in ("documents", "tokens")
    )
    return [documents, tokens, text]


def _summary(manifests: list[Manifest]) -> str:
    documents, tokens, size = _figures(manifests)
    return f"{documents} documents, {tokens} tokens, {size}"


def _fail(line: str, status: int = 2) -> int:
    sys.stderr.write(f"{line}\n")
    return status
