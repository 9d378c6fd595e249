"""Synchronous responses of the dialects: send a group, respond at its end or with a stream.

The first byte is sent after the group is committed. A disconnect cancels it, unless the request has
`X-On-Disconnect: continue`. `X-Result-Id` lists the results' ids.
"""

import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace
from uuid import UUID

from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response

from app.api.container import Services
from app.api.dependencies import principal_of, services_of
from app.api.disconnects import on_disconnect_of, watch_disconnect
from app.api.idempotency_header import REPLAYED_HEADER, idempotency_key
from app.api.sse import MEDIA_TYPE, EventStreamResponse
from app.core.byte_budget import charge
from app.core.errors import (
    DatabaseUnavailableError,
    MemoryBusyError,
    ResultFailedError,
    StoppingError,
)
from app.core.ids import new_id
from app.core.off_loop import off_loop
from app.results.drafts import GroupRequest
from app.results.multi_result import GroupEvent
from app.results.replays import Replayed
from app.results.rows import LOGPROBS_COPIES, ResultRow
from app.results.submission import SubmissionOutcome

RESULT_ID_HEADER = "X-Result-Id"
_REUSED_HEADER = "X-Reused-From"
_MAX_IDS = 200
_CLIENT_LEFT = 499  # for the log alone

Events = AsyncGenerator[GroupEvent, None]


async def respond_complete(
    request: Request, group: GroupRequest, render: Callable[[Sequence[ResultRow]], Response]
) -> Response:
    """Send a group; respond with `render` of its results when all are completed.

    Raises the errors of `submit_group` and `wait_for_all`.
    """
    services, principal = services_of(request), principal_of(request)
    group = with_headers(request, group)
    ids = [new_id() for _ in range(group.size)]
    with contextlib.ExitStack() as stack:
        woken = [stack.enter_context(services.hub.expecting(principal.team_id, one)) for one in ids]
        answers = await services.submissions.submit_group(principal, group, ids)
        is_new = not any(isinstance(answer, Replayed) for answer in answers)
        if not is_new:
            ids = [answer.result_id for answer in answers]
            woken = [
                stack.enter_context(services.hub.expecting(principal.team_id, one)) for one in ids
            ]
        is_disconnected = stack.enter_context(watch_disconnect(request, *woken))
        is_over = False
        try:
            rows = await services.groups.wait(
                principal.team_id, ids, woken, is_new=is_new, is_disconnected=is_disconnected
            )
            is_over = not is_disconnected()
            await charge(LOGPROBS_COPIES * sum(row.logprobs_size for row in rows))
        except (MemoryBusyError, ResultFailedError, StoppingError) as error:
            error.headers[RESULT_ID_HEADER] = to_header(ids)
            if isinstance(error, ResultFailedError) and not is_new:
                mark_replayed(error)
            raise
        finally:
            if not is_over and group.on_disconnect == "cancel":
                await services.groups.cancel(principal.team_id, ids)
    if not is_over:
        return Response(status_code=_CLIENT_LEFT)
    response = await off_loop(sum(row.output_size for row in rows), lambda: render(rows))
    response.headers[RESULT_ID_HEADER] = to_header(ids)
    if sources := [row.reused_from for row in rows if row.reused_from is not None]:
        response.headers[_REUSED_HEADER] = to_header(sources)
    if not is_new:
        response.headers[REPLAYED_HEADER] = "true"
    if not group.store:
        response.background = BackgroundTask(erase_delivered, services, ids)
    return response


async def respond_stream(
    request: Request,
    group: GroupRequest,
    encode: Callable[[Sequence[UUID], Events], AsyncGenerator[bytes, None]],
    *,
    with_tokens: bool = False,
    media_type: str = f"{MEDIA_TYPE}; charset=utf-8",
    response_type: type[EventStreamResponse] = EventStreamResponse,
) -> Response:
    """Send a group; respond with the frames that `encode` makes of its ids and events.

    `encode` turns a ServiceError of the events into the dialect's error frame, or raises an error that
    `response_type` handles.
    """
    services, principal = services_of(request), principal_of(request)
    group = with_headers(request, group)
    services.hub.reserve_place(principal.team_id)
    ids = [new_id() for _ in range(group.size)]
    with contextlib.ExitStack() as stack:
        for one in ids:  # the first in the reserved place
            stack.enter_context(services.hub.reading(principal.team_id, one))
        answers = await services.submissions.submit_group(principal, group, ids)
    ids = [answer.result_id for answer in answers]
    is_replayed = isinstance(answers[0], Replayed)
    session = StreamSession(services, principal.team_id, group, ids, is_replayed)
    return response_type(
        session.frames(encode(ids, session.events(with_tokens=with_tokens))),
        id_headers(answers),
        on_disconnect=session.cancel_unfinished,
        media_type=media_type,
    )


@dataclass(slots=True)
class StreamSession:
    """The stream of a group's results, from the first event to completion, an error or a disconnect."""

    services: Services
    team_id: str
    group: GroupRequest
    ids: Sequence[UUID]
    is_replayed: bool
    is_complete: bool = False

    async def events(self, *, with_tokens: bool) -> Events:
        """The results' events. A replayed result's failure is marked as such."""
        read = self.services.groups.read(self.team_id, self.ids, with_tokens=with_tokens)
        try:
            async with contextlib.aclosing(read) as events:
                async for event in events:
                    yield event
        except ResultFailedError as error:
            if self.is_replayed:
                mark_replayed(error)
            raise
        self.is_complete = True

    async def frames(self, encoded: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
        """The encoded events. An error cancels the results that still run, which have no reader."""
        try:
            async with contextlib.aclosing(encoded) as frames:
                async for frame in frames:
                    yield frame
        except Exception:
            await self.cancel_unfinished()
            raise
        await self.cancel_unfinished()  # `encoded` may end with an error's frame
        if self.is_complete and not self.group.store:
            await erase_delivered(self.services, self.ids)

    async def cancel_unfinished(self) -> None:
        if not self.is_complete and self.group.on_disconnect == "cancel":
            await self.services.groups.cancel(self.team_id, self.ids)


async def erase_delivered(services: Services, ids: Sequence[UUID]) -> None:
    with contextlib.suppress(DatabaseUnavailableError):  # maintenance erases them after an hour
        await services.erasure.erase(ids)


def id_headers(answers: Sequence[SubmissionOutcome]) -> dict[str, str]:
    """The headers that name the results, and mark replayed ones."""
    replayed = {REPLAYED_HEADER: "true"} if isinstance(answers[0], Replayed) else {}
    return {RESULT_ID_HEADER: to_header([answer.result_id for answer in answers])} | replayed


def mark_replayed(error: ResultFailedError) -> None:
    """Mark a result's failure as replayed: the same key would return it again.

    OpenAI's client, which repeats failed requests, would repeat this one in vain.
    """
    error.headers[REPLAYED_HEADER] = "true"
    error.headers["X-Should-Retry"] = "false"
    error.detail += (
        " (The first request under this Idempotency-Key ended with this error; the key returns it "
        "until it expires. Send another key to try again.)"
    )


def to_header(ids: Sequence[UUID]) -> str:
    """The ids as a header's list: at most 200, because clients limit a header to 8 KiB."""
    return ", ".join(str(one) for one in ids[:_MAX_IDS])


def with_headers(request: Request, group: GroupRequest) -> GroupRequest:
    key = idempotency_key(request, group.options.idempotency_key)
    # A client that sends a key can fetch the response later.
    default = group.on_disconnect if key is None else "continue"
    return replace(
        group,
        on_disconnect=on_disconnect_of(request, default),
        options=group.options.model_copy(update={"idempotency_key": key}),
    )
