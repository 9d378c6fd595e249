"""A TCP proxy to PostgreSQL whose connections can go silent without closing, as half-open ones."""

import asyncio


class SilentProxy:
    """Passes everything on until `freeze` is called; an asynchronous context manager."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._open: set[_Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.connections = 0
        self.port = 0

    async def __aenter__(self) -> "SilentProxy":
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def freeze_the_open(self, *, listening_only: bool = False) -> int:
        """Nothing passes any more through the connections open now; how many. New ones work."""
        frozen = [one for one in self._open if one.is_listening or not listening_only]
        for connection in frozen:
            connection.flowing.clear()
        return len(frozen)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        connection = _Connection()
        self._open.add(connection)
        up_reader, up_writer = await asyncio.open_connection(*self._target)
        for source, sink in ((reader, up_writer), (up_reader, writer)):
            task = asyncio.create_task(connection.copy(source, sink))
            self._tasks.add(task)
            task.add_done_callback(lambda _: self._open.discard(connection))


class _Connection:
    def __init__(self) -> None:
        self.flowing = asyncio.Event()
        self.flowing.set()
        self.is_listening = False

    async def copy(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65_536):
                self.is_listening |= b"LISTEN " in data
                await self.flowing.wait()
                sink.write(data)
                await sink.drain()
        except ConnectionError:
            pass
        finally:
            sink.close()
