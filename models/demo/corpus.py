"""The text the demo model learns: the standard library of the Python that runs this file.

Three kinds of documents, all taken from this machine, none downloaded:

* the source of the library's modules (tests and generated tables left out);
* the language reference as prose, from `pydoc_data.topics`;
* exchanges in the form of `chat_template.jinja`, made from the docstrings of *training* modules:
  a name answered by its documentation, and a summary line answered by its function.

Which document is held out depends on a hash of its path alone, so it is the same on every machine.

    python models/demo/corpus.py FILE.jsonl     write what the model is trained on, a line each
"""

import ast
import hashlib
import json
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data import topics

# One document in HELD_OUT_EVERY, by hash of its path, is never trained on.
HELD_OUT_EVERY = 20

# Directories that are tests, third-party code, or another tool's data.
SKIPPED_DIRECTORIES = frozenset(
    {"__pycache__", "idle_test", "lib-dynload", "site-packages", "dist-packages", "test", "tests"}
)
# Generated tables: many bytes, no language.
SKIPPED_PREFIXES = ("_sysconfigdata", "encodings/", "html/entities.py", "pydoc_data/")

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef

MAX_FUNCTION_BYTES = 800
MAX_DOCSTRING_BYTES = 600


@dataclass(frozen=True)
class Document:
    """One text and the path that decides which side of the split it is on."""

    path: str
    text: str

    @property
    def held_out(self) -> bool:
        """True for a document that is for evaluation only."""
        digest = hashlib.sha256(self.path.encode()).digest()
        return int.from_bytes(digest[:4], "big") % HELD_OUT_EVERY == 0


@dataclass(frozen=True)
class Corpus:
    """Training text, the chat exchanges made from it, and held-out text; each in path order."""

    training: list[str]
    exchanges: list[str]
    held_out: list[str]


def build_corpus() -> Corpus:
    """Read the running interpreter's standard library from disk."""
    modules = list(_modules(Path(sysconfig.get_paths()["stdlib"])))
    documents = modules + list(_topics())
    return Corpus(
        training=[document.text for document in documents if not document.held_out],
        exchanges=[
            exchange for module in modules if not module.held_out for exchange in _exchanges(module)
        ],
        held_out=[document.text for document in documents if document.held_out],
    )


def write_training(file: Path) -> None:
    """Write the training documents and exchanges as lines of JSON, each with where it is from."""
    modules = list(_modules(Path(sysconfig.get_paths()["stdlib"])))
    with file.open("w", encoding="utf-8") as lines:

        def write(kind: str, source: str, text: str) -> None:
            lines.write(json.dumps({"text": text, "kind": kind, "source": source}) + "\n")

        for kind, documents in (("module", modules), ("reference", list(_topics()))):
            for document in documents:
                if not document.held_out:
                    write(kind, document.path, document.text)
        for module in modules:
            if not module.held_out:
                for exchange in _exchanges(module):
                    write("exchange", module.path, exchange)


def _modules(library: Path) -> Iterator[Document]:
    for file in sorted(library.rglob("*.py")):
        relative = file.relative_to(library)
        path = relative.as_posix()
        if path.startswith(SKIPPED_PREFIXES) or SKIPPED_DIRECTORIES & set(relative.parts[:-1]):
            continue
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a few old modules declare another encoding
        if text.strip():
            yield Document(path, text)


def _topics() -> Iterator[Document]:
    for name, text in sorted(topics.topics.items()):
        yield Document(f"pydoc_data/topics/{name}", text)


def _exchanges(module: Document) -> Iterator[str]:
    """Questions and answers from one module, as the chat template writes them."""
    name = module.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    tree = ast.parse(module.text)
    lines = module.text.splitlines()
    yield from _documentation(name, tree)
    for scope, node in _definitions(tree, name):
        yield from _documentation(f"{scope}.{node.name}", node)
        if not isinstance(node, ast.ClassDef):
            yield from _function(lines, node)


def _definitions(tree: ast.AST, scope: str) -> Iterator[tuple[str, Definition]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Definition):
            yield scope, node
            if isinstance(node, ast.ClassDef):
                yield from _definitions(node, f"{scope}.{node.name}")


def _documentation(name: str, node: ast.Module | Definition) -> Iterator[str]:
    docstring = ast.get_docstring(node)
    if docstring and len(docstring) <= MAX_DOCSTRING_BYTES and not name.startswith("_"):
        yield f"# What is {name}?\n\n{docstring}"


def _function(lines: list[str], node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    docstring = ast.get_docstring(node)
    margin = " " * node.col_offset
    code = "\n".join(line.removeprefix(margin) for line in lines[node.lineno - 1 : node.end_lineno])
    if docstring and len(code) <= MAX_FUNCTION_BYTES and not node.name.startswith("_"):
        summary = docstring.split("\n\n", maxsplit=1)[0].replace("\n", "\n# ")
        yield f"# {summary}\n\n{code}"


if __name__ == "__main__":
    write_training(Path(sys.argv[1]))
