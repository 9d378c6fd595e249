"""Arguments that several commands share, and their values."""

import argparse
import sys
from typing import Any

import msgspec

from llm_api_client.client import Client
from llm_api_client.errors import ConfigurationError

Arguments = argparse.Namespace
Subparsers = Any  # argparse's own type is private


def add_prompt(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "prompt", nargs="?", default="-", help="the text; - or none: standard input"
    )
    parser.add_argument("--system", metavar="TEXT", help="send a chat with this system message")
    parser.add_argument(
        "--chat", action="store_true", help="send the text as a chat's user message"
    )


def add_parameters(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--max-tokens", type=int, metavar="N", help="most tokens of the answer")
    parser.add_argument("--temperature", type=float, metavar="T", help="0: the likeliest text")
    parser.add_argument(
        "-p", "--parameter", action="append", default=[], metavar="NAME=VALUE",
        help="another parameter; the value is JSON or a text (repeatable)",
    )  # fmt: skip


def add_reuse(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--reuse", action=argparse.BooleanOptionalAction, default=None,
        help="equal results of the past may answer, or not; default: the team's setting",
    )  # fmt: skip


def prompt_of(arguments: Arguments) -> str | list[dict[str, str]]:
    """The prompt, from standard input where it is `-`."""
    text: str = arguments.prompt
    if text == "-":
        if sys.stdin.isatty():
            sys.stderr.write("Reading the prompt from standard input; Ctrl-D ends it.\n")
        text = sys.stdin.read()
    if not text:
        raise ConfigurationError("The prompt is empty.")
    if not arguments.chat and arguments.system is None:
        return text
    system = [] if arguments.system is None else [{"role": "system", "content": arguments.system}]
    return [*system, {"role": "user", "content": text}]


def parameters_of(arguments: Arguments) -> dict[str, Any]:
    """The parameters of sampling."""
    given = {"max_tokens": arguments.max_tokens, "temperature": arguments.temperature}
    parameters = {name: value for name, value in given.items() if value is not None}
    for pair in arguments.parameter:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ConfigurationError(f"--parameter {pair} is not of the form NAME=VALUE.")
        try:
            parameters[name] = msgspec.json.decode(value)
        except msgspec.DecodeError:
            parameters[name] = value
    return parameters


def pairs_of(arguments: Arguments) -> dict[str, str]:
    """The pairs of `--metadata`."""
    pairs = {}
    for pair in arguments.metadata:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ConfigurationError(f"--metadata {pair} is not of the form KEY=VALUE.")
        pairs[key] = value
    return pairs


def model_of(client: Client, name: str | None) -> str:
    """The named model, or the only one that is ready."""
    if name:
        return name
    ready = [model.name for model in client.models.list() if model.ready]
    if len(ready) != 1:
        raise ConfigurationError(
            f"Name a model with --model: {', '.join(ready) or 'none is ready'}."
        )
    return ready[0]
