"""Linter for the prose of documents, docstrings, comments, messages and templates.

    python tools/lint_prose.py FILE...

Prints one line for each finding, with the advice of tools/prose.toml; exit status 1 if there is any.
"""

import ast
import io
import re
import sys
import tokenize
import tomllib
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

_FILES_A_TASK = 20
STYLE = Path(__file__).with_name("prose.toml")

# With tables that programs write between marks, such as `<!-- CHAOS -->` and `<!-- end CHAOS -->`.
_MARKDOWN_CODE = re.compile(
    r"<!-- (\w+) -->.*?<!-- end \1 -->|^ *(```|~~~).*?^ *\2[^\n]*$|`[^`\n]*(?:\n[^`\n]+)?`|\]\([^)]*\)|<!--.*?-->|https?://\S+",
    re.DOTALL | re.M,
)
_TEMPLATE_CODE = re.compile(
    r"\{\{.*?\}\}|\{%.*?%\}|\bclass=\"[^\"]*\"|<script.*?</script>", re.DOTALL
)
_HASH_COMMENTS = re.compile(r"(?:^|(?<=\s))#[^\n]*")
_SCRIPT_COMMENTS = re.compile(r"/\*.*?\*/|(?<![:\w])//[^\n]*", re.DOTALL)
_STRING_CODE = re.compile(r"`[^`]*`|(?<!\{)\{[^{}]*\}|https?://\S+")


@dataclass(frozen=True)
class Rule:
    pattern: re.Pattern[str]
    advice: str


@dataclass(frozen=True)
class Style:
    prose: tuple[Rule, ...]  # words and openings, over the text of a whole file
    titles: tuple[Rule, ...]  # over one heading, or one first line of a docstring
    skipped: tuple[str, ...]

    def covers(self, path: Path) -> bool:
        return not any(path.match(one) for one in self.skipped)


@dataclass(frozen=True)
class Prose:
    """A file's text with all code as blanks, so that lines keep their numbers; its titles by line."""

    text: str
    titles: tuple[tuple[int, str], ...] = ()


def read_style(path: Path = STYLE) -> Style:
    style = tomllib.loads(path.read_text())

    def rules(table: str, form: str, flags: int = 0) -> tuple[Rule, ...]:
        # A blank in a pattern also matches the end of a line.
        return tuple(
            Rule(re.compile(form.format(key.replace(" ", r"\s+")), flags), advice)
            for key, advice in style[table].items()
        )

    words = rules("words", r"\b(?:{})\b", re.IGNORECASE)
    openings = rules("openings", r"(?<![\w/*-])(?:{})(?=\s)")
    return Style(
        words + openings,
        rules("titles", r"^(?:{})\b"),
        tuple(style["skipped"]),
    )


def _blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", match[0])


def _only(pattern: re.Pattern[str], text: str) -> str:
    """The matches of a pattern; everything else is blank."""
    kept = [" " if letter != "\n" else letter for letter in text]
    for match in pattern.finditer(text):
        kept[match.start() : match.end()] = match[0]
    return "".join(kept)


def _markdown(text: str) -> Prose:
    prose = _MARKDOWN_CODE.sub(_blank, text)
    lines = enumerate(prose.split("\n"), 1)
    headings = ((number, re.match(r"#+ +(.*)", line)) for number, line in lines)
    return Prose(prose, tuple((number, found[1]) for number, found in headings if found))


def _python(text: str) -> Prose:
    """Docstrings, comments, and literals of several words."""
    rows = [" " * len(line) for line in text.split("\n")]
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = tokenize.tok_name[token.type]
        if kind == "COMMENT" or (kind in ("STRING", "FSTRING_MIDDLE") and " " in token.string):
            (first, column), prose = token.start, _STRING_CODE.sub(_blank, token.string)
            for row, line in enumerate(prose.split("\n"), first - 1):
                rows[row] = rows[row][:column] + line + rows[row][column + len(line) :]
                column = 0
    return Prose("\n".join(rows), tuple(_docstring_titles(ast.parse(text))))


def _docstring_titles(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring:
                yield node.body[0].lineno, docstring.split("\n")[0]


_READERS: dict[str, Callable[[str], Prose]] = {
    ".md": _markdown,
    ".py": _python,
    ".html": lambda text: Prose(_TEMPLATE_CODE.sub(_blank, text)),
    **dict.fromkeys((".js", ".css"), lambda text: Prose(_only(_SCRIPT_COMMENTS, text))),
    **dict.fromkeys(
        (".yaml", ".yml", ".toml", ".sh", ".conf", ".in", ""),
        lambda text: Prose(_only(_HASH_COMMENTS, text)),
    ),
}


def findings(text: str, suffix: str, style: Style) -> list[str]:
    """`LINE: "words": advice` of each violation, by line."""
    prose = _READERS[suffix](text)
    found = [
        (prose.text.count("\n", 0, match.start()) + 1, match[0], rule.advice)
        for rule in style.prose
        for match in rule.pattern.finditer(prose.text)
    ]
    found += [
        (line, match[0], f"begin a title with {rule.advice}")
        for line, title in prose.titles
        for rule in style.titles
        if (match := rule.pattern.search(title))
    ]
    return [
        f'{line}: "{" ".join(words.split())}": {advice}' for line, words, advice in sorted(found)
    ]


def _lint(path: Path, style: Style) -> list[str]:
    return [f"{path}:{one}" for one in findings(path.read_text(), path.suffix, style)]


def main(names: list[str]) -> int:
    style = read_style()
    paths = [Path(name) for name in names]
    read = [
        path for path in paths if path.suffix in _READERS and path.is_file() and style.covers(path)
    ]
    with ProcessPoolExecutor() as pool:
        of_files = pool.map(partial(_lint, style=style), read, chunksize=_FILES_A_TASK)
        found = [finding for of_file in of_files for finding in of_file]
    sys.stdout.writelines(f"{line}\n" for line in found)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
