"""Readers of streams: iterate over the text as it is generated."""

import sys
from collections.abc import AsyncIterator, Iterator
from types import TracebackType

from llm_api_client.driver import AsyncDriver, Driver
from llm_api_client.operations.streams import StreamEvent, Transcript, stream_events
from llm_api_client.schemas import Result


class _Stream:
    def __init__(self, result_id: str) -> None:
        self._transcript = Transcript(result_id)
        self._shown_restarts = 0

    @property
    def text(self) -> str:
        """The text so far, or the whole of it after the end."""
        return self._transcript.text

    @property
    def result(self) -> Result | None:
        """The result, once the stream has ended."""
        return self._transcript.result

    @property
    def restarts(self) -> int:
        """Times that a worker was lost and the text began again with less than had arrived.

        If it is not 0, the joined deltas have text that `text` has not.
        """
        return self._transcript.restarts

    @property
    def last_event_id(self) -> str:
        """The position of the stream."""
        return self._transcript.position

    def _shown(self, event: StreamEvent) -> str:
        """The characters that show an event to a person."""
        if event.kind == "attempt" and self.restarts > self._shown_restarts:
            self._shown_restarts = self.restarts
            return f"\n--- attempt {event.attempt}, from character {event.offset} ---\n"
        return event.text if event.kind in ("attempt", "delta") else "\n"

    def _ended(self) -> Result:
        assert self.result is not None
        return self.result


class Stream(_Stream):
    """Iterates over the text of a result, portion by portion, across broken connections.

    A stream is read once; a second loop continues where the first one stopped.
    """

    def __init__(self, driver: Driver, result_id: str) -> None:
        super().__init__(result_id)
        self._events = driver.iterate(stream_events(self._transcript))

    def events(self) -> Iterator[StreamEvent]:
        """Iterate over the events: attempts, deltas and the end."""
        return self._events

    def __iter__(self) -> Iterator[str]:
        for event in self._events:
            if event.text:
                yield event.text

    def show(self) -> Result:
        """Print the text as it arrives, on a terminal or in a notebook, and return the result."""
        for event in self._events:
            sys.stdout.write(self._shown(event))
            sys.stdout.flush()
        return self._ended()

    def close(self) -> None:
        """Leave the stream; the result continues."""
        self._events.close()  # type: ignore[attr-defined]  # a generator

    def __enter__(self) -> "Stream":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class AsyncStream(_Stream):
    """As Stream, with `async for` and `async with`."""

    def __init__(self, driver: AsyncDriver, result_id: str) -> None:
        super().__init__(result_id)
        self._events = driver.iterate(stream_events(self._transcript))

    def events(self) -> AsyncIterator[StreamEvent]:
        """Iterate over the events: attempts, deltas and the end."""
        return self._events

    async def __aiter__(self) -> AsyncIterator[str]:
        async for event in self._events:
            if event.text:
                yield event.text

    async def show(self) -> Result:
        """Print the text as it arrives, on a terminal or in a notebook, and return the result."""
        async for event in self._events:
            sys.stdout.write(self._shown(event))
            sys.stdout.flush()
        return self._ended()

    async def close(self) -> None:
        """Leave the stream; the result continues."""
        await self._events.aclose()  # type: ignore[attr-defined]  # a generator

    async def __aenter__(self) -> "AsyncStream":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()
