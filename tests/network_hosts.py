"""Partitions of a network of hosts, and parts on them that tests may kill."""

import contextlib
from collections.abc import Iterator

from bench import network
from bench.network import Host, HostPart, HostPostgres, HostTriton
from tests.chaos.replication import Standby
from tests.chaos.stack import MortalPostgres, MortalTriton, Process
from tests.pgbouncer import PgBouncer


@contextlib.contextmanager
def partition(one: Host, other: Host) -> Iterator[None]:
    """Drop all packets between two hosts, in both directions."""
    one.drop(other)
    other.drop(one)
    try:
        yield
    finally:
        one.reach(other)
        other.reach(one)


@contextlib.contextmanager
def cut_off(host: Host) -> Iterator[None]:
    """Pull a host's cable."""
    host.pull_cable()
    try:
        yield
    finally:
        host.plug_cable()


class MortalHostProcess(HostPart, Process):
    """API or worker on a host."""


class MortalHostPostgres(HostPostgres, MortalPostgres):
    """PostgreSQL on a host."""


class MortalHostStandby(network.HostStandby, Standby):
    """A standby on a host."""


class HostPgBouncer(network.HostPgBouncer, PgBouncer):
    """PgBouncer on a host."""


class MortalHostTriton(HostTriton, MortalTriton):
    """Triton on a host."""
