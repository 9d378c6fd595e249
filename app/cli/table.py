"""Tables on standard output, for people."""

import sys
from collections.abc import Sequence


def write_table(rows: Sequence[Sequence[str]]) -> None:
    """Write rows of cells, the first of them the heads: columns as wide as their widest cell.

    Stored text may have any characters: none reaches the terminal as a command.
    """
    shown = [[cell if cell.isprintable() else repr(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    for row in shown:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        sys.stdout.write(f"{line.rstrip()}\n")
