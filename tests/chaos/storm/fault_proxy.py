"""A TCP proxy that injects network faults: cut, refused, slow, half open."""

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator
from socket import SO_LINGER, SOL_SOCKET

_BLOCK = 65_536
# Closing sends a reset, and nothing that is still to be sent.
_RESET = struct.pack("ii", 1, 0)


class FaultProxy:
    """Forwards bytes between its port of 127.0.0.1 and one server, until a fault is injected.

    Connections that fell silent in a half-open network never speak again. With `resets_when_healed`
    they are reset at its end; otherwise only their peers' keep-alive can detect it.
    """

    def __init__(self, name: str, host: str, port: int, *, resets_when_healed: bool) -> None:
        self.name = name
        self.port = 0
        self._target = (host, port)
        self._resets_when_healed = resets_when_healed
        self._connections: set[asyncio.Task[None]] = set()
        self._refuses = False
        self._delay = 0.0
        self._is_half_open = False
        self._healed = asyncio.Event()

    @contextlib.asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """Listen until the context ends."""
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0, backlog=1000)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield
        finally:
            server.close()
            await self.cut()

    async def lead_to(self, host: str, port: int) -> None:
        """Forward to another server from now on; open connections are reset."""
        self._target = (host, port)
        await self.cut()

    async def cut(self) -> None:
        """Reset every connection there is."""
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def refuse(self, seconds: float) -> None:
        """Reset the open connections and each new one."""
        self._refuses = True
        await self.cut()
        await asyncio.sleep(seconds)  # the fault's duration
        self._refuses = False

    async def delay(self, seconds: float, by: float) -> None:
        """Pass each block on later by so many seconds."""
        self._delay = by
        await asyncio.sleep(seconds)  # the fault's duration
        self._delay = 0.0

    async def half_open(self, seconds: float) -> None:
        """Drop all bytes: connections stay open, new ones are accepted, and no peer is notified."""
        self._is_half_open = True
        await asyncio.sleep(seconds)  # the fault's duration
        self._is_half_open = False
        self._healed.set()
        self._healed = asyncio.Event()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        try:
            if self._refuses:
                return
            if self._is_half_open:
                await self._be_silent()
                return
            from_server, to_server = await asyncio.open_connection(*self._target)
            writers.append(to_server)
            await asyncio.gather(
                self._pass_on(reader, to_server), self._pass_on(from_server, writer)
            )
        except (OSError, asyncio.CancelledError):
            pass  # the one side's end is the other's, and a cut is a reset of both
        finally:
            for one in writers:
                _reset(one)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while block := await reader.read(_BLOCK):
            if self._delay:
                await asyncio.sleep(self._delay)
            if self._is_half_open:
                await self._be_silent()
                raise ConnectionResetError
            if writer.is_closing():
                raise ConnectionResetError
            writer.write(block)
            await writer.drain()
        if not writer.is_closing():
            writer.write_eof()

    async def _be_silent(self) -> None:
        if self._resets_when_healed:
            await self._healed.wait()
        else:
            await asyncio.Event().wait()


def _reset(writer: asyncio.StreamWriter) -> None:
    socket = writer.get_extra_info("socket")
    if socket is not None:  # else it is closed already
        with contextlib.suppress(OSError):
            socket.setsockopt(SOL_SOCKET, SO_LINGER, _RESET)
    writer.transport.abort()
