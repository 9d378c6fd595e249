"""Registration, addresses and draining of the servers of launches."""

import contextlib
from datetime import timedelta

from app.core.errors import ConflictError, NotFoundError
from app.core.settings import Settings
from app.inference.server_store import ServerAddress, ServerStore
from app.provisioning.directory import PublishedAddress
from app.provisioning.profiles import Profile
from app.provisioning.store import ClaimedLaunch, Launch
from app.provisioning.tunnels import Tunnels

_PROTOCOLS = {2: ("grpc", "metrics"), 3: ("grpc", "http", "metrics")}  # by the number of ports


class LaunchedServers:
    """The servers of launches in the table `servers`, and the tunnels to them."""

    def __init__(self, store: ServerStore, tunnels: Tunnels, settings: Settings) -> None:
        self._store = store
        self._tunnels = tunnels
        self._drain_limit = timedelta(seconds=settings.launch_drain_seconds)
        # Workers report the results that run on a server with their heartbeats, five a lease.
        self._settling = timedelta(seconds=settings.lease_seconds * 0.4)

    async def is_drained(self, launch: ClaimedLaunch) -> bool:
        """True when no result runs on the server any more, or the time-out is over."""
        assert launch.stopping_at is not None
        if launch.healthy_at is None:
            return True
        try:
            await self._store.drain(launch.name, is_draining=True)
        except NotFoundError:
            return True
        since = launch.now - launch.stopping_at
        if since >= self._drain_limit:
            return True
        return since >= self._settling and not await self.has_running(launch)

    async def has_running(self, launch: Launch) -> bool:
        return (await self._store.running()).get(launch.name, 0) > 0

    async def address(
        self, launch: Launch, profile: Profile, server: PublishedAddress
    ) -> dict[str, str]:
        host, ports = server.node, server.ports
        if profile.host is not None:
            wanted = _ports_of(launch.address) if launch.address else None
            ports = await self._tunnels.ensure(profile, launch.id, host, ports, wanted)
            host = profile.tunnel_listen
        protocols = _PROTOCOLS[len(ports)]
        return {name: f"{host}:{port}" for name, port in zip(protocols, ports, strict=True)}

    async def register(self, launch: Launch, profile: Profile, address: dict[str, str]) -> None:
        """Have results routed to it. Raises ConflictError if its name is another server's."""
        server = ServerAddress(
            launch.name,
            address["grpc"],
            address.get("http"),
            address["metrics"],
            profile.slots,
            secret=launch.secret,
        )
        try:
            await self._store.add(server)
        except ConflictError:
            if launch.healthy_at is None:
                raise
            # It is registered with its tunnel's former ports.
            await self.unregister(launch)
            await self._store.add(server)

    async def unregister(self, launch: Launch) -> None:
        """Remove its server, but not an operator's of the same name."""
        assert launch.address is not None
        for server in await self._store.all():
            is_own = launch.healthy_at is not None or server.grpc == launch.address["grpc"]
            if server.name == launch.name and is_own:
                with contextlib.suppress(NotFoundError):
                    await self._store.remove(launch.name)


def _ports_of(address: dict[str, str]) -> tuple[int, ...]:
    return tuple(int(address[name].rpartition(":")[2]) for name in _PROTOCOLS[len(address)])
