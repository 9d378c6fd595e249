"""The results of one synchronous request: awaited together, or read as one stream.

Their clients cannot resume a stream, and text that was sent is never taken back: an attempt that is
lost after its first text ends the stream with an error.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from uuid import UUID

from app.core.errors import AttemptLostError, DatabaseUnavailableError, NotFoundError, StoppingError
from app.core.settings import Settings
from app.core.waiting import cancel_all
from app.queue.job_queue import JobQueue
from app.results.rows import ResultRow, erased, failure_of
from app.results.store import ResultStore
from app.results.streams.hub import StreamHub
from app.results.streams.result_reader import (
    AttemptStarted,
    Ended,
    Event,
    KeepAlive,
    Position,
    ResultReader,
    TextDelta,
)
from app.results.streams.subscribers import ResultSignal

GroupEvent = tuple[int, TextDelta | Ended | KeepAlive]

_MAX_AHEAD = 8  # events that are read, but not yet taken by a slow client


@dataclass(slots=True, frozen=True)
class ResultGroups:
    """Waits for the results of one request, reads and cancels them."""

    settings: Settings
    queue: JobQueue
    results: ResultStore
    hub: StreamHub

    async def wait(
        self,
        team_id: str,
        ids: Sequence[UUID],
        signals: Sequence[ResultSignal],
        *,
        is_new: bool,
        is_disconnected: Callable[[], bool],
    ) -> list[ResultRow]:
        """The results once all have completed; those pending when the client has disconnected.

        `signals` are the hub's, of `ids`. Raises ResultFailedError, ErasedError, StoppingError.
        """
        rows = []
        for result_id, signal in zip(ids, signals, strict=True):
            row = await self.hub.wait_terminal(
                team_id,
                result_id,
                self.settings.max_deadline_seconds,
                signal,
                is_new=is_new,
                is_disconnected=is_disconnected,
            )
            if row.erased_at is not None:  # delivered to another sending of the same request
                raise erased(row)
            if row.state == "failed":
                raise failure_of(row)
            if row.state == "pending" and not is_disconnected():
                raise _stopping(result_id)
            rows.append(row)
        return rows

    async def read(
        self, team_id: str, ids: Sequence[UUID], *, with_tokens: bool = False
    ) -> AsyncGenerator[GroupEvent, None]:
        """Yield events. Raises ResultFailedError, AttemptLostError, StoppingError."""
        streams = [self._read_one(team_id, one, with_tokens=with_tokens) for one in ids]
        if len(streams) == 1:
            async with contextlib.aclosing(streams[0]) as events:
                async for event in events:
                    yield 0, event
            return
        async with contextlib.aclosing(_merge(streams)) as merged:
            async for item in merged:
                yield item

    async def cancel(self, team_id: str, ids: Sequence[UUID]) -> None:
        with contextlib.suppress(DatabaseUnavailableError):
            await self.queue.cancel_ids(team_id, ids)

    async def _read_one(
        self, team_id: str, result_id: UUID, *, with_tokens: bool
    ) -> AsyncGenerator[TextDelta | Ended | KeepAlive, None]:
        reader = ResultReader(
            self.hub,
            self.results,
            team_id,
            result_id,
            Position(),
            self.settings.keep_alive_seconds,
            with_tokens=with_tokens,
        )
        has_text = False
        async with contextlib.aclosing(reader.events()) as events:
            async for event in events:
                if isinstance(event, AttemptStarted):
                    if has_text:
                        raise AttemptLostError(
                            f"The model was lost in mid-answer. The text so far cannot be "
                            f"continued: send the request again. Its result is {result_id}."
                        )
                    continue
                has_text = has_text or isinstance(event, TextDelta)
                if isinstance(event, Ended) and event.row.erased_at is not None and not has_text:
                    raise erased(event.row)
                if isinstance(event, Ended) and event.row.state == "failed":
                    raise failure_of(event.row)
                yield event
                if isinstance(event, Ended):
                    return
        if self.hub.is_closing:
            raise _stopping(result_id)
        raise NotFoundError(f"Result {result_id} was deleted.")


async def _merge(
    streams: Sequence[AsyncGenerator[TextDelta | Ended | KeepAlive, None]],
) -> AsyncGenerator[GroupEvent, None]:
    """Events of several streams as they come; the first error of one ends them all."""
    ahead: asyncio.Queue[tuple[int, Event | Exception | None]] = asyncio.Queue(_MAX_AHEAD)

    async def read(place: int, stream: AsyncGenerator[Event, None]) -> None:
        try:
            async with contextlib.aclosing(stream) as events:
                async for event in events:
                    await ahead.put((place, event))
        except Exception as error:  # noqa: BLE001 # raised where the events are taken
            await ahead.put((place, error))
        else:
            await ahead.put((place, None))

    tasks = [asyncio.create_task(read(*item)) for item in enumerate(streams)]
    open_streams = len(tasks)
    try:
        while open_streams:
            place, event = await ahead.get()
            if isinstance(event, Exception):
                raise event
            if event is None:
                open_streams -= 1
            elif not isinstance(event, AttemptStarted):
                yield place, event
    finally:
        await cancel_all(tasks)


def _stopping(result_id: UUID) -> StoppingError:
    return StoppingError(
        f"This process of the service is stopping. Send the request again; its result is {result_id}.",
        headers={"Retry-After": "2"},
    )
