"""Mutants of one source file: the smallest edits that an accident could make."""

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.mutation.python_edits import python_edits
from tools.mutation.source import Edit, Source
from tools.mutation.sql_edits import sql_edits


@dataclass(frozen=True)
class Mutant:
    """One edit of one file.

    `name` stays the same while the edited expression and its function keep theirs; `lines` are those
    whose coverage lists the tests that run the edited code.
    """

    name: str
    path: str
    scope: str  # the innermost function or class, dotted, or the constant
    digest: str  # of the definition at the top of the module that it is in
    lines: tuple[int, ...]
    edit: Edit

    @property
    def module(self) -> str:
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    def apply(self, root: Path) -> bytes:
        """Return the file's text with the edit."""
        text = (root / self.path).read_bytes()
        return text[: self.edit.start] + self.edit.replacement + text[self.edit.end :]


def find_mutants(root: Path, path: str) -> list[Mutant]:
    """Return the mutants of a file that still are Python, in the order of their places."""
    source = Source.read(root / path)
    found = sorted(_edits(source), key=lambda edit: (edit.start, edit.end, edit.replacement))
    count: Counter[str] = Counter()
    mutants = []
    for edit in dict.fromkeys(found):
        scope, lines = source.place(edit)
        name = f"{path}:{scope}: {edit.operator}: {source.excerpt(edit)}"
        count[name] += 1
        if count[name] > 1:
            name += f" #{count[name]}"
        mutant = Mutant(name, path, scope, source.digest(edit), lines, edit)
        if _is_python(mutant.apply(root)):
            mutants.append(mutant)
    return mutants


def _edits(source: Source) -> Iterator[Edit]:
    yield from python_edits(source)
    yield from sql_edits(source)


def _is_python(text: bytes) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True
