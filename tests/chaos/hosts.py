"""The service on hosts: two with an API and a worker, two Tritons, PgBouncer, PostgreSQL and its standby.

Each host is a network namespace (bench/network.py).
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import pytest

from app.cli.up import processes
from app.cli.up.postgres import DATABASE
from app.cli.up.service import migrate
from bench.network import Host, NoNetworkError, network
from tests.chaos.history import LOG_EVERYTHING
from tests.chaos.http_client import HttpClient
from tests.chaos.replication import Pair, address
from tests.chaos.stack import LEASE_SECONDS, Stack
from tests.conftest import SCRIPTED, TRITON_VENV, make_settings
from tests.network_hosts import (
    HostPgBouncer,
    MortalHostPostgres,
    MortalHostProcess,
    MortalHostStandby,
    MortalHostTriton,
    cut_off,
    partition,
)
from tests.pgbouncer import set_role

SERVING = ("a", "b")
_NAMES = (*SERVING, "pool", "db", "standby", "gpu", "gpu2")
_TIMEOUT_SECONDS = 5.0  # of a request: the database is unreachable for longer
_SILENCE_SECONDS = 4.0  # of an engine


@dataclass
class Site:
    """The network, and the service on it."""

    hosts: dict[str, Host]
    pair: Pair
    bouncer: HostPgBouncer
    triton: MortalHostTriton  # one of two with the same model
    stack: Stack
    clients: list[HttpClient]  # of the two APIs

    def faults(self) -> Iterator[tuple[str, AbstractContextManager[None]]]:
        """Partitions of each pair between which something flows, then cables; a and b are alike."""
        for one, other in (
            ("a", "pool"),  # statements
            ("a", "db"),  # its listener and heartbeat
            ("pool", "db"),
            ("db", "standby"),  # each commit
            ("b", "gpu"),
            ("a", "b"),
        ):
            yield f"{one} | {other}", partition(self.hosts[one], self.hosts[other])
        for name in ("gpu2", "pool"):
            yield f"{name} alone", cut_off(self.hosts[name])

    async def fail_over(self) -> None:
        """Promote the standby, as an operator would whose primary is unreachable, and fence that."""
        self.pair.primary.send_signal(signal.SIGKILL)
        await self.pair.standby.promote()
        self.stack.postgres = address(self.pair.standby)
        await self.bouncer.direct(self.stack.postgres)


@contextlib.asynccontextmanager
async def open_site(directory: Path) -> AsyncIterator[Site]:
    """Start everything; skips the test where no network can be made."""
    async with contextlib.AsyncExitStack() as exits:
        try:
            hosts = exits.enter_context(network(_NAMES))
        except NoNetworkError as error:
            pytest.skip(str(error))
        pair = await _open_pair(exits, directory, hosts)
        bouncer = await _open_pool(exits, directory, hosts["pool"], pair)
        tritons = await _open_tritons(exits, directory, hosts)
        environment = os.environ | {
            **pair.primary.environment,
            **tritons[0].environment,
            "TRITON_GRPC_SERVICE": ",".join(one.address("grpc") for one in tritons),
            "LLM_DATABASE_URL": bouncer.address,
            "LLM_DATABASE_LISTENER_URL": pair.addresses,
            "LLM_DATABASE_TIMEOUT_SECONDS": str(_TIMEOUT_SECONDS),
            "LLM_ENGINE_SILENCE_SECONDS": str(_SILENCE_SECONDS),
            "LLM_LEASE_SECONDS": str(LEASE_SECONDS),
            "LLM_FLUSH_SECONDS": "0.3",
            "LLM_ALLOW_UNAUTHENTICATED": "true",
        }
        clients, stack = await _open_service(exits, directory, hosts, environment, pair)
        yield Site(hosts, pair, bouncer, tritons[0], stack, clients)


async def _open_pair(
    exits: contextlib.AsyncExitStack, directory: Path, hosts: dict[str, Host]
) -> Pair:
    primary = MortalHostPostgres(directory / "primary", directory / "primary.log")
    standby = MortalHostStandby(directory / "standby", directory / "standby.log", primary)
    primary.host, standby.host = hosts["db"], hosts["standby"]
    for part in (primary, standby):
        exits.push_async_callback(part.stop)
        await part.start()
    await migrate({**os.environ, **primary.environment}, directory / "migrate.log")
    pair = Pair(primary, standby)
    await pair.make_synchronous()
    return pair


async def _open_pool(
    exits: contextlib.AsyncExitStack, directory: Path, host: Host, pair: Pair
) -> HostPgBouncer:
    server = address(pair.primary)
    settings = make_settings(server, DATABASE, database_timeout_seconds=_TIMEOUT_SECONDS)
    await set_role(server, settings)
    bouncer = HostPgBouncer(directory, server, host.address)
    bouncer.host = host
    exits.push_async_callback(bouncer.stop)
    await bouncer.start()
    return bouncer


async def _open_tritons(
    exits: contextlib.AsyncExitStack, directory: Path, hosts: dict[str, Host]
) -> list[MortalHostTriton]:
    tritons: list[MortalHostTriton] = []
    for name in ("gpu", "gpu2"):
        log_file = directory / f"{name}.log"
        triton = MortalHostTriton(TRITON_VENV, directory / name, SCRIPTED, log_file)
        triton.host = hosts[name]
        if tritons:
            triton.secret = tritons[0].secret
        exits.push_async_callback(triton.stop)
        tritons.append(triton)
    await asyncio.gather(*(triton.start() for triton in tritons))
    return tritons


async def _open_service(
    exits: contextlib.AsyncExitStack,
    directory: Path,
    hosts: dict[str, Host],
    environment: dict[str, str],
    pair: Pair,
) -> tuple[list[HttpClient], Stack]:
    """An API and a worker on each of two hosts."""
    parts: dict[str, MortalHostProcess] = {}
    clients = []
    for name in SERVING:
        host, port = hosts[name], processes.free_port()
        ours = environment | {
            "LLM_HOST": host.address,
            "LLM_PORT": str(port),
            "LLM_ALLOWED_HOSTS": f"localhost,{host.address}",
        }
        url = f"http://{host.address}:{port}/health/ready"
        for command, ready in (("serve", url), ("worker", "")):
            log_file = directory / f"{command}_{name}.log"
            part = MortalHostProcess(
                f"{command} {name}", command, ours, log_file, grace=10, ready_url=ready
            )
            part.host = host
            parts[f"{command} {name}"] = part
        clients.append(await exits.enter_async_context(HttpClient(host.address, port, 100)))
    api = parts[f"serve {SERVING[0]}"]
    stack = Stack(directory, address(pair.primary), DATABASE, environment, clients[0], api)
    stack.more_apis = {name: part for name, part in parts.items() if part is not api}
    for statement in LOG_EVERYTHING:
        await stack.fetch(statement)
    for part in parts.values():
        exits.push_async_callback(part.stop)
        await part.start()
    return clients, stack
