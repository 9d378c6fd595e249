"""The command line: `python -m app COMMAND`. Each command is a process of the service.

Only the chosen command is imported, and it imports what it runs by itself: the processes stay small
and start at once, and a container needs no package of the embedded servers.
"""

import argparse
import sys
from importlib import import_module
from types import ModuleType

from pydantic import ValidationError

from app.cli.arguments import Run, add_command, add_subcommands
from app.core import logs
from app.core.program import PROGRAM
from app.core.settings.observability import LogSettings
from app.infini_gram.declarations import DeclarationError
from app.provisioning.profiles import ProfileError

_DESCRIPTION = "Durable results in front of NVIDIA Triton: send a prompt, keep the result."
_EPILOG = """Settings come from the environment; docs/settings.md lists them all. `up` needs none: it
brings its own PostgreSQL and Triton; `plan` needs neither. The other commands need LLM_DATABASE_URL,
LLM_DATABASE_ADMIN_USER, LLM_DATABASE_PASSWORD and LLM_DATABASE_DB, and TRITON_GRPC_SERVICE
where Triton is not on 127.0.0.1:8001."""

# Modules, whose `configure` adds the arguments of the command.
_COMMANDS = {
    "up": (
        "app.cli.up.command",
        "Run everything on this machine: PostgreSQL, Triton, API, worker, web page.",
    ),
    "serve": ("app.cli.serve", "Run the API."),
    "ui": ("app.cli.ui", "Run the web page, a client of the API at LLM_UI_API_URL."),
    "worker": (
        "app.cli.worker",
        "Run a worker: it claims results and runs them, on Triton or on an index.",
    ),
    "migrate": ("app.cli.migrate", "Bring the database's schema up to date."),
    "team": ("app.cli.team", "Show and set limits of teams: queue, rates, shares."),
    "usage": ("app.cli.usage", "Show tokens and engine time of teams, keys and models."),
    "budget": ("app.cli.budget", "Show and set monthly budgets of teams and keys."),
    "price": ("app.cli.price", "Show and set prices of tokens and engine time."),
    "launch": ("app.cli.launch", "Launch Triton servers by Slurm, or on this machine."),
    "server": ("app.cli.server", "Show, register, drain and remove Triton servers."),
    "token": ("app.cli.token", "Make, list and revoke API keys and JWTs."),
    "index": ("app.cli.index", "Build, list and check infini-gram indexes."),
    "plan": ("app.cli.plan", "Calculate on which GPUs a model fits, from its config.json."),
    "model": ("app.cli.model", "Download models, and write entries to serve them."),
    "doctor": ("app.cli.doctor.command", "Check a deployment, and report what to change."),
}
# Commands whose libraries (requirements-embedded.txt) the Docker image lacks, and their names elsewhere.
_NOT_IN_IMAGE = {"up": "`make run`", "model": "`make model` or `make download`"}


def main(arguments: list[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    options = _parser(given).parse_args(given)
    run: Run = options.run
    try:
        logs.configure(LogSettings())
        return run(options)
    except ValidationError as error:
        for problem in error.errors():
            name = ".".join(str(part) for part in problem["loc"])
            # A message without a location is about several settings, and names them itself.
            place = f"setting {name}" if name else "settings"
            sys.stderr.write(f"{place}: {problem['msg']} (see docs/settings.md)\n")
    except DeclarationError as error:
        sys.stderr.write(f"setting LLM_INDEXES_FILE: {error}\n")
    except ProfileError as error:
        sys.stderr.write(f"setting LLM_PROFILES_FILE: {error}\n")
    return 2


class _Parser(argparse.ArgumentParser):
    """Names the program in the examples of its help as its user calls it."""

    def format_help(self) -> str:
        return super().format_help().replace("python -m app", PROGRAM)


def _parser(given: list[str]) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=PROGRAM,
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = add_subcommands(parser)
    chosen = next((one for one in given if not one.startswith("-")), None)
    for name, (module, text) in _COMMANDS.items():
        command = add_command(commands, name, text)
        if name == chosen:
            _import(name, module).configure(command)
    return parser


def _import(name: str, module: str) -> ModuleType:
    """The module of a command. Ends the program where the Docker image cannot run the command."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if name not in _NOT_IN_IMAGE or (error.name or "app").split(".")[0] == "app":
            raise
        sys.stderr.write(
            f"{PROGRAM} {name} needs the library {error.name}, which the Docker image lacks: use "
            f"{_NOT_IN_IMAGE[name]} in a checkout, or the package that `pip install .` makes.\n"
        )
        raise SystemExit(2) from None
