"""The command `llm-api`: parses its arguments, runs one command, and reports errors.

Exit status: 0 done; 1 the result failed; 2 wrong usage or configuration; 3 the service refused the
request; 4 the service did not respond, or not in time; 130 interrupted.
"""

import argparse
import os
import sys
from collections.abc import Sequence

from llm_api_client.cli import account, jobs, results
from llm_api_client.cli.output import Output
from llm_api_client.client import PATIENCE_SECONDS, Client
from llm_api_client.driver import __version__
from llm_api_client.errors import (
    APIStatusError,
    ConfigurationError,
    ConnectionFailedError,
    LLMAPIError,
    ResultFailedError,
    ServiceUnavailableError,
    WaitTimeoutError,
)

_USAGE, _REFUSED, _UNAVAILABLE, _INTERRUPTED = 2, 3, 4, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    output = Output(arguments.json, arguments.no_color)
    try:
        status = _run(arguments, output)
        sys.stdout.flush()
    except LLMAPIError as error:
        output.note(f"llm-api: {error}")
        return _status_of(error)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:  # the reader of a pipe has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return status


def _run(arguments: argparse.Namespace, output: Output) -> int:
    if "run_alone" in arguments:
        return int(arguments.run_alone(arguments, output))
    with Client(
        arguments.url, patience=arguments.patience, allow_http=arguments.allow_http
    ) as client:
        return int(arguments.run(client, arguments, output))


def _status_of(error: LLMAPIError) -> int:
    if isinstance(error, ConfigurationError):
        return _USAGE
    if isinstance(error, ResultFailedError):
        return 1
    if isinstance(error, (ConnectionFailedError, WaitTimeoutError, ServiceUnavailableError)):
        return _UNAVAILABLE
    return _REFUSED if isinstance(error, APIStatusError) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="llm-api", description=__doc__.partition("\n\n")[2])
    parser.add_argument("--version", action="version", version=__version__)
    _add_shared(parser, is_command=False)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    results.add_commands(commands)
    jobs.add_commands(commands)
    account.add_commands(commands)
    for command in commands.choices.values():
        _add_shared(command, is_command=True)
    parser.set_defaults(names=list(commands.choices))
    return parser


def _add_shared(parser: argparse.ArgumentParser, *, is_command: bool) -> None:
    """Options that may stand before or behind the command; the latter has no defaults."""

    def default(value: object) -> object:
        return argparse.SUPPRESS if is_command else value

    parser.add_argument("--json", action="store_true", default=default(False), help="print JSON")
    parser.add_argument("--url", default=default(None), help="of the service (LLM_API_URL)")
    parser.add_argument(
        "--allow-http", action="store_true", default=default(False),
        help="send the key over plain http (LLM_API_ALLOW_HTTP=1)",
    )  # fmt: skip
    parser.add_argument(
        "--no-color", action="store_true", default=default(False), help="no colours"
    )
    parser.add_argument(
        "--patience", type=float, default=default(PATIENCE_SECONDS), metavar="SECONDS",
        help="how long a lost request is repeated (60)",
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
