"""Parts that the arguments of several commands share."""

import argparse
from collections.abc import Callable
from typing import TypeAlias

Subcommands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
Run = Callable[[argparse.Namespace], int]


def add_command(
    commands: Subcommands, name: str, text: str, run: Run | None = None, epilog: str | None = None
) -> argparse.ArgumentParser:
    """Add a command; `run` returns its exit status."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=text,
        description=text,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    return parser


def add_subcommands(parser: argparse.ArgumentParser) -> Subcommands:
    return parser.add_subparsers(title="commands", required=True, metavar="COMMAND")


def whole_number(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = low - 1
        if not low <= number <= high:
            raise argparse.ArgumentTypeError(
                f"must be a whole number from {low} to {high}, not {text[:40]!r}"
            )
        return number

    return parse
