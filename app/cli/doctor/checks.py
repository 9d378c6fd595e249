"""All checks of a deployment, from a machine where its processes run.

The checks change nothing, and report no secret.
"""

from app.cli.doctor.database import check_database, connected
from app.cli.doctor.findings import Finding, fail
from app.cli.doctor.local import check_disks, check_settings
from app.cli.doctor.triton import check_triton
from app.core.settings import Settings
from app.core.settings.fields import split_list


async def examine(settings: Settings) -> list[Finding]:
    findings = [*check_settings(settings), *check_disks(settings)]
    servers = split_list(settings.triton_grpc)
    async with connected(settings) as (connection, problem):
        if connection is None:
            findings.append(problem or fail("database", "unknown", ""))
        else:
            findings += [one async for one in check_database(connection, settings)]
            if await connection.fetchval("SELECT to_regclass('servers') IS NOT NULL"):
                rows = await connection.fetch("SELECT grpc FROM servers ORDER BY name")
                servers += [row["grpc"] for row in rows if row["grpc"] not in servers]
    findings += await check_triton(servers, settings)
    return findings
