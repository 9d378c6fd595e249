"""Edits of expressions and statements in functions: guards, comparisons, bounds, dropped calls."""

import ast
import re
from collections.abc import Iterator

from tools.mutation.source import Edit, Source

_COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: (r"is\s+not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: (r"not\s+in", "in"),
}
_ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: (r"\+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: (r"\*", "/"),
    ast.Div: ("/", "*"),
    ast.BitOr: (r"\|", "&"),
    ast.BitAnd: ("&", "|"),
}
_AUGMENTED: dict[type[ast.operator], str] = {ast.Add: "-=", ast.Sub: "+=", ast.BitOr: "="}
_CALLS = {
    "min": "max",
    "max": "min",
    "any": "all",
    "all": "any",
    "match": "search",
    "fullmatch": "match",
    "startswith": "endswith",
    "endswith": "startswith",
}
_LEAVES = ast.Return | ast.Raise | ast.Continue | ast.Break
# Calls that a dropped line of a log, or of a trace, stands for: no test asks for each.
_REPORTS = re.compile(r"\b(logger|logging|trace|span|progress|warnings)\b")
_LARGEST_BOUND = 10  # larger numbers are sizes and times, which one more does not change


def python_edits(source: Source) -> Iterator[Edit]:
    """Yield the edits of all functions; what a module does at its import is data."""
    for statement in source.tree.body:
        yield from _Finder(source).find(statement)


class _Finder(ast.NodeVisitor):
    def __init__(self, source: Source) -> None:
        self._source = source
        self._edits: list[Edit] = []
        self._depth = 0  # of functions

    def find(self, statement: ast.stmt) -> list[Edit]:
        self.visit(statement)
        return self._edits

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._depth += 1
        for statement in node.body:  # neither decorators nor annotations
            self.visit(statement)
        self._depth -= 1

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815 - the name is ast's

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Assert(self, node: ast.Assert) -> None:
        """Skip it: it narrows a type."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Skip it: before Python 3.12 its parts have no places."""

    def visit_Raise(self, node: ast.Raise) -> None:
        """Skip it: a message is not behaviour."""

    def visit_Compare(self, node: ast.Compare) -> None:
        left = node.left
        for operator, right in zip(node.ops, node.comparators, strict=True):
            if pair := _COMPARISONS.get(type(operator)):
                self._replace_between(left, right, *pair, "comparison")
            left = right
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        pair = (r"\band\b", "or") if isinstance(node.op, ast.And) else (r"\bor\b", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._replace_between(left, right, *pair, "and/or")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            start, _ = self._source.span(node)
            self._add(start, start + len("not"), "", "not dropped")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        texts = (ast.Constant, ast.JoinedStr)
        is_text = any(
            isinstance(side, texts) and not isinstance(getattr(side, "value", ""), int | float)
            for side in (node.left, node.right)
        )
        if not is_text and (pair := _ARITHMETIC.get(type(node.op))):
            self._replace_between(node.left, node.right, *pair, "arithmetic")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if replacement := _AUGMENTED.get(type(node.op)):
            self._replace_between(node.target, node.value, r"[-+|]=", replacement, "assignment")
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        if isinstance(node.body[-1], _LEAVES) and not node.orelse:
            self._replace_test(node.test, "False", "guard dropped")
        else:
            self._negate(node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self._replace_test(test, "True", "filter dropped")
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        value = node.value.value if isinstance(node.value, ast.Await) else node.value
        if isinstance(value, ast.Call):
            start, end = self._source.span(node)
            if _REPORTS.search(ast.unparse(value.func)):
                return
            self._add(start, end, "pass", "call dropped")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func
        text = name.id if isinstance(name, ast.Name) else getattr(name, "attr", "")
        if replacement := _CALLS.get(text):
            _, end = self._source.span(name)
            self._add(end - len(text), end, replacement, "call")
        self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg != "strict":  # an assertion about lengths
            self.generic_visit(node)

    def visit_Continue(self, node: ast.Continue) -> None:
        self._add(*self._source.span(node), "break", "loop")

    def visit_Break(self, node: ast.Break) -> None:
        self._add(*self._source.span(node), "continue", "loop")

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._add(*self._source.span(node), str(not node.value), "flag")
        elif isinstance(node.value, int) and 0 <= node.value <= _LARGEST_BOUND:
            self._add(*self._source.span(node), str(node.value + 1), "off by one")

    def _negate(self, test: ast.expr) -> None:
        # The edits of `not x` and of a single comparison are the same.
        if not isinstance(test, ast.UnaryOp | ast.Compare | ast.Constant):
            start, end = self._source.span(test)
            text = self._source.text[start:end].decode()
            self._replace_test(test, f"not ({text})", "condition negated")

    def _replace_test(self, test: ast.expr, replacement: str, operator: str) -> None:
        if (
            not any(isinstance(part, ast.NamedExpr) for part in ast.walk(test))
            or "(" in replacement
        ):
            self._add(*self._source.span(test), replacement, operator)

    def _replace_between(
        self, left: ast.expr, right: ast.expr, pattern: str, replacement: str, operator: str
    ) -> None:
        _, start = self._source.span(left)
        end, _ = self._source.span(right)
        if found := re.search(pattern, self._source.text[start:end].decode()):
            self._add(start + found.start(), start + found.end(), replacement, operator)

    def _add(self, start: int, end: int, replacement: str, operator: str) -> None:
        if self._depth:
            self._edits.append(Edit(start, end, replacement.encode(), operator))
