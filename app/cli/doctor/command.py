"""`python -m app doctor`: its arguments, its table, its exit status.

The checks change nothing, and report no secret.
"""

import argparse
import asyncio
import sys
from dataclasses import asdict

import asyncpg
import orjson
from pydantic import ValidationError

from app.cli.doctor.database import check_database, connected
from app.cli.doctor.findings import Finding, Level, fail
from app.cli.doctor.local import check_disks, check_settings, settings_errors
from app.cli.doctor.triton import check_triton
from app.cli.table import write_table
from app.core.settings import Settings
from app.inference.server_pool import static_addresses
from app.inference.server_store import ServerAddress

_HELP = """Checks settings, database, workers, Triton and disks from this machine, with the settings of the
service's processes, and reports what to change. The command itself changes nothing.
Exit status 1: a check failed. 0: no check failed; there may be warnings."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = _HELP
    parser.set_defaults(run=_run)
    parser.add_argument("--json", action="store_true", help="print a JSON list")


def _run(options: argparse.Namespace) -> int:
    try:
        settings = Settings()
    except ValidationError as error:
        findings = settings_errors(error)
    else:
        findings = asyncio.run(examine(settings))
    if options.json:
        sys.stdout.write(orjson.dumps([asdict(one) for one in findings]).decode() + "\n")
    else:
        rows = [[str(one.level), one.part, one.found, one.to_do] for one in findings]
        write_table([["", "part", "found", "what to change"], *rows])
    return 1 if any(one.level is Level.FAIL for one in findings) else 0


async def examine(settings: Settings) -> list[Finding]:
    findings = [*check_settings(settings), *check_disks(settings)]
    servers = static_addresses(settings)
    async with connected(settings) as (connection, problem):
        if connection is None:
            findings.append(problem or fail("database", "unknown", ""))
        else:
            findings += [one async for one in check_database(connection, settings)]
            if await connection.fetchval("SELECT to_regclass('servers') IS NOT NULL"):
                # All columns: the schema may be an older one.
                rows = await connection.fetch("SELECT * FROM servers ORDER BY name")
                known = {server.grpc for server in servers}
                servers += [_registered(row) for row in rows if row["grpc"] not in known]
    return findings + await check_triton(servers, settings)


def _registered(row: asyncpg.Record) -> ServerAddress:
    return ServerAddress(row["name"], row["grpc"], row["http"], secret=row.get("secret"))
