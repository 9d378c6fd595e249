"""Every regular expression of the service, fed with texts made of its own pieces, repeated.

A quadratic one needs seconds for texts for which a linear one needs microseconds.
"""

import ast
import importlib
import importlib.util
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest

# The parser of `re`, which has no types.
parser: Any = importlib.import_module("re._parser")
codes: Any = importlib.import_module("re._constants")
ROOT = Path(__file__).resolve().parents[2]
SOURCES = [
    *sorted((ROOT / "app").rglob("*.py")),
    ROOT / "triton" / "models" / "scripted" / "1" / "script.py",
]
# Texts of the service, of its operator's cluster or of Triton, in which no tenant writes.
OURS = {
    "app/core/metrics.py": "our own metrics",
    "app/cli/up/triton.py": "Triton's log",
    "app/provisioning/slurm.py": "Slurm's output",
}
_USES = ("match", "search", "fullmatch", "sub", "split", "findall", "finditer")
_SIZE = 4_000  # characters of the smaller text
_LONG_SECONDS = 0.05  # of CPU, for the larger text; a linear expression needs a hundredth
_MAX_RATIO = 8.0  # of the CPU time for 4 times the text: quadratic work takes 16 times as long
_MAX_PIECES = 14


@dataclass(frozen=True)
class Expression:
    place: str
    pattern: "re.Pattern[Any]"
    use: str


def expressions() -> Iterator[Expression]:
    trees = {path: ast.parse(path.read_text()) for path in SOURCES}
    for path, tree in trees.items():
        name = str(path.relative_to(ROOT))
        if name in OURS:
            continue
        uses = _uses(tree)
        names = {
            id(node.value): node.targets[0].id
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        }
        for node in ast.walk(tree):
            if not _is_regex_call(node):
                continue
            assert isinstance(node, ast.Call)
            assert isinstance(node.func, ast.Attribute)
            place = f"{name}:{node.lineno}"
            for pattern in _patterns(path, node):
                used = {use for of, use in uses if of == names.get(id(node))} or {"search"}
                if node.func.attr != "compile":
                    used = {node.func.attr}
                yield from (Expression(place, pattern, use) for use in sorted(used))


def _uses(tree: ast.AST) -> set[tuple[str, str]]:
    """Names and their methods, in the module of a pattern: it is private."""
    return {
        (node.value.id, node.attr)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr in _USES
        and isinstance(node.value, ast.Name)
    }


def _is_regex_call(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "re"
        and node.func.attr in ("compile", *_USES)
    )


def _patterns(path: Path, call: ast.Call) -> "list[re.Pattern[Any]]":
    """The compiled patterns of a call; those of a function's argument, from its module's rules."""
    scope = vars(_module(path))
    flags = [keyword.value for keyword in call.keywords if keyword.arg == "flags"]
    behind = 1 if call.func.attr in ("compile",) else 2  # type: ignore[attr-defined]
    flags += [one for one in call.args[behind:] if "re." in ast.unparse(one)]
    compiled = ast.unparse(call.args[0])
    try:
        source = eval(compiled, scope)  # noqa: S307 # our own source
    except NameError:
        return _of_callers(scope)
    value = eval(ast.unparse(flags[0]), scope) if flags else 0  # noqa: S307
    return [re.compile(source, value)]


def _of_callers(scope: dict[str, Any]) -> "list[re.Pattern[Any]]":
    """Patterns behind the bound methods in a module's lists."""
    rules = [one for value in scope.values() if isinstance(value, list) for one in value]
    found = [one[0].__self__ for one in rules if isinstance(one, tuple) and callable(one[0])]
    return [one for one in found if isinstance(one, re.Pattern)]


def _module(path: Path) -> Any:
    if path.is_relative_to(ROOT / "app"):
        return importlib.import_module(
            ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        )
    spec = importlib.util.spec_from_file_location("scripted_model", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def pieces_of(pattern: "re.Pattern[Any]") -> list[str]:
    """Samples of what a pattern is made of: literals, runs of literals, members of its classes."""
    text = pattern.pattern if isinstance(pattern.pattern, str) else pattern.pattern.decode("latin1")
    found: dict[str, None] = {}
    _collect(parser.parse(text, pattern.flags & ~re.UNICODE), found)
    return list(found)[:_MAX_PIECES]


def _collect(tree: Any, found: dict[str, None]) -> None:
    run = ""
    for code, value in tree:
        if code is codes.LITERAL:
            run += chr(value)
            found.setdefault(chr(value))
            continue
        if len(run) > 1:
            found.setdefault(run)
        run = ""
        if code is codes.IN:
            for sample in _members(value):
                found.setdefault(sample)
        elif code in (codes.ANY, codes.NOT_LITERAL):
            found.setdefault("x")
        else:
            for inner in _inner(value):
                _collect(inner, found)
    if len(run) > 1:
        found.setdefault(run)


def _inner(value: Any) -> Iterator[Any]:
    if isinstance(value, parser.SubPattern):
        yield value
    elif isinstance(value, tuple | list):
        for one in value:
            yield from _inner(one)


_CATEGORIES = {"CATEGORY_DIGIT": "1", "CATEGORY_SPACE": " ", "CATEGORY_WORD": "a"}


def _members(members: Any) -> Iterator[str]:
    for code, value in members:
        if code is codes.LITERAL:
            yield chr(value)
        elif code is codes.RANGE:
            yield chr(value[0])
        elif code is codes.CATEGORY:
            yield _CATEGORIES.get(str(value), "!")
        elif code is codes.NEGATE:
            yield "x"


def seconds_of(one: Expression, text: str) -> float:
    given: Any = text.encode() if isinstance(one.pattern.pattern, bytes) else text
    run = getattr(one.pattern, one.use)
    began = time.thread_time()
    if one.use == "sub":
        run(given[:0], given)
    elif one.use == "finditer":
        list(run(given))
    else:
        run(given)
    return time.thread_time() - began


def assert_linear(one: Expression) -> None:
    pieces = pieces_of(one.pattern)
    # A prefix that the pattern begins with; a suffix that it does not match at.
    prefixes = ["", *pieces[:4], "".join(pieces[:2]), "".join(pieces[:3])]
    for prefix, piece, suffix in product(prefixes, pieces, ("", "\x01!")):
        count = _SIZE // len(piece)
        long = prefix + piece * (4 * count) + suffix
        if seconds_of(one, long) < _LONG_SECONDS:
            continue
        # The least disturbed of three counts each.
        seconds = min(seconds_of(one, long) for _ in range(3))
        short = min(seconds_of(one, prefix + piece * count + suffix) for _ in range(3))
        assert seconds < max(_LONG_SECONDS, _MAX_RATIO * short), (
            f"{one.place}: {one.use} of {one.pattern.pattern!r} takes {seconds:.2f} s for "
            f"{len(long)} characters of {piece!r} behind {prefix!r}"
        )


FOUND = list(expressions())


@pytest.mark.parametrize("one", FOUND, ids=lambda one: f"{one.place}-{one.use}")
@pytest.mark.slow("a pattern of many pieces has hundreds of inputs")
def test_a_regular_expression_takes_linear_time(one: Expression) -> None:
    assert_linear(one)


def test_all_expressions_are_found() -> None:
    """Also those that are compiled from a function's argument."""
    places = {one.place.partition(":")[0] for one in FOUND}
    assert {"app/inference/tool_calls/mistral.py", "app/inference/triton_errors.py"} <= places
    assert len(FOUND) > 60


@pytest.mark.parametrize("pattern", [r"\[[A-Z_]*\]?[A-Za-z0-9]*\s*\Z", r"\d+\d*x"])
@pytest.mark.trial
def test_a_quadratic_expression_is_found(pattern: str) -> None:
    with pytest.raises(AssertionError, match="characters of"):
        assert_linear(Expression("here:1", re.compile(pattern), "match"))
