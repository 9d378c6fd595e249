"""`python -m app index`: its arguments, their validation and their help. `index_commands` runs it."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from app.infini_gram.declarations import DeclarationError, check_name

_EPILOG = """examples:
  python -m app index build news/ --name news --model demo
      indexes every .txt and .jsonl file below news/ with the tokenizer of the model demo
  python -m app index build wiki.jsonl.gz --name wiki --tokenizer path/to/tokenizer.json
  LLM_INDEXES_FILE=indexes.toml python -m app index list
  LLM_INDEXES_FILE=indexes.toml python -m app index check news

An index returns how often any sequence of tokens occurs in a corpus, and where. The service opens
the indexes that the TOML file LLM_INDEXES_FILE declares; `build` adds its index to that file.
More: docs/infini_gram.md."""

_BUILD_EPILOG = """A corpus is a .txt or .jsonl file, or a directory of them, plain or compressed (.gz, .bz2, .xz).
Each line of a .jsonl file is a document: {"text": "...", and any other members as its metadata}.
A .txt file is one document; --split takes its blocks or its lines instead.

For the outputs of one model, use that model's own tokenizer (--model, --tokenizer): token
ids must be below 65535. `bytes` needs none, finds any piece of text, and makes a larger index.

The index is complete when the command ends with status 0. If it fails or is interrupted, no files
are left. Status 2: the input was wrong; one line names the place and the error."""

_ADOPT_EPILOG = """Checks the files, and writes manifest.json with their sizes and checksums beside them. From then on
the service opens the index, and notices changes of its files. The tokenizer must be the one that the
index was built with (of one or two bytes a token); the command cannot verify that completely."""


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "Build, list and check infini-gram indexes."
    parser = commands.add_parser("index", help=text, description=text, **_help_format(_EPILOG))
    actions = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    _add_build(actions)
    _add_adopt(actions)
    _add_file(_add(actions, "list", "Show the declared indexes, and whether each can be opened."))
    check = _add(
        actions, "check", "Read all files of an index, and compare them with its manifest."
    )
    check.add_argument("name", help="the index, as it is declared")
    _add_file(check)


def _add_build(actions: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    build = _add(actions, "build", "Build an index of a corpus.", **_help_format(_BUILD_EPILOG))
    build.add_argument("corpus", type=Path, help="a .txt or .jsonl file, or a directory of them")
    build.add_argument("--name", required=True, type=_name, help="what it is called in requests")
    build.add_argument(
        "--out", type=Path, default=Path("indexes"), metavar="DIR",
        help="directory in which the index gets one of its own, called NAME (indexes)",
    )  # fmt: skip
    _add_tokenizer(build)
    build.add_argument(
        "--replace", action="store_true",
        help="put it in the place of an index of this name; processes that run keep the old one",
    )  # fmt: skip
    build.add_argument("--description", default="", help="what it is, for `list` and for people")
    build.add_argument(
        "--split", choices=("file", "blocks", "lines"), default="file",
        help="what is a document of a .txt file: all of it, each block between blank lines, "
        "each line (file)",
    )  # fmt: skip
    build.add_argument(
        "--memory", type=_number(1, 4096), default=1, metavar="GIB",
        help="most memory for the indexer; more makes a large index sooner (1)",
    )  # fmt: skip
    build.add_argument(
        "--cpus", type=_number(1, 1024), default=2, metavar="N", help="processors to use (2)"
    )
    build.add_argument(
        "--ulimit", type=_number(64, 1_048_576), metavar="N",
        help="most open files of the indexer (65536, or what this user may open)",
    )  # fmt: skip
    build.add_argument(
        "--end-id", type=_number(0, 65_534), metavar="ID",
        help="id of the end-of-text token, if the tokenizer's files do not name it",
    )  # fmt: skip
    _add_file(build)


def _add_adopt(actions: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    adopt = _add(
        actions, "adopt", "Take an index that the package infini-gram built.",
        **_help_format(_ADOPT_EPILOG),
    )  # fmt: skip
    adopt.add_argument(
        "directory", type=Path, help="where its files are: tokenized.0, table.0, ..."
    )
    adopt.add_argument("--name", required=True, type=_name, help="what it is called in requests")
    _add_tokenizer(adopt)
    adopt.add_argument("--description", default="", help="what it is, for `list` and for people")
    adopt.add_argument(
        "--end-id", type=_number(0, 65_534), metavar="ID",
        help="id of the end-of-text token, if the tokenizer's files do not name it",
    )  # fmt: skip
    _add_file(adopt)


def _add_tokenizer(parser: argparse.ArgumentParser) -> None:
    tokenizer = parser.add_mutually_exclusive_group()
    tokenizer.add_argument(
        "--tokenizer", metavar="FILE", help="a tokenizer.json, or `bytes` (bytes)"
    )
    tokenizer.add_argument(
        "--model", help="take the tokenizer of this model (of LLM_MODEL_REPOSITORY)"
    )


def _add_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--file", type=Path, help="TOML file of the declarations, instead of LLM_INDEXES_FILE"
    )


def _add(
    actions: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    text: str,
    **more: Any,
) -> argparse.ArgumentParser:
    def run(options: argparse.Namespace) -> int:
        from app.cli import index_commands

        return index_commands.run(name, options)

    parser: argparse.ArgumentParser = actions.add_parser(name, help=text, description=text, **more)
    parser.set_defaults(run=run)
    return parser


def _help_format(epilog: str) -> dict[str, Any]:
    return {"epilog": epilog, "formatter_class": argparse.RawDescriptionHelpFormatter}


def _name(text: str) -> str:
    try:
        return check_name(text)
    except DeclarationError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _number(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = low - 1
        if not low <= number <= high:
            raise argparse.ArgumentTypeError(f"a number from {low} to {high}, not {text!r}")
        return number

    return parse
