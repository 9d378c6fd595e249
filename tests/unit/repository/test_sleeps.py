"""Each sleep of a test is a poll, takes no time, or has its reason beside it.

A fixed sleep costs its time in each run, and proves nothing on a slow machine: tests wait for a condition.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
_SLEEPS = {"asyncio.sleep", "time.sleep", "sleep"}
_FIXED = re.compile(r"\bsleep\((?!0[,)])")
_ALONE = re.compile(r" +(await asyncio|time)\.sleep\(")
_CLOCK = "run_in_virtual_time"
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_Function = ast.FunctionDef | ast.AsyncFunctionDef


class Module:
    """A file of tests. Only what may have such a sleep is looked at: all of it takes seconds."""

    def __init__(self, text: str) -> None:
        self.lines = text.splitlines()
        self.body = ast.parse(text).body
        self.functions = [one for one in self.body if isinstance(one, _FUNCTIONS)]
        self.has_clock = _CLOCK in text
        found = _to_look_at(self.lines)
        self.sleeping = [one for one in self.body if not found.isdisjoint(_lines_of(one))]

    def runners(self, others: Mapping[str, set[str]]) -> set[str]:
        """The names here of functions that run what they are given in virtual time."""
        found = {
            alias.name
            for node in self.body
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
            if alias.name in others.get(node.module or "", ())
        }
        if self.has_clock:
            found.add(_CLOCK)
        return found | {one.name for one in self.functions if found and _uses(one, found)}

    def without_reason(self, runners: set[str]) -> Iterator[ast.Call]:
        virtual = self._in_virtual_time(runners) if runners and self.sleeping else set()
        for outermost in self.sleeping:
            if outermost in virtual:
                continue
            nodes = list(ast.walk(outermost))
            parents = {child: node for node in nodes for child in ast.iter_child_nodes(node)}
            for node in nodes:
                if isinstance(node, ast.Call) and node.args and ast.unparse(node.func) in _SLEEPS:
                    above = list(_above(node, parents))
                    if not (_is_zero(node) or _is_poll(above) or self._has_reason(node, above)):
                        yield node

    def _in_virtual_time(self, runners: set[str]) -> set[ast.stmt]:
        """Functions with something that such a clock runs, and those that are given to it by name."""
        users = [one for one in self.functions if _uses(one, runners)]
        given = {
            name.id
            for user in users
            for call in ast.walk(user)
            if isinstance(call, ast.Call) and _named(call.func, runners)
            for argument in call.args
            for name in ast.walk(argument)
            if isinstance(name, ast.Name)
        }
        return {*users, *(one for one in self.functions if one.name in given)}

    def _has_reason(self, node: ast.Call, above: list[ast.AST]) -> bool:
        """A comment on its lines, or on the line above its statement."""
        statement = next(one for one in above if isinstance(one, ast.stmt))
        own = self.lines[statement.lineno - 1 : node.end_lineno]
        before = self.lines[statement.lineno - 2].strip()
        return before.startswith("# ") or any("  # " in line for line in own)


def _to_look_at(lines: list[str]) -> set[int]:
    """The numbers of lines whose sleep has no comment, and does not begin what a `while` does."""
    return {
        number
        for number, (before, line) in enumerate(zip(["", *lines], lines, strict=False), 1)
        if "sleep(" in line and _FIXED.search(line) and "  # " not in line
        if not before.strip().startswith("# ")
        if not (before.strip().startswith("while ") and _ALONE.match(line))
    }


def _lines_of(node: ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _above(node: ast.AST, parents: Mapping[ast.AST, ast.AST]) -> Iterator[ast.AST]:
    while node in parents:
        node = parents[node]
        yield node


def _is_zero(node: ast.Call) -> bool:
    return ast.unparse(node.args[0]) == "0"


def _named(node: ast.AST, names: set[str]) -> bool:
    return isinstance(node, ast.Name) and node.id in names


def _uses(function: _Function, names: set[str]) -> bool:
    calls = (one.func for one in ast.walk(function) if isinstance(one, ast.Call))
    return any(_named(one, names) for one in (*calls, *function.decorator_list))


def _is_poll(above: list[ast.AST]) -> bool:
    """In a loop that ends by what it waits for."""
    for one in above:
        if isinstance(one, (*_FUNCTIONS, ast.Lambda)):
            return False
        leaves = any(isinstance(node, (ast.Return, ast.Break)) for node in ast.walk(one))
        if isinstance(one, ast.While) or (isinstance(one, ast.For) and leaves):
            return True
    return False


def test_each_fixed_sleep_has_its_reason() -> None:
    modules = {
        file.relative_to(ROOT): Module(text)
        for folder in ("tests", "client/tests")
        for file in (ROOT / folder).rglob("*.py")
        if _CLOCK in (text := file.read_text())
        or ("sleep(" in text and _to_look_at(text.splitlines()))
    }
    exported = {
        ".".join(file.with_suffix("").parts): module.runners({}) for file, module in modules.items()
    }
    found = [
        f"{file}:{node.lineno}: {ast.unparse(node)}"
        for file, module in sorted(modules.items())
        for node in module.without_reason(module.runners(exported))
    ]
    assert not found, "neither a poll nor with a comment that gives the reason:\n" + "\n".join(
        found
    )


@pytest.mark.parametrize(
    ("line", "is_found"),
    [
        ("await asyncio.sleep(0.3)", True),
        ("time.sleep(SECONDS)", True),
        ("until(lambda: asyncio.sleep(0.1, x))", True),
        ("for _ in range(3): await asyncio.sleep(1)", True),
        ("# fmt: off\n    await asyncio.sleep(\n        1,\n    )", False),
        ("await asyncio.sleep(1)  # the scripted delay", False),
        ("await asyncio.sleep(0)", False),
        ("until(lambda: asyncio.sleep(0, x))", False),
        ("while not x: await asyncio.sleep(1)", False),
        ("for _ in range(3):\n        if x: break\n        await asyncio.sleep(1)", False),
        ("while x:\n        def f(): time.sleep(1)", True),
        ("async def work(): await asyncio.sleep(9)\n    run_in_virtual_time(work())", False),
        ("async def work(): await asyncio.sleep(9)\n    run(work)", True),
    ],
)
def test_what_a_fixed_sleep_is(line: str, is_found: bool) -> None:
    module = Module(f"async def test_x():\n    {line}\n")
    assert bool(list(module.without_reason(module.runners({})))) is is_found


def test_a_function_that_runs_others_in_virtual_time_may_be_imported() -> None:
    bench = Module("def run(work): run_in_virtual_time(work())\n")
    test = Module("""
from tests.bench import run
def test_x():
    async def work(): await asyncio.sleep(9)
    run(work)
""")
    assert len(list(test.without_reason(test.runners({})))) == 1
    runners = test.runners({"tests.bench": bench.runners({})})
    assert not list(test.without_reason(runners))
