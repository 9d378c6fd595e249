"""Edits of SQL inside string literals: dropped conditions, joins, locks, orders, bounds, NULLs."""

import ast
import re
from collections.abc import Iterator

from tools.mutation.source import Edit, Source

_SQL = re.compile(
    r"\b(SELECT|UPDATE|INSERT INTO|DELETE FROM|WHERE|FROM|JOIN|AND|ORDER BY|RETURNING|LIMIT"
    r"|IS NULL|IS NOT NULL|CASE)\b|\bcoalesce\("
)
# A bound that is the present moment: its last microsecond is no behaviour.
_MOMENT = r" (?:now|clock_timestamp)\(\)"
_SWAPS = (
    (r"(?<=\s)OR(?=\s)", "AND", "and/or"),
    *(
        (rf"(?<=\s){one}(?=\s)(?!{_MOMENT})", other, "comparison")
        for one, other in (("<", "<="), ("<=", "<"), (">", ">="), (">=", ">"))
    ),
    (r"(?<=\s)<>(?=\s)", "=", "comparison"),
    (r"\bIS NULL\b", "IS NOT NULL", "NULL"),
    (r"\bIS NOT NULL\b", "IS NULL", "NULL"),
    (r"\bNOT EXISTS\b", "EXISTS", "exists"),
    (r"\s\bDESC\b", "", "order"),
    (r"\bLEFT JOIN\b", "JOIN", "join"),
    (r"\bSELECT DISTINCT\b(?! ON)", "SELECT", "distinct"),
    (r"\s[-+] 1\b", "", "off by one"),
    (r"\bleast\(", "greatest(", "bound"),
    (r"\bgreatest\(", "least(", "bound"),
    (r"\bSKIP LOCKED\b", "", "lock"),
    (r"\bFOR (?:NO KEY )?(?:UPDATE|KEY SHARE|SHARE)(?: OF \w+)?(?: SKIP LOCKED)?", "", "lock"),
    (r"\btrue\b", "false", "flag"),
    (r"\bfalse\b", "true", "flag"),
    (r"\bDO NOTHING\b", "", "conflict"),
)
# `=` compares behind one of these, and assigns elsewhere.
_EQUALS = re.compile(r"\b(?:WHERE|AND|OR|ON|WHEN|HAVING|NOT)\s+[\w.]+\s+(=)\s")
_TERMS = re.compile(r"\b(WHERE|AND|OR|ON)\s+(?!CONFLICT)")
_TERM_END = re.compile(
    r"\b(AND|OR|ORDER BY|GROUP BY|LIMIT|RETURNING|FOR (?:NO|UPDATE|KEY|SHARE)|UNION|WHEN|THEN|ELSE"
    r"|END|JOIN|LEFT|CROSS|HAVING|WINDOW|SET|ON|WHERE|FROM|DO)\b"
)
_BETWEEN = re.compile(r"\bBETWEEN\s+\S+\s+$")
_COALESCE = re.compile(r"\bcoalesce\(")
_ORDER = re.compile(r"\bORDER BY\s+")


def sql_edits(source: Source) -> Iterator[Edit]:
    """Yield the edits of each literal that holds SQL."""
    for start, raw in _literals(source):
        text = _mask(raw)
        for at, end, replacement, operator in _all(text, raw):
            first = start + len(raw[:at].encode())
            last = first + len(raw[at:end].encode())
            yield Edit(first, last, replacement.encode(), f"SQL {operator}")


_Found = tuple[int, int, str, str]


def _all(text: str, raw: str) -> Iterator[_Found]:
    for pattern, replacement, operator in _SWAPS:
        for found in re.finditer(pattern, text):
            if not (operator == "and/or" and _BETWEEN.search(text, 0, found.start())):
                yield *found.span(), replacement, operator
    for found in _EQUALS.finditer(text):
        yield *found.span(1), "<>", "comparison"
    yield from _dropped_terms(text)
    yield from _coalesce(text, raw)
    yield from _order_keys(text)


def _dropped_terms(text: str) -> Iterator[_Found]:
    for found in _TERMS.finditer(text):
        if found[1] == "AND" and _BETWEEN.search(text, 0, found.start()):
            continue
        end = _scan(text, found.end(), _TERM_END)
        if _BETWEEN.search(text, 0, end):
            end = _scan(text, end + len("AND"), _TERM_END)
        if text[found.end() : end].strip():
            while text[end - 1].isspace():
                end -= 1
            neutral = "false" if found[1] == "OR" else "true"
            yield found.end(), end, neutral, "condition dropped"


def _coalesce(text: str, raw: str) -> Iterator[_Found]:
    for found in _COALESCE.finditer(text):
        comma = _scan(text, found.end(), re.compile(","))
        end = _scan(text, comma, re.compile(r"(?!)"))
        if end < len(text):
            yield found.start(), end + 1, raw[found.end() : comma].strip(), "NULL"


def _order_keys(text: str) -> Iterator[_Found]:
    """Drop the first key of an order of several."""
    for found in _ORDER.finditer(text):
        end = _scan(text, found.end(), re.compile(rf",|{_TERM_END.pattern}"))
        if end < len(text) and text[end] == ",":
            yield found.end(), end + 1, "", "order"


def _scan(text: str, start: int, stop: re.Pattern[str]) -> int:
    """Return the place of the first match, closing bracket, quote or semicolon outside brackets."""
    depth = 0
    for at in range(start, len(text)):
        character = text[at]
        if character in '";' or (character == ")" and depth == 0):
            return at
        depth += (character == "(") - (character == ")")
        if depth == 0 and stop.match(text, at):
            return at
    return len(text)


def _literals(source: Source) -> Iterator[tuple[int, str]]:
    """Yield the place and the text, with its quotes, of each literal with SQL; none twice."""
    skipped: set[ast.AST] = set()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Expr) or node in skipped:
            skipped.update(ast.iter_child_nodes(node))  # docstrings; the parts of f-strings
            if not isinstance(node, ast.Expr):
                continue
        if isinstance(node, ast.JoinedStr):
            skipped.update(ast.walk(node))
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if isinstance(node, ast.JoinedStr) or is_text:
            start, end = source.span(node)  # type: ignore[arg-type] # one of the two
            raw = source.text[start:end].decode()
            if _SQL.search(_mask(raw)):
                yield start, raw


def _mask(raw: str) -> str:
    """Hide the fields of an f-string, and comments, behind characters that no pattern has."""
    text, depth = [], 0
    for character in raw if raw.startswith(("f", "rf")) else "":
        depth += character == "{"
        text.append("_" if depth else character)
        depth -= character == "}"
    masked = "".join(text) or raw
    return re.sub(r"--[^\n]*", lambda comment: "_" * len(comment[0]), masked)
