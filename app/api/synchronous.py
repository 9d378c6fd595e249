"""What the synchronous dialects share: send a group, answer at its end or live.

The first byte leaves only after the group is committed. A client that leaves cancels it, unless it
said `X-On-Disconnect: continue`. `X-Result-Id` tells the results' ids.
"""

import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from uuid import UUID

from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response

from app.api.common import (
    REPLAYED_HEADER,
    idempotency_key,
    on_disconnect_of,
    principal_of,
    services_of,
    watching,
)
from app.api.container import Services
from app.api.sse import MEDIA_TYPE, EventStreamResponse
from app.core.errors import DatabaseUnavailableError, ResultFailedError, StoppingError
from app.core.ids import new_id
from app.results.drafts import GroupRequest
from app.results.multi_result import GroupEvent
from app.results.replays import Replayed
from app.results.rows import ResultRow
from app.results.submission import SubmissionOutcome

RESULT_ID_HEADER = "X-Result-Id"
_MAX_IDS = 200
ON_DISCONNECT_HEADER = {
    "X-On-Disconnect": {
        "schema": {"type": "string", "enum": ["cancel", "continue"], "default": "cancel"},
        "description": "What becomes of the result when the client leaves before its end.",
    }
}
_CLIENT_LEFT = 499  # seen by nobody but a log

Events = AsyncGenerator[GroupEvent, None]


async def respond_complete(
    request: Request,
    group: GroupRequest,
    render: Callable[[Sequence[ResultRow]], Response],
) -> Response:
    """Send a group, and answer with what `render` makes of its results, once all have completed.

    Raises what `Submissions.submit_group` and `ResultGroups.wait` raise.
    """
    services, principal = services_of(request), principal_of(request)
    group = as_asked_for(request, group)
    ids = [new_id() for _ in range(group.size)]
    with contextlib.ExitStack() as stack:
        woken = [stack.enter_context(services.hub.expecting(one)) for one in ids]
        answers = await services.submissions.submit_group(principal, group, ids)
        is_new = not any(isinstance(answer, Replayed) for answer in answers)
        if not is_new:
            ids = ids_of(answers)
            woken = [stack.enter_context(services.hub.expecting(one)) for one in ids]
        is_disconnected = stack.enter_context(watching(request, *woken))
        is_over = False
        try:
            rows = await services.groups.wait(
                principal.team_id, ids, woken, is_new=is_new, is_disconnected=is_disconnected
            )
            is_over = not is_disconnected()
        except (ResultFailedError, StoppingError) as error:
            error.headers[RESULT_ID_HEADER] = to_header(ids)
            if not is_new:
                tell_replayed(error)
            raise
        finally:
            if not is_over and group.on_disconnect == "cancel":
                await services.groups.cancel(principal.team_id, ids)
    if not is_over:
        return Response(status_code=_CLIENT_LEFT)
    response = render(rows)
    response.headers[RESULT_ID_HEADER] = to_header(ids)
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
    """Send a group, and answer with the frames that `encode` makes of its ids and events.

    `encode` turns a ServiceError of the events into the dialect's error frame, or raises what
    `response_type` knows.
    """
    services, principal = services_of(request), principal_of(request)
    group = as_asked_for(request, group)
    services.hub.check_room()
    ids = [new_id() for _ in range(group.size)]
    with contextlib.ExitStack() as stack:
        for one in ids:  # hold the places that the streams will take
            stack.enter_context(services.hub.reading(one))
        answers = await services.submissions.submit_group(principal, group, ids)
    ids = ids_of(answers)
    headers = {RESULT_ID_HEADER: to_header(ids)} | replayed_header(answers)
    is_complete = False

    async def events() -> Events:
        nonlocal is_complete
        followed = services.groups.read(principal.team_id, ids, with_tokens=with_tokens)
        telling = _telling(followed, is_replayed=REPLAYED_HEADER in headers)
        async with contextlib.aclosing(telling) as items:
            async for item in items:
                yield item
        is_complete = True

    async def frames() -> AsyncGenerator[bytes, None]:
        try:
            async with contextlib.aclosing(encode(ids, events())) as encoded:
                async for frame in encoded:
                    yield frame
        except Exception:
            await leave()
            raise
        await leave()  # the stream ended with an error: what still runs has no reader
        if is_complete and not group.store:
            await erase_delivered(services, ids)

    async def leave() -> None:
        if not is_complete and group.on_disconnect == "cancel":
            await services.groups.cancel(principal.team_id, ids)

    return response_type(frames(), headers, on_left=leave, media_type=media_type)


async def _telling(followed: Events, *, is_replayed: bool) -> Events:
    """What happens to results; of those that were made before, a failure tells it."""
    async with contextlib.aclosing(followed) as items:
        try:
            async for item in items:
                yield item
        except ResultFailedError as error:
            if is_replayed:
                tell_replayed(error)
            raise


async def erase_delivered(services: Services, ids: Sequence[UUID]) -> None:
    """Erase the texts of results that their client has and wants nobody to keep."""
    with contextlib.suppress(DatabaseUnavailableError):  # they go when they are an hour old
        await services.erasure.erase(ids)


def ids_of(answers: Sequence[SubmissionOutcome]) -> list[UUID]:
    """The results' ids, of new ones and of those that were made before under the same key."""
    return [answer.result_id for answer in answers]


def replayed_header(answers: Sequence[SubmissionOutcome]) -> dict[str, str]:
    """Tells of results that were made before, by the same request under the same key."""
    return {REPLAYED_HEADER: "true"} if isinstance(answers[0], Replayed) else {}


def tell_replayed(error: ResultFailedError | StoppingError) -> None:
    """Have an error say that it is the first request's: the same key would give it once more.

    OpenAI's client, which sends again what failed, would do that in vain.
    """
    error.headers[REPLAYED_HEADER] = "true"
    if isinstance(error, ResultFailedError):
        error.headers["X-Should-Retry"] = "false"
        error.detail += (
            " (So ended the first request under this Idempotency-Key, and so it is told as long as "
            "the key is kept: another try needs another key.)"
        )


def to_header(ids: Sequence[UUID]) -> str:
    """The ids as a header's list: the first of very many, for clients take 8 KiB of a header."""
    return ", ".join(str(one) for one in ids[:_MAX_IDS])


def as_asked_for(request: Request, group: GroupRequest) -> GroupRequest:
    """The group, with what the headers say."""
    key = idempotency_key(request, group.options.idempotency_key)
    # Who gives a key means to come back for the answer.
    default = group.on_disconnect if key is None else "continue"
    return replace(
        group,
        on_disconnect=on_disconnect_of(request, default),
        options=group.options.model_copy(update={"idempotency_key": key}),
    )
