"""Disconnects: detection, and the X-On-Disconnect header."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from uuid import UUID

from starlette.requests import Request

from app.api.dependencies import services_of, team_of
from app.api.sse import until_disconnect
from app.core.errors import invalid_field
from app.core.waiting import is_set_by
from app.queue.enqueue import OnDisconnect
from app.results.jobs.rows import Job
from app.results.rows import ResultRow
from app.results.streams.subscribers import ResultSignal

ON_DISCONNECT_HEADER = {
    "X-On-Disconnect": {
        "schema": {"type": "string", "enum": ["cancel", "continue"], "default": "cancel"},
        "description": "Cancel or continue the result if the client disconnects before its end.",
    }
}


@contextlib.contextmanager
def watch_disconnect(request: Request, *woken: ResultSignal) -> Iterator[Callable[[], bool]]:
    """Set the signals when the client disconnects; yields a function that returns whether it has."""
    disconnecting = asyncio.create_task(until_disconnect(request.receive))

    def wake(_: object) -> None:
        for signal in woken:
            signal.set()

    disconnecting.add_done_callback(wake)
    try:
        yield disconnecting.done
    finally:
        disconnecting.cancel()


async def wait_for_end(
    request: Request, result_id: UUID, seconds: float, woken: ResultSignal | None = None
) -> tuple[ResultRow, bool]:
    """Wait until a result is terminal, the time is over, or the client disconnects.

    `woken` is the signal of a new result, which was expected before it was submitted. Returns the result,
    and whether the client has disconnected.
    """
    hub, team = services_of(request).hub, team_of(request)
    expecting = (
        contextlib.nullcontext(woken) if woken is not None else hub.expecting(team, result_id)
    )
    with expecting as signal, watch_disconnect(request, signal) as is_disconnected:
        row = await hub.wait_terminal(
            team,
            result_id,
            seconds,
            signal,
            is_new=woken is not None,
            is_disconnected=is_disconnected,
        )
        return row, is_disconnected()


def on_disconnect_of(request: Request, default: OnDisconnect) -> OnDisconnect:
    headers = dict(request.scope["headers"])
    given = headers.get(b"x-on-disconnect", default.encode()).strip().lower()
    if given == b"continue":
        return "continue"
    if given == b"cancel":
        return "cancel"
    raise invalid_field("X-On-Disconnect", "must be `continue` or `cancel`")


async def wait_for_job(request: Request, job_id: UUID, seconds: float) -> Job:
    """A job once it has ended, or as it is when the time is over or the client disconnects.

    Raises NotFoundError, TooManyWaitersError.
    """
    services, team = services_of(request), team_of(request)
    ends = asyncio.get_running_loop().time() + seconds
    with (
        services.hub.expecting(team, job_id) as woken,
        watch_disconnect(request, woken) as is_disconnected,
    ):
        while True:
            woken.clear()
            job = await services.jobs.get(team, job_id)
            is_over = asyncio.get_running_loop().time() >= ends or services.hub.is_closing
            if job.state == "ended" or is_over or is_disconnected():
                return job
            await is_set_by(woken, ends)
