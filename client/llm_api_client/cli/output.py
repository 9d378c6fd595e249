"""Output of commands: JSON, tables, and colours on terminals."""

import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from llm_api_client.json_lines import to_line
from llm_api_client.schemas import Result

_COLOURS = {"completed": "32", "ready": "32", "failed": "31", "pending": "33", "dim": "2"}
_ELLIPSIS = "…"


@dataclass
class Output:
    """Writes to standard output, as the caller chose; messages go to standard error."""

    is_json: bool = False
    no_color: bool = False

    @property
    def has_colours(self) -> bool:
        return sys.stdout.isatty() and not self.no_color and not os.environ.get("NO_COLOR")

    def json(self, value: Any) -> None:
        """One JSON document, or a line of one."""
        sys.stdout.write(to_line(value).decode())

    def text(self, text: str) -> None:
        """Text of a model as it is; on a terminal without its control characters."""
        sys.stdout.write(shown(text) if sys.stdout.isatty() else text)
        sys.stdout.flush()

    def line(self, text: str) -> None:
        sys.stdout.write(text + "\n")

    def note(self, text: str) -> None:
        """A message that is not part of the output."""
        sys.stderr.write(text + "\n")

    def coloured(self, text: str, colour: str) -> str:
        code = _COLOURS.get(colour)
        return f"\x1b[{code}m{text}\x1b[0m" if code and self.has_colours else text

    def table(self, head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """Columns as wide as their cells; on a terminal the last one is cut at its width."""
        cells = [[_cell(value) for value in row] for row in rows]
        widths = [max(len(row[i]) for row in [list(head), *cells]) for i in range(len(head))]
        self.line(self.coloured(self._row(head, widths), "dim"))
        for row in cells:
            line = self._row(row, widths)
            for word in row:
                if word in _COLOURS:
                    line = line.replace(word, self.coloured(word, word), 1)
            self.line(line)

    def _row(self, cells: Sequence[str], widths: Sequence[int]) -> str:
        line = "  ".join(
            cell.ljust(width) for cell, width in zip(cells, widths, strict=True)
        ).rstrip()
        width = shutil.get_terminal_size().columns
        if sys.stdout.isatty() and len(line) > width:
            return line[: width - 1] + _ELLIPSIS
        return line

    def result(self, result: Result) -> None:
        """A result: its text, or all of it as JSON."""
        if self.is_json:
            self.json(result)
        elif isinstance(result.result, dict):
            self.json(result.result)
        else:
            self.text(result.text + "\n")

    def results(self, results: Iterable[Result]) -> None:
        """Results, one a line."""
        if self.is_json:
            for result in results:
                self.json(result)
            return
        head = ("ID", "STATE", "MODEL", "CREATED", "TOKENS", "TEXT")
        self.table(head, (_columns(result) for result in results))


def _columns(result: Result) -> Sequence[object]:
    tokens = result.usage.completion_tokens if result.usage else None
    created = f"{result.created_at:%Y-%m-%d %H:%M:%S}" if result.created_at else ""
    text = result.error.code if result.error else result.text[:200]
    return result.id, result.state, result.model_name, created, tokens, text


def _cell(value: object) -> str:
    return "" if value is None else " ".join(shown(str(value)).split())


def shown(text: str) -> str:
    """Text without the control characters that could change a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "�" for c in text)
