"""HOSTS: whole lives a second of 1, 2 and 4 hosts with API and worker, beside the simulation's.

Each host, PostgreSQL and Triton are network namespaces of one machine, which share its cores. The
simulation, calibrated in the same run, has the same layout; then each host with a core of its own.

Two hosts are measured again behind PgBouncer, then with a standby that each commit waits for, then with a
second Triton, each on a further host.
"""

import asyncio
import contextlib
import os
import statistics
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import orjson

from app.cli.up import processes
from app.cli.up.postgres import DATABASE, USER
from app.cli.up.service import migrate
from app.core.settings import Settings
from bench import pgbouncer, progress
from bench.calibration import ONE_CHUNK, Loops, calibrate
from bench.cpu import Sample, busy_seconds, measure
from bench.load import Callers, Load, connect, post
from bench.network import (
    Host,
    HostPart,
    HostPgBouncer,
    HostPostgres,
    HostStandby,
    HostTriton,
    NoNetworkError,
    network,
)
from bench.report import Options, Report
from bench.servers import MODEL, House
from bench.service_model import Costs, Layout, simulate
from bench.standby import execute, make_synchronous
from bench.statements import measure_notifications, measure_statements

_HOSTS = (1, 2, 4)
_CALLERS = 64  # of all hosts together
_WARM_UP_SECONDS = 1.0
_SIMULATED_SECONDS = 2.0
_LEAST, _MOST = 0.75, 1.33
_MORE_HOSTS = 2  # before which parts are added
_POOLED = 16  # connections of PgBouncer to PostgreSQL
_ROOT = Path(__file__).resolve().parents[1]
_COLUMNS = ["lives/s", "simulated", "hosts apart", "p50 ms", "service us", "Postgres us", "others"]


@dataclass(slots=True, frozen=True)
class _Server:
    """API and worker on a host."""

    host: Host
    port: int
    pid: int


@dataclass(slots=True, frozen=True)
class _Site:
    """PostgreSQL and Triton on hosts of their own, and hosts that wait for a service.

    Parts that are added serve each later `service`.
    """

    hosts: Mapping[str, Host]
    postgres: HostPostgres
    triton: HostTriton
    environment: dict[str, str]
    parts: dict[str, int]
    logs: Path
    exits: contextlib.AsyncExitStack

    @contextlib.asynccontextmanager
    async def service(self, count: int) -> AsyncIterator[list[_Server]]:
        """An API with a worker on each of so many hosts."""
        async with contextlib.AsyncExitStack() as stack:
            servers = []
            for host in (self.hosts[f"h{number}"] for number in range(count)):
                port = processes.free_port()
                settings = self.environment | {
                    "LLM_HOST": host.address,
                    "LLM_PORT": str(port),
                    "LLM_ALLOWED_HOSTS": f"127.0.0.1,{host.address}",
                }
                url = f"http://{host.address}:{port}/health/ready"
                log_file = self.logs / f"{host.namespace}.log"
                part = HostPart(
                    "API", "serve --with-worker", settings, log_file, grace=10, ready_url=url
                )
                part.host = host
                stack.push_async_callback(part.stop)
                await part.start()
                servers.append(_Server(host, port, part.pid))
            yield servers

    async def add_pgbouncer(self) -> None:
        """Put PgBouncer before PostgreSQL; the listeners stay with PostgreSQL."""
        program = pgbouncer.binary()
        if program is None:
            raise NoNetworkError("needs pgbouncer")
        settings = Settings.model_validate(self.environment)
        for statement in pgbouncer.role_settings(settings):
            await execute(self.postgres, statement)
        host, (address, port) = self.hosts["pool"], settings.database_addresses()[0]
        server = pgbouncer.Address(address, port, USER, self.postgres.password)
        bouncer = HostPgBouncer(program, self.logs, server, host.address, _POOLED)
        bouncer.host = host
        await self._start(bouncer)
        self.parts["pgbouncer"] = bouncer.pid
        self.environment["LLM_DATABASE_LISTENER_URL"] = self.environment["LLM_DATABASE_URL"]
        self.environment["LLM_DATABASE_URL"] = bouncer.address

    async def add_standby(self) -> None:
        """Have each commit wait for a standby's disk."""
        directory = self.logs / "standby"
        standby = HostStandby(directory, self.logs / "standby.log", self.postgres)
        standby.host = self.hosts["standby"]
        await self._start(standby)
        await make_synchronous(self.postgres)
        self.parts["standby"] = standby.pid

    async def add_triton(self) -> None:
        """Add a Triton with the same model."""
        triton = _make_triton(self.logs, self.hosts["gpu2"])
        triton.secret = self.triton.secret
        await self._start(triton)
        self.parts["triton 2"] = triton.pid
        addresses = [one.address("grpc") for one in (self.triton, triton)]
        self.environment["TRITON_GRPC_SERVICE"] = ",".join(addresses)

    async def _start(self, part: HostPgBouncer | HostStandby | HostTriton) -> None:
        self.exits.push_async_callback(part.stop)
        await part.start()


async def run(house: House, options: Options) -> Report:
    """Calibrate the simulation, then measure beside it."""
    report = Report("HOSTS", "hosts of one machine, measured and simulated", _COLUMNS)
    costs = await _calibrate(house, options)
    async with _open_site(house.directory / "hosts") as site:
        for count in _HOSTS:
            progress.show(f"{count} hosts")
            async with site.service(count) as servers:
                found = [await _measure(site, servers, options) for _ in range(options.rounds)]
            _add(report, count, found, costs)
        await _measure_more(site, report, options)
    return report


async def _measure_more(site: _Site, report: Report, options: Options) -> None:
    """Two hosts again, with one part more each time."""
    name = f"{_MORE_HOSTS} hosts"
    added = {
        "PgBouncer": site.add_pgbouncer,
        "a standby": site.add_standby,
        "a second Triton": site.add_triton,
    }
    for part, add in added.items():
        name += f", {part}"
        progress.show(name)
        await add()
        async with site.service(_MORE_HOSTS) as servers:
            found = [await _measure(site, servers, options) for _ in range(options.rounds)]
        _add_row(report, name, found, None, None)


async def _calibrate(house: House, options: Options) -> Costs:
    """The costs of the model."""
    statements, _ = await measure_statements(house, min(options.rounds, 3))
    notified = await measure_notifications(house)
    apart = await house.environment("bench_hosts")
    async with house.api(apart) as api, house.worker(apart) as worker:
        loops = Loops(house, api, [worker], options)
        await loops.rest()
        costs, _ = await calibrate(loops, statements, notified)
    return costs


@contextlib.asynccontextmanager
async def _open_site(directory: Path) -> AsyncIterator[_Site]:
    names = ["db", "gpu", "pool", "standby", "gpu2"]
    async with contextlib.AsyncExitStack() as stack:
        hosts = stack.enter_context(network([*names, *(f"h{one}" for one in range(max(_HOSTS)))]))
        postgres = HostPostgres(directory / "postgres", directory / "postgres.log")
        postgres.host = hosts["db"]
        triton = _make_triton(directory, hosts["gpu"])
        for part in (postgres, triton):
            stack.push_async_callback(part.stop)
            await part.start()
        environment = {
            **os.environ,
            **postgres.environment,
            **triton.environment,
            "LLM_DATABASE_URL": f"{postgres.host.address}:{postgres.port}",
            "LLM_DATABASE_DB": DATABASE,
            "LLM_ALLOW_UNAUTHENTICATED": "true",
        }
        await migrate(environment, directory / "migrate.log")
        pids = {"postgres": postgres.pid, "triton": triton.pid}
        yield _Site(hosts, postgres, triton, environment, pids, directory, stack)


def _make_triton(directory: Path, host: Host) -> HostTriton:
    triton = HostTriton(
        _ROOT / ".venv-triton",
        directory / host.namespace,
        {MODEL: _ROOT / "triton" / "models" / MODEL},
        directory / f"{host.namespace}.log",
    )
    triton.host = host
    return triton


_Measured = tuple[Sample, float]  # and the cores that other programs used meanwhile


async def _measure(site: _Site, servers: Sequence[_Server], options: Options) -> _Measured:
    """All callers at once, divided over the hosts."""
    body = {"model": MODEL, "content": ONE_CHUNK, "parameters": {"max_tokens": 64}}
    request = post("/results/", orjson.dumps(body), "Prefer: wait=30\r\n")
    parts = {f"service {number}": server.pid for number, server in enumerate(servers)}
    async with contextlib.AsyncExitStack() as stack:
        callers = [
            await stack.enter_async_context(
                connect(server.port, _CALLERS // len(servers), server.host.address)
            )
            for server in servers
        ]
        await _together(callers, request, _WARM_UP_SECONDS)
        began, busy, own = time.perf_counter(), busy_seconds(), time.process_time()
        sample = await measure(parts | site.parts, _together(callers, request, options.seconds))
        used = sum(sample.cpu.values()) + time.process_time() - own
        others = (busy_seconds() - busy - used) / (time.perf_counter() - began)
        return sample, max(0.0, others)


async def _together(callers: Sequence[Callers], request: bytes, seconds: float) -> Load:
    loads = await asyncio.gather(*(one.run(lambda: request, seconds, (200,)) for one in callers))
    latencies = [latency for load in loads for latency in load.latencies]
    return Load(len(latencies), sum(load.rate for load in loads), latencies)


def _add(report: Report, count: int, measured: Sequence[_Measured], costs: Costs) -> None:
    others = statistics.median(share for _, share in measured)
    here = Layout(callers=_CALLERS, apis=count, others=others)
    apart = replace(here, api_cores=1, is_one_host=False, others=0.0, callers=_CALLERS * count)
    simulated, alone = (
        simulate(costs, layout, _SIMULATED_SECONDS).rate for layout in (here, apart)
    )
    name = f"{count} host{'s' * (count > 1)}"
    rate = _add_row(report, name, measured, simulated, alone)
    report.check(f"{name}: simulated : measured, the least", simulated / rate, ">=", _LEAST)
    report.check(f"{name}: simulated : measured, the largest", simulated / rate, "<=", _MOST)


def _add_row(
    report: Report,
    name: str,
    measured: Sequence[_Measured],
    simulated: float | None,
    alone: float | None,
) -> float:
    """The rate."""
    samples, shares = zip(*measured, strict=True)
    rate = statistics.median(sample.load.rate for sample in samples)
    services = [part for part in samples[0].cpu if part.startswith("service")]
    figures = [
        rate,
        simulated,
        alone,
        statistics.median(sample.load.median_milliseconds() for sample in samples),
        statistics.median(sample.microseconds(*services) for sample in samples),
        statistics.median(sample.microseconds("postgres") for sample in samples),
        statistics.median(shares),
    ]
    report.rows.append((name, figures))
    report.raw[name] = [{"rate": one.load.rate, "cpu": one.cpu} for one in samples]
    return float(rate)
