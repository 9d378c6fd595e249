"""Connections are accepted at once, and begin by turns of the addresses that they come from.

To begin a connection takes 0.1 ms of the event loop. An address that opens a thousand at once would delay
the next client by all of them: its team is not known before its request is read.
"""

import asyncio
import errno
import logging
import socket
from collections import deque
from collections.abc import Callable

_BEGUN = 8  # connections in a round of the event loop: 0.1 ms each
_ACCEPTED = 64  # likewise: 0.01 ms each
_MOST_WAITING = 4096  # further ones stay with the kernel, in their order
_PAUSE_SECONDS = 1.0  # of a process without file descriptors or memory
_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_MAPPED = bytes(10) + b"\xff\xff"  # IPv4 as IPv6 (RFC 4291, section 2.5.5.2)

_log = logging.getLogger(__name__)


class Acceptor:
    """One listening socket; it has the methods of `asyncio.Server` that uvicorn calls."""

    def __init__(self, listening: socket.socket, protocol: Callable[[], asyncio.Protocol]) -> None:
        self.sockets = [listening]
        self._listening = listening
        self._protocol = protocol
        self._loop = asyncio.get_running_loop()
        # By address; the one that is next comes first.
        self._waiting: dict[bytes, deque[socket.socket]] = {}
        self._count = 0  # of those that wait
        self._is_accepting = self._has_turns = self._is_closed = False
        self._pausing: asyncio.TimerHandle | None = None
        self._beginning: set[asyncio.Task[object]] = set()
        listening.setblocking(False)
        self._resume()

    def close(self) -> None:
        """Accept no more; connections that wait are closed."""
        self._pause()
        self._is_closed = True
        self._listening.close()
        for connections in self._waiting.values():
            for connection in connections:
                connection.close()
        self._waiting.clear()
        self._count = 0

    async def wait_closed(self) -> None:
        """`close` has no rest."""

    def _resume(self) -> None:
        if self._pausing is None and not self._is_accepting and not self._is_closed:
            self._is_accepting = True
            self._loop.add_reader(self._listening, self._accept)

    def _pause(self) -> None:
        if self._is_accepting:
            self._is_accepting = False
            self._loop.remove_reader(self._listening)

    def _end_pause(self) -> None:
        self._pausing = None
        self._resume()

    def _accept(self) -> None:
        for _ in range(min(_ACCEPTED, _MOST_WAITING - self._count)):
            try:
                connection, address = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                break
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    raise
                _log.error("cannot accept connections: %s", error)
                self._pause()
                self._pausing = self._loop.call_later(_PAUSE_SECONDS, self._end_pause)
                break
            self._waiting.setdefault(_network(address[0]), deque()).append(connection)
            self._count += 1
        if self._count >= _MOST_WAITING:
            self._pause()
        if self._waiting and not self._has_turns:
            self._has_turns = True
            self._loop.call_soon(self._begin)

    def _begin(self) -> None:
        """Begin some of those that wait, one of each address in turn."""
        for _ in range(min(_BEGUN, self._count)):
            network = next(iter(self._waiting))
            connections = self._waiting.pop(network)
            connection = connections.popleft()
            self._count -= 1
            if connections:
                self._waiting[network] = connections
            work = self._loop.connect_accepted_socket(self._protocol, connection)
            task: asyncio.Task[object] = self._loop.create_task(work)
            self._beginning.add(task)
            task.add_done_callback(self._has_begun)
        self._has_turns = bool(self._waiting)
        if self._has_turns:
            self._loop.call_soon(self._begin)
        if self._count < _MOST_WAITING // 2:
            self._resume()

    def _has_begun(self, task: asyncio.Task[object]) -> None:
        self._beginning.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.warning("a connection ended as it began: %s", error)


def _network(host: str) -> bytes:
    """The address, or the 64 bits of an IPv6 address that one client has in its hands."""
    if ":" not in host:
        return host.encode()
    packed = socket.inet_pton(socket.AF_INET6, host.partition("%")[0])
    return packed if packed.startswith(_MAPPED) else packed[:8]
