"""`python -m app doctor`: its arguments, its table, its exit status."""

import argparse
import asyncio
import sys

from app.cli.arguments import Subcommands, add_command

_HELP = """Checks settings, database, workers, Triton and disks from this machine, with the settings of the
service's processes, and reports what to change. The command itself changes nothing.
Exit status 1: a check failed. 0: no check failed; there may be warnings."""


def add_to(commands: Subcommands) -> None:
    text = "Check a deployment, and report what to change."
    parser = add_command(commands, "doctor", text, _run, description=_HELP)
    parser.add_argument("--json", action="store_true", help="print a JSON list")


def _run(options: argparse.Namespace) -> int:
    import orjson
    from pydantic import ValidationError

    from app.cli.doctor.checks import examine
    from app.cli.doctor.findings import Level
    from app.cli.doctor.local import settings_errors
    from app.cli.table import write_table
    from app.core.settings import Settings

    try:
        settings = Settings()
    except ValidationError as error:
        findings = settings_errors(error)
    else:
        findings = asyncio.run(examine(settings))
    if options.json:
        sys.stdout.write(orjson.dumps([one.to_wire() for one in findings]).decode() + "\n")
    else:
        rows = [[str(one.level), one.part, one.found, one.to_do] for one in findings]
        write_table([["", "part", "found", "what to change"], *rows])
    return 1 if any(one.level is Level.FAIL for one in findings) else 0
