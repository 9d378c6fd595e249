"""Commands of `python -m app index`. Progress and problems go to standard error, results to output."""

import argparse
import os
import signal
import sys
import time
from pathlib import Path

from app.cli.table import write_table
from app.core.errors import EngineError
from app.inference.tokenizer_files import tokenizer_file
from app.infini_gram.build_options import GIB, BuildError, BuildOptions
from app.infini_gram.builder import build
from app.infini_gram.corpus import CorpusError
from app.infini_gram.declarations import (
    BYTES,
    Declaration,
    DeclarationError,
    add_declaration,
    read_declarations,
    to_toml,
)
from app.infini_gram.engine import Engine
from app.infini_gram.import_index import adopt
from app.infini_gram.manifest import Manifest, ManifestError, remember_verified, unverified, verify
from app.infini_gram.tokenizer import TokenizerError

_INTERRUPTED = 130
_REDRAW_SECONDS = 0.2
_REPEAT_SECONDS = 5.0
# The first moments give no reliable rate.
_ETA_AFTER_SECONDS = 3.0


def run(command: str, options: argparse.Namespace) -> int:
    commands = {"build": _build, "adopt": _adopt, "list": _list, "check": _check}
    # Both clean up; Ctrl-C also if a shell started this process with SIGINT ignored.
    before = {
        number: signal.signal(number, signal.default_int_handler)
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        return commands[command](options)
    except (BuildError, CorpusError, DeclarationError, ManifestError, TokenizerError) as error:
        return _fail(str(error))
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        return _fail(f"{place}{error.strerror or error}")
    except EngineError as error:
        _fail(error.detail)
        return 1
    except KeyboardInterrupt:
        _fail("Interrupted: no files are left.")
        return _INTERRUPTED
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# --- Commands ----------------------------------------------------------------------------------------


def _build(options: argparse.Namespace) -> int:
    os.environ.setdefault("RAYON_NUM_THREADS", str(options.cpus))  # for the tokenizer
    file = _file(options)
    directory: Path = options.out.expanduser().absolute() / options.name
    declared = {one.name: one for one in _declared(file)} if file else {}
    if found := declared.get(options.name):
        if not options.replace:
            raise DeclarationError(
                f"{file} declares an index {options.name!r} already: --replace builds it again"
            )
        if found.path != directory:
            raise DeclarationError(f"{file} declares {options.name!r} elsewhere: in {found.path}")
    begun = time.monotonic()
    with _Line() as line:
        manifest = build(
            BuildOptions(
                corpus=options.corpus.expanduser(),
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
    remember_verified(directory, manifest)  # its checksums were made just now
    inside = directory / "tokenizer.json"
    declaration = Declaration(
        name=options.name,
        path=directory,
        tokenizer=str(inside) if inside.exists() else BYTES,
        description=options.description,
    )
    sys.stdout.write(f"{_summary(manifest)}, {directory} ({time.monotonic() - begun:.1f} s)\n")
    return _declare(file, declaration, declared.get(options.name))


def _adopt(options: argparse.Namespace) -> int:
    file = _file(options)
    directory: Path = options.directory.expanduser().absolute()
    if file and any(one.name == options.name for one in _declared(file)):
        raise DeclarationError(f"{file} declares an index {options.name!r} already")
    tokenizer = _tokenizer(options)
    place = tokenizer if tokenizer == BYTES else str(Path(tokenizer).absolute())
    declaration = Declaration(options.name, directory, place, options.description)
    with _Line() as line:
        manifest = adopt(declaration, options.end_id, line.report)
    sys.stdout.write(f"{_summary(manifest)}, {directory}\n")
    return _declare(file, declaration, None)


def _declare(file: Path | None, declaration: Declaration, declared: Declaration | None) -> int:
    """Add the declaration to the file, or show the text to add."""
    if declared and declared.tokenizer == declaration.tokenizer:
        sys.stdout.write(f"Declared in {file} already. Restart the processes that have it open.\n")
        return 0
    if file is not None:
        try:
            add_declaration(file, declaration)
        except (DeclarationError, OSError) as error:
            _fail(f"The index is built, and not declared: {error}. The lines to add:")
        else:
            sys.stdout.write(f"Declared in {file}. Running processes open it when they start.\n")
            return 0
    else:
        sys.stderr.write(
            "LLM_INDEXES_FILE is not set. Put these lines into the file that it names:\n"
        )
    sys.stdout.write(f"\n{to_toml(declaration)}")
    return 0 if file is None else 1


def _list(options: argparse.Namespace) -> int:
    rows = [["index", "documents", "tokens", "size", "tokenizer", "state"]]
    for one in _declared(_needed_file(options)):
        try:
            manifest = verify(one.path, checksums=False)
            Engine(one)
            unknown = unverified(one.path, manifest)
            state = f"{unknown[0]} is unverified: check it" if unknown else "ok"
            rows.append([one.name, *_figures(manifest), one.tokenizer, state])
        except (ManifestError, TokenizerError, EngineError) as error:
            rows.append([one.name, "-", "-", "-", one.tokenizer, str(error)])
    write_table(rows)
    return 0


def _check(options: argparse.Namespace) -> int:
    file = _needed_file(options)
    declared = {one.name: one for one in _declared(file)}
    found = declared.get(options.name)
    if found is None:
        known = ", ".join(declared) or "none"
        raise DeclarationError(f"{file} declares no index {options.name!r}; there are: {known}")
    try:
        with _Line() as line:
            manifest = verify(
                found.path, report=lambda done, of: line.report("checksums", done / max(1, of), "")
            )
        Engine(found)
    except (ManifestError, TokenizerError) as error:
        _fail(str(error))
        return 1
    remember_verified(found.path, manifest)
    sys.stdout.write(f"{found.name} is unchanged: {_summary(manifest)}\n")
    return 0


# --- Arguments ---------------------------------------------------------------------------------------


def _file(options: argparse.Namespace) -> Path | None:
    """The TOML file: the option's, or else the environment's."""
    named = options.file or os.environ.get("LLM_INDEXES_FILE")
    return Path(named).expanduser() if named else None


def _needed_file(options: argparse.Namespace) -> Path:
    file = _file(options)
    if file is None:
        raise DeclarationError("LLM_INDEXES_FILE is not set: name the file with it, or with --file")
    return file


def _declared(file: Path) -> list[Declaration]:
    return read_declarations(file) if file.exists() else []


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


def _figures(manifest: Manifest) -> list[str]:
    size = manifest.size
    text = f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
    return [f"{manifest.documents:,}", f"{manifest.tokens:,}", text]


def _summary(manifest: Manifest) -> str:
    documents, tokens, size = _figures(manifest)
    return f"{documents} documents, {tokens} tokens, {size}"


def _fail(line: str) -> int:
    sys.stderr.write(f"{line}\n")
    return 2


class _Line:
    """Progress: one changing line on a terminal, else a line from time to time."""

    def __init__(self) -> None:
        self._moves = sys.stderr.isatty()
        self._step = ""
        self._begun = self._reported_at = time.monotonic()

    def __enter__(self) -> "_Line":
        return self

    def __exit__(self, *_: object) -> None:
        if self._moves:
            sys.stderr.write("\r\x1b[K")

    def report(self, step: str, share: float, detail: str) -> None:
        """Show a step's progress: its share, its likely remaining time, a detail."""
        now = time.monotonic()
        if step != self._step:
            self._step, self._begun = step, now
        if now - self._reported_at < (_REDRAW_SECONDS if self._moves else _REPEAT_SECONDS):
            return
        self._reported_at = now
        passed = now - self._begun
        # A step that writes its output at its end has no share before.
        parts = [f"{step} {share:.0%}" if share > 0 else f"{step}, {passed:.0f} s so far"]
        if share > 0 and passed > _ETA_AFTER_SECONDS:
            parts.append(f"{passed / share - passed:.0f} s left")
        text = ", ".join(filter(None, [*parts, detail]))
        sys.stderr.write(f"\r\x1b[K{text[:78]}" if self._moves else f"{text}\n")
        sys.stderr.flush()
