"""The indexes that a process opens, declared in one TOML file.

    [indexes."pile"]
    path = "/data/indexes/pile"            # or relative to this file; or a list of directories
    removed = "/data/indexes/pile.removed" # an index of documents that are removed; or a list
    tokenizer = "/data/indexes/pile/tokenizer.json"   # or "bytes"; default: what is in the index
    description = "The Pile, validation set"
    delimiters = { "\\n" = 13, "." = 29889 }   # attribution: ids of delimiters, where it matters

A name becomes the first segment of the index's routes, so it is a plain one, and none of ours.
"""

import contextlib
import fcntl
import json
import os
import re
import shutil
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

BYTES = "bytes"  # the tokenizer that makes a token of each byte
TokenDtype = Literal["u8", "u16", "u32"]
WIDTH: dict[TokenDtype, int] = {"u8": 1, "u16": 2, "u32": 4}
TYPE_CODE: dict[TokenDtype, str] = {"u8": "B", "u16": "H", "u32": "I"}  # of `array`
# Ids are below it: far above any tokenizer, and small enough to count them all when an index opens.
MAX_VOCABULARY = 1 << 24
MAX_DIRECTORIES = 64

# First segments of the service's own paths, and of some that a proxy or a browser requests: no index
# may hide behind them. A test compares the set with the actual routes.
_RESERVED = """
admin api assets chat_tokenize contexts dashboard docs embed favicon.ico generate generate_stream health
history indexes inference info invocations jobs launches me metrics models openapi.json ping redoc rerank
results robots.txt score servers static static-offline-docs system teams tgi-v0 tokenize tokens ui usage v1 v2
vertex webhooks workers
"""
RESERVED_NAMES = frozenset(_RESERVED.split())

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_KEYS = {"path", "removed", "tokenizer", "description", "delimiters"}


class DeclarationError(Exception):
    """The file or one of its declarations is wrong; the message is one line that names the place."""


@dataclass(frozen=True, slots=True)
class Declaration:
    """One index: its directories and the source of its tokenizer. Their manifests have the rest.

    Each directory is an index of the same tokenizer; the engine searches all of them as one.
    `tokenizer` is the path of a tokenizer.json, or "bytes". `delimiters` are token ids of texts
    that the tokenizer would encode differently when they stand alone. `removed_paths` are indexes of
    the documents that no query returns.
    """

    name: str
    path: Path
    tokenizer: str
    description: str = ""
    delimiters: Mapping[str, int] = field(default_factory=dict)
    more_paths: tuple[Path, ...] = ()
    removed_paths: tuple[Path, ...] = ()

    @property
    def paths(self) -> tuple[Path, ...]:
        return (self.path, *self.more_paths)

    @property
    def all_paths(self) -> tuple[Path, ...]:
        """The directories that must be whole before the index is opened."""
        return (*self.paths, *self.removed_paths)


def check_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise DeclarationError(
            f"{name!r} is not a plain name: letters, digits, '.', '_' and '-', at most 128, and a "
            "letter or digit first"
        )
    if name.lower() in RESERVED_NAMES:
        raise DeclarationError(f"{name!r} is the beginning of other routes: choose another name")
    return name


def read_declarations(file: Path | None) -> list[Declaration]:
    """The indexes of the file, in its order; none without a file. Raises DeclarationError."""
    if file is None:
        return []
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise DeclarationError(f"{file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DeclarationError(f"{file} is not UTF-8: {error}") from error
    return parse_declarations(text, file)


def parse_declarations(text: str, file: Path) -> list[Declaration]:
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        # The message ends with line and column; this also finds a name that is used twice.
        raise DeclarationError(f"{file}: {error}") from error
    if unknown := sorted(set(document) - {"indexes"}):
        raise DeclarationError(f'{file}: {unknown[0]!r} is unknown: write [indexes."NAME"]')
    tables = document.get("indexes", {})
    if not isinstance(tables, dict):
        raise DeclarationError(f'{file}: indexes: must be tables such as [indexes."NAME"]')
    declared = [_declaration(name, table, file) for name, table in tables.items()]
    seen: dict[str, str] = {}
    for one in declared:
        if other := seen.get(one.name.lower()):
            raise DeclarationError(
                f"{file}: indexes.{one.name}: differs from {other!r} in its case only"
            )
        seen[one.name.lower()] = one.name
    return declared


@contextlib.contextmanager
def sole_writer(file: Path) -> Iterator[None]:
    """Hold the file's lock, which each command that changes it needs: none loses another's change.

    Raises DeclarationError if another process holds it, OSError.
    """
    with file.with_name(f".{file.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DeclarationError(
                f"Another command that changes {file} is running: repeat this one after it"
            ) from None
        yield


def add_declaration(file: Path, declaration: Declaration) -> None:
    """Append to the file, whose content stays unchanged; the caller is the `sole_writer`.

    Raises DeclarationError, OSError.
    """
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    if text and not text.endswith("\n"):
        text += "\n"
    text += ("\n" if text else "") + to_toml(declaration, file.absolute().parent)
    parse_declarations(text, file)
    _replace_text(file, text)


def declare_removed(file: Path, declaration: Declaration) -> None:
    """Add the line `removed` to the index's table, which has none; the caller is the `sole_writer`.

    Everything else in the file stays unchanged. Raises DeclarationError, OSError.
    """
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    new_line = f"{removed_line(declaration, file.absolute().parent)}\n"
    for number, line in enumerate(lines):
        if not line.lstrip().startswith("["):
            continue
        text = "".join([*lines[: number + 1], new_line, *lines[number + 1 :]])
        try:
            declared = parse_declarations(text, file)
        except DeclarationError:
            continue  # the line is no table's head, or that of another table
        if declaration in declared:
            _replace_text(file, text)
            return
    raise DeclarationError(f"{file} has no table of {declaration.name!r} that can be extended")


def _replace_text(file: Path, text: str) -> None:
    new = file.with_name(f".{file.name}.{os.getpid()}.new")
    try:
        new.write_text(text, encoding="utf-8")
        if file.exists():
            shutil.copymode(file, new)
        new.replace(file)
    finally:
        new.unlink(missing_ok=True)


def to_toml(declaration: Declaration, directory: Path | None = None) -> str:
    """The lines of the declaration; paths below `directory` are relative, so that both can move together."""
    path = _places(declaration.paths, directory)
    lines = [f"[indexes.{_quoted(declaration.name)}]", f"path = {path}"]
    if declaration.removed_paths:
        lines.append(removed_line(declaration, directory))
    is_bytes = declaration.tokenizer == BYTES
    tokenizer = _quoted(BYTES) if is_bytes else _place(Path(declaration.tokenizer), directory)
    lines.append(f"tokenizer = {tokenizer}")
    if declaration.description:
        lines.append(f"description = {_quoted(declaration.description)}")
    return "\n".join(lines) + "\n"


def removed_line(declaration: Declaration, directory: Path | None = None) -> str:
    return f"removed = {_places(declaration.removed_paths, directory)}"


def _places(paths: Sequence[Path], directory: Path | None) -> str:
    places = [_place(path, directory) for path in paths]
    return places[0] if len(places) == 1 else f"[{', '.join(places)}]"


def _place(path: Path, directory: Path | None) -> str:
    is_below = directory is not None and path.is_relative_to(directory)
    return _quoted(str(path.relative_to(directory) if directory and is_below else path))


def _quoted(text: str) -> str:
    """A TOML string: JSON's escapes are valid in it, except one."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _declaration(name: str, table: object, file: Path) -> Declaration:
    place = f"{file}: indexes.{name}"
    try:
        check_name(name)
    except DeclarationError as error:
        raise DeclarationError(f"{place}: {error}") from None
    if not isinstance(table, dict):
        raise DeclarationError(f'{place}: must be a table: [indexes."{name}"]')
    if unknown := sorted(set(table) - _KEYS):
        raise DeclarationError(
            f"{place}.{unknown[0]}: unknown; there are {', '.join(sorted(_KEYS))}"
        )
    paths = _paths(table, "path", place, file)
    removed = _paths(table, "removed", place, file) if "removed" in table else []
    if common := set(paths) & set(removed):
        raise DeclarationError(f"{place}.removed: {common.pop()} is the index itself")
    return Declaration(
        name=name,
        path=paths[0],
        more_paths=tuple(paths[1:]),
        removed_paths=tuple(removed),
        tokenizer=_tokenizer(_text(table, "tokenizer", place), paths[0], file),
        description=_text(table, "description", place),
        delimiters=_delimiters(table.get("delimiters", {}), f"{place}.delimiters"),
    )


def _paths(table: Mapping[str, Any], key: str, place: str, file: Path) -> list[Path]:
    value = table.get(key, "")
    texts = value if isinstance(value, list) else [value]
    if len(texts) > MAX_DIRECTORIES:
        raise DeclarationError(f"{place}.{key}: has more than {MAX_DIRECTORIES} directories")
    paths = [Path(_text({key: text}, key, place)).expanduser() for text in texts]
    if not paths or Path() in paths:
        raise DeclarationError(f"{place}.{key}: missing")
    paths = [file.absolute().parent / path for path in paths]
    if len(set(paths)) < len(paths):
        raise DeclarationError(f"{place}.{key}: has a directory twice")
    return paths


def _tokenizer(text: str, path: Path, file: Path) -> str:
    """The tokenizer's path; if absent, the one that the builder left in the index, if any."""
    if text == BYTES:
        return BYTES
    if text:
        return str(file.absolute().parent / Path(text).expanduser())
    inside = path / "tokenizer.json"
    return str(inside) if inside.is_file() else BYTES


def _text(table: Mapping[str, Any], key: str, place: str) -> str:
    value = table.get(key, "")
    if not isinstance(value, str) or "\0" in value:
        raise DeclarationError(f"{place}.{key}: must be a text")
    return value


def _delimiters(value: object, place: str) -> Mapping[str, int]:
    if not isinstance(value, dict) or not all(
        type(token) is int and 0 <= token < MAX_VOCABULARY for token in value.values()
    ):
        raise DeclarationError(f"{place}: must be a table of token ids (0 to {MAX_VOCABULARY - 1})")
    return value
