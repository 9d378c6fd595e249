"""The results of one synchronous request: awaited together, or followed as one stream.

Their clients have no way to take a stream up again. What they were sent is never taken back: an
attempt that is lost after its first text ends the stream with an error.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from uuid import UUID

from app.api.container import Services
from app.core.errors import (
    AttemptLostError,
    DatabaseUnavailableError,
    FailureCode,
    NotFoundError,
    ResultFailedError,
    StoppingError,
)
from app.results.preparation import erased
from app.results.rows import ResultRow
from app.results.streams.hub import ResultSignal
from app.results.streams.result_reader import (
    AttemptStarted,
    Ended,
    Event,
    KeepAlive,
    Position,
    ResultReader,
    TextDelta,
)

GroupEvent = tuple[int, TextDelta | Ended | KeepAlive]

_MAX_AHEAD = 8  # events that are read, but not yet taken by a slow client


async def wait_for_all(
    services: Services,
    team_id: str,
    ids: Sequence[UUID],
    woken: Sequence[ResultSignal],
    *,
    is_new: bool,
    has_left: Callable[[], bool],
) -> list[ResultRow]:
    """The results once all have completed; those pending when the client has left.

    `woken` are the hub's events of `ids`. Raises ResultFailedError as soon as one is found to have
    failed, StoppingError.
    """
    rows = []
    for result_id, event in zip(ids, woken, strict=True):
        row = await services.hub.wait_terminal(
            team_id,
            result_id,
            services.settings.max_deadline_seconds,
            event,
            is_new=is_new,
            has_left=has_left,
        )
        if row.erased_at is not None:  # told to another, who sent the same
            raise erased(row)
        if row.state == "failed":
            raise failure_of(row)
        if row.state == "pending" and not has_left():
            raise _stopping(result_id)
        rows.append(row)
    return rows


async def follow_all(
    services: Services, team_id: str, ids: Sequence[UUID], *, with_tokens: bool = False
) -> AsyncGenerator[GroupEvent, None]:
    """What happens to each of the results, by its place, until all have completed.

    Raises ResultFailedError, AttemptLostError, StoppingError: the stream is over then.
    """
    streams = [_follow(services, team_id, result_id, with_tokens=with_tokens) for result_id in ids]
    if len(streams) == 1:
        async with contextlib.aclosing(streams[0]) as events:
            async for event in events:
                yield 0, event
        return
    async with contextlib.aclosing(_merge(streams)) as merged:
        async for item in merged:
            yield item


async def cancel_all(services: Services, team_id: str, ids: Sequence[UUID]) -> None:
    """Cancel what is still pending; nobody is left to be told if the database is away."""
    with contextlib.suppress(DatabaseUnavailableError):
        await services.queue.cancel_ids(team_id, ids)


def failure_of(row: ResultRow) -> ResultFailedError:
    """The error of a failed result, for a client that knows no results."""
    assert row.error_code is not None
    assert row.error_message is not None
    return ResultFailedError(
        FailureCode(row.error_code), row.error_message, {"result_id": str(row.id)}
    )


async def _follow(
    services: Services, team_id: str, result_id: UUID, *, with_tokens: bool
) -> AsyncGenerator[TextDelta | Ended | KeepAlive, None]:
    follower = ResultReader(
        services.hub,
        services.results,
        team_id,
        result_id,
        Position(),
        services.settings.keep_alive_seconds,
        with_tokens=with_tokens,
    )
    has_text = False
    async with contextlib.aclosing(follower.events()) as events:
        async for event in events:
            if isinstance(event, AttemptStarted):
                if has_text:
                    raise AttemptLostError(
                        f"The model was lost in mid-answer. The text so far cannot be continued: "
                        f"send the request again. Its result is {result_id}."
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
    if services.hub.is_closing:
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
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _stopping(result_id: UUID) -> StoppingError:
    return StoppingError(
        f"This process of the service is stopping. Send the request again; its result is {result_id}.",
        headers={"Retry-After": "2"},
    )
