"""Uses of the names at the top of modules, so that a constant has the tests of its users."""

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

Name = tuple[str, str]  # a file, and a name at its top
Line = tuple[str, int]


class Uses:
    """Users of each name of a package, found by reading: functions by line, constants by name."""

    def __init__(self, root: Path, package: str) -> None:
        self._root = root
        self._lines: dict[Name, set[Line]] = defaultdict(set)
        self._names: dict[Name, set[Name]] = defaultdict(set)
        self._constants: set[Name] = set()
        self._aliases: dict[Name, set[Name]] = defaultdict(set)
        for file in sorted((root / package).rglob("*.py")):
            self._read(str(file.relative_to(root)))

    def lines(self, path: str, name: str) -> set[Line]:
        """Return the lines in functions that use the name, or a constant made of it."""
        return set().union(*(self._lines[one] for one in self._closure((path, name))))

    def constants(self, path: str, name: str) -> set[Name]:
        """Return the constants that are made of the name, by functions called at the import too."""
        return self._closure((path, name)) & self._constants

    def aliases(self, path: str, name: str) -> set[Name]:
        """Return the modules that import the name, with their names for it."""
        return self._aliases[path, name]

    def _closure(self, name: Name) -> set[Name]:
        seen: set[Name] = set()
        todo = [name]
        while todo:
            one = todo.pop()
            if one not in seen:
                seen.add(one)
                todo += self._names[one]
        return seen

    def _read(self, path: str) -> None:
        tree = ast.parse((self._root / path).read_bytes())
        known = {name: (path, name) for statement in tree.body for name in _bound(statement)}
        for alias, name in _imported(tree):
            known[alias] = name
            self._aliases[name].add((path, alias))
        for statement in tree.body:
            bound = {(path, name) for name in _bound(statement)}
            if isinstance(statement, ast.Assign | ast.AnnAssign):
                self._constants |= bound
            at_run_time = _run_time_parts(statement)
            for node in ast.walk(statement):
                if used := self._used(node, known):
                    if id(node) in at_run_time:
                        self._lines[used].add((path, getattr(node, "lineno", 0)))
                    if id(node) not in at_run_time or not isinstance(statement, ast.ClassDef):
                        self._names[used] |= bound

    def _used(self, node: ast.AST, known: Mapping[str, Name]) -> Name | None:
        """Return the name that a node uses: its own, or that of a module that was imported."""
        if isinstance(node, ast.Name):
            return known.get(node.id)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            package, name = known.get(node.value.id, ("", ""))
            module = f"{package.removesuffix('.py')}/{name}.py"
            if (self._root / module).is_file():
                return module, node.attr
        return None


def _run_time_parts(statement: ast.stmt) -> set[int]:
    """Return the ids of all nodes in bodies of functions."""
    return {
        id(part)
        for node in ast.walk(statement)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for child in node.body
        for part in ast.walk(child)
    }


def _imported(tree: ast.Module) -> Iterator[tuple[str, Name]]:
    for statement in ast.walk(tree):
        if isinstance(statement, ast.ImportFrom) and statement.module:
            path = f"{statement.module.replace('.', '/')}.py"
            for alias in statement.names:
                yield alias.asname or alias.name, (path, alias.name)


def _bound(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement.name
    elif isinstance(statement, ast.Assign | ast.AnnAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        for target in targets:
            for part in ast.walk(target):
                if isinstance(part, ast.Name):
                    yield part.id
