"""Servers that outlive a test session: PostgreSQL with a migrated template, and Triton.

    python -m tests.servers        prints a line of JSON, and runs until its standard input ends

A session uses them if `LLM_TEST_SERVERS` holds a JSON list of such lines, one for each of its
processes; it then starts none of its own.
"""

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from app.cli.up.triton import EmbeddedTriton
from tests.postgres import PostgresServer

VARIABLE = "LLM_TEST_SERVERS"
TEMPLATE = "test_template"


@dataclass(frozen=True)
class Servers:
    postgres: PostgresServer
    triton: dict[str, str]  # addresses by protocol, and the secret


class RunningTriton(EmbeddedTriton):
    """A server that this process did not start, and does not stop."""

    def __init__(self, addresses: dict[str, str]) -> None:
        nowhere = Path(os.devnull)
        super().__init__(nowhere, nowhere, {}, nowhere)
        self._addresses = addresses
        self.secret = addresses["secret"]

    def address(self, protocol: str) -> str:
        return self._addresses[protocol]

    @property
    def is_down(self) -> bool:
        return False

    async def start(self, report: Callable[[str], None] = lambda _: None) -> None:
        """Do nothing: it runs."""


def running_servers() -> Servers | None:
    """Return the servers of this process of the session, if they were given."""
    if not (given := os.environ.get(VARIABLE)):
        return None
    process = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    values = json.loads(given)[process]
    return Servers(PostgresServer(**values["postgres"]), values["triton"])


def main() -> None:
    from tests.conftest import make_settings, migrate, run_triton
    from tests.postgres import start_postgres

    with tempfile.TemporaryDirectory() as name, start_postgres(Path(name)) as postgres:
        asyncio.run(postgres.execute(f"CREATE DATABASE {TEMPLATE}"))
        migrate(make_settings(postgres, TEMPLATE))
        with run_triton(EmbeddedTriton, Path(name) / "triton") as triton:
            addresses = {protocol: triton.address(protocol) for protocol in ("grpc", "metrics")} | {
                "secret": triton.secret
            }
            print(json.dumps(asdict(Servers(postgres, addresses))), flush=True)  # noqa: T201
            sys.stdin.read()


if __name__ == "__main__":
    main()
