"""`python -m app doctor`: its arguments, its table, its exit status."""

import argparse
import asyncio
import sys

_HELP = """Checks settings, database, workers, Triton and disks from this machine, with the settings of the
service's processes, and reports what to change. The command itself changes nothing.
Exit status 1: a check failed. 0: no check failed; there may be warnings."""


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "doctor",
        help="Check a deployment, and report what to change.",
        description=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    import orjson
    from pydantic import ValidationError

    from app.cli.checks import Level, examine, settings_errors
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
