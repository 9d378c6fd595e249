"""A Python file as text and tree, with places in bytes."""

import ast
import hashlib
import itertools
from dataclasses import dataclass, field
from pathlib import Path

_EXCERPT = 60


@dataclass(frozen=True)
class Edit:
    """The bytes from `start` to `end` become `replacement`."""

    start: int
    end: int
    replacement: bytes
    operator: str  # the kind of fault


@dataclass(frozen=True)
class Source:
    text: bytes
    tree: ast.Module
    line_starts: list[int] = field(repr=False)

    @classmethod
    def read(cls, path: Path) -> "Source":
        text = path.read_bytes()
        lengths = (len(line) for line in text.splitlines(keepends=True))
        return cls(text, ast.parse(text), [0, *itertools.accumulate(lengths)])

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """Return where a node begins and ends."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self.line_starts[node.lineno - 1] + node.col_offset
        return start, self.line_starts[node.end_lineno - 1] + node.end_col_offset

    def line(self, offset: int) -> int:
        return self.text.count(b"\n", 0, offset) + 1

    def place(self, edit: Edit) -> tuple[str, tuple[int, ...]]:
        """Return the dotted name of the innermost definition, and the lines of its statement."""
        names: list[str] = []
        lines = {self.line(edit.start)}
        body = self.tree.body
        while statement := self._at(body, edit.start):
            body = _statements(statement)
            if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.append(statement.name)
                continue
            names = names or _targets(statement)
            if self._at(body, edit.start) is None:
                lines.add(statement.lineno)
        return ".".join(names) or "module", tuple(sorted(lines))

    def digest(self, edit: Edit) -> str:
        """Return a hash of the definition at the top of the module: results are valid for it."""
        statement = self._at(self.tree.body, edit.start)
        start, end = self.span(statement) if statement else (0, len(self.text))
        return hashlib.sha256(self.text[start:end]).hexdigest()[:12]

    def excerpt(self, edit: Edit) -> str:
        """Return the old and the new text, short and on one line."""
        old = " ".join(self.text[edit.start : edit.end].decode().split())
        new = " ".join(edit.replacement.decode().split())
        return f"{old[:_EXCERPT]} -> {new[:_EXCERPT]}".strip()

    def _at(self, body: list[ast.stmt], offset: int) -> ast.stmt | None:
        for statement in body:
            start, end = self.span(statement)
            if start <= offset < end:
                return statement
        return None


def _statements(statement: ast.stmt) -> list[ast.stmt]:
    found: list[ast.stmt] = []
    for part in ast.iter_child_nodes(statement):
        if isinstance(part, ast.stmt):
            found.append(part)
        elif isinstance(part, ast.ExceptHandler | ast.match_case):
            found += part.body
    return found


def _targets(statement: ast.stmt) -> list[str]:
    """Return the name that an assignment at the top of a module binds."""
    targets: list[ast.expr] = []
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    return [target.id for target in targets if isinstance(target, ast.Name)][:1]
