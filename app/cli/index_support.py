"""Arguments, errors and output of the commands of `python -m app index`."""

import argparse
import signal
import sys
from pathlib import Path

from app.cli.arguments import Run
from app.core.errors import EngineError
from app.infini_gram.build_options import BuildError
from app.infini_gram.corpus import CorpusError
from app.infini_gram.declarations import (
    Declaration,
    DeclarationError,
    check_name,
    read_declarations,
)
from app.infini_gram.manifest import Manifest, ManifestError
from app.infini_gram.published_index import DownloadError
from app.infini_gram.tokenizer import TokenizerError

INTERRUPTED = 130


def to_path(text: str) -> Path:
    return Path(text).expanduser()


def to_name(text: str) -> str:
    try:
        return check_name(text)
    except DeclarationError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def reports_errors(work: Run) -> Run:
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
            return fail(str(error))
        except OSError as error:
            place = f"{error.filename}: " if error.filename else ""
            return fail(f"{place}{error.strerror or error}")
        except DownloadError as error:
            return fail(str(error), 1)
        except EngineError as error:
            return fail(error.detail, 1)
        except KeyboardInterrupt:
            return fail("Interrupted: no files are left.", INTERRUPTED)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    return run


def needed_file(options: argparse.Namespace) -> Path:
    if options.file is None:
        raise DeclarationError("LLM_INDEXES_FILE is not set: name the file with it, or with --file")
    file: Path = options.file
    return file


def declared_indexes(file: Path | None) -> dict[str, Declaration]:
    found = read_declarations(file if file and file.exists() else None)
    return {one.name: one for one in found}


def needed_index(file: Path, name: str) -> Declaration:
    declared = declared_indexes(file)
    if name not in declared:
        known = ", ".join(declared) or "none"
        raise DeclarationError(f"{file} declares no index {name!r}; there are: {known}")
    return declared[name]


def figures(manifests: list[Manifest]) -> list[str]:
    size = sum(one.size for one in manifests)
    text = f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
    documents, tokens = (
        f"{sum(getattr(one, name) for one in manifests):,}" for name in ("documents", "tokens")
    )
    return [documents, tokens, text]


def summary(manifests: list[Manifest]) -> str:
    documents, tokens, size = figures(manifests)
    return f"{documents} documents, {tokens} tokens, {size}"


def fail(line: str, status: int = 2) -> int:
    sys.stderr.write(f"{line}\n")
    return status
