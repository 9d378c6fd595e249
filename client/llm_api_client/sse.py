"""Parser of server-sent events, from bytes that arrive in any portions."""

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ServerSentEvent:
    """An event; `name` is `message` if the stream gives none."""

    name: str
    id: str
    data: bytes


@dataclass
class EventParser:
    """Collects bytes until they are whole events; an event without its empty line does not count."""

    _rest: bytes = b""
    _name: str = ""
    _id: str = ""
    _data: list[bytes] = field(default_factory=list)

    def feed(self, block: bytes) -> Iterator[ServerSentEvent]:
        """The events that end in this block."""
        *lines, self._rest = (self._rest + block).split(b"\n")
        for line in lines:
            event = self._take(line.removesuffix(b"\r"))
            if event is not None:
                yield event

    def _take(self, line: bytes) -> ServerSentEvent | None:
        if not line:
            return self._end()
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data.append(value)
        elif name == b"event":
            self._name = value.decode()
        elif name == b"id":
            self._id = value.decode()
        return None

    def _end(self) -> ServerSentEvent | None:
        data, name = self._data, self._name
        self._data, self._name = [], ""
        return ServerSentEvent(name or "message", self._id, b"\n".join(data)) if data else None
