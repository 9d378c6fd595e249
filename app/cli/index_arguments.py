"""`python -m app index`: its arguments, their validation and their help. `index_commands` runs it."""

import argparse
from pathlib import Path

from app.cli.arguments import Subcommands, add_command, add_subcommands, whole_number
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


def add_to(commands: Subcommands) -> None:
    text = "Build, list and check infini-gram indexes."
    parser = add_command(commands, "index", text, epilog=_EPILOG)
    actions = add_subcommands(parser)

    _add_build(actions)
    _add_adopt(actions)
    _add_file(
        add_command(
            actions, "list", "Show the declared indexes, and whether each can be opened.", _run
        )
    )
    check = add_command(
        actions, "check", "Read all files of an index, and compare them with its manifest.", _run
    )
    check.add_argument("name", help="the index, as it is declared")
    _add_file(check)


def _add_build(actions: Subcommands) -> None:
    build = add_command(actions, "build", "Build an index of a corpus.", _run, epilog=_BUILD_EPILOG)
    build.add_argument("corpus", type=Path, help="a .txt or .jsonl file, or a directory of them")
    build.add_argument("--name", required=True, type=_name, help="its name in requests")
    build.add_argument(
        "--out", type=Path, default=Path("indexes"), metavar="DIR",
        help="parent of the index's own directory, which is called NAME (indexes)",
    )  # fmt: skip
    _add_tokenizer(build)
    build.add_argument(
        "--replace", action="store_true",
        help="replace an index of this name; running processes keep the old one",
    )  # fmt: skip
    build.add_argument("--description", default="", help="a description, for `list` and for people")
    build.add_argument(
        "--split", choices=("file", "blocks", "lines"), default="file",
        help="documents of a .txt file: all of it, each block between blank lines, "
        "each line (file)",
    )  # fmt: skip
    build.add_argument(
        "--memory", type=whole_number(1, 4096), default=1, metavar="GIB",
        help="most memory for the indexer; more speeds up large indexes (1)",
    )  # fmt: skip
    build.add_argument(
        "--cpus", type=whole_number(1, 1024), default=2, metavar="N", help="processors to use (2)"
    )
    build.add_argument(
        "--ulimit", type=whole_number(64, 1_048_576), metavar="N",
        help="most open files of the indexer (65536, or what this user may open)",
    )  # fmt: skip
    build.add_argument(
        "--end-id", type=whole_number(0, 65_534), metavar="ID",
        help="id of the end-of-text token, if the tokenizer's files do not name it",
    )  # fmt: skip
    _add_file(build)


def _add_adopt(actions: Subcommands) -> None:
    adopt = add_command(
        actions, "adopt", "Import an index that the package infini-gram built.", _run,
        epilog=_ADOPT_EPILOG,
    )  # fmt: skip
    adopt.add_argument(
        "directory", type=Path, help="the directory of its files: tokenized.0, table.0, ..."
    )
    adopt.add_argument("--name", required=True, type=_name, help="its name in requests")
    _add_tokenizer(adopt)
    adopt.add_argument("--description", default="", help="a description, for `list` and for people")
    adopt.add_argument(
        "--end-id", type=whole_number(0, 65_534), metavar="ID",
        help="id of the end-of-text token, if the tokenizer's files do not name it",
    )  # fmt: skip
    _add_file(adopt)


def _add_tokenizer(parser: argparse.ArgumentParser) -> None:
    tokenizer = parser.add_mutually_exclusive_group()
    tokenizer.add_argument(
        "--tokenizer", metavar="FILE", help="a tokenizer.json, or `bytes` (bytes)"
    )
    tokenizer.add_argument(
        "--model", help="use the tokenizer of this model of LLM_MODEL_REPOSITORY"
    )


def _add_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--file", type=Path, help="TOML file of the declarations, instead of LLM_INDEXES_FILE"
    )


def _run(options: argparse.Namespace) -> int:
    from app.cli import index_commands

    return index_commands.run(options.command, options)


def _name(text: str) -> str:
    try:
        return check_name(text)
    except DeclarationError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
