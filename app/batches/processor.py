"""Feeding batches: the part of a worker process that sends their lines and writes their files.

A batch is taken by a lease and goes on wherever the process before it died. At most so many of its
results are under way at once; while the queue has no room for more, its lines wait.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal
from uuid import UUID, uuid4

import orjson

from app.api.container import Services
from app.api.errors.error_responses import refusal
from app.api.openai.batches_schemas import LineReader, line_to_wire
from app.auth.principal import Principal
from app.batches.files import FileWriter
from app.batches.store import Batch, Line, LineOutcome, NewLine
from app.core.database import is_transient
from app.core.errors import DatabaseUnavailableError, InternalError, NotFoundError, ServiceError
from app.core.ids import new_id
from app.core.listener import BATCHES, ENDED, split_ids
from app.core.waiting import is_set_within
from app.results.drafts import GroupRequest
from app.results.row_errors import erased, failure_of
from app.results.rows import ResultRow

logger = logging.getLogger(__name__)

_RENEWALS = 3  # within one lease
_POLL_SECONDS = 5.0  # for what no notification told
_GATHER_SECONDS = 0.05  # results that end within this time are looked at together
_REFUSED_SECONDS = 1.0  # until a queue without room is asked again
_BATCHES = 64  # that one process feeds at once
_PAGE = 100  # lines that one step reads, sends or writes
_PAGE_BYTES = 4_000_000  # or that are stored at once
_LINES_A_TURN = 2_000  # that are split before others have their turn
_PRIORITY = -1  # a batch has a day: who waits for an answer goes first
_FULL = (429, 503)  # statuses of refusals that pass


Render = Callable[[Sequence[ResultRow]], object]


@dataclass(slots=True, frozen=True)
class LineRequest:
    """A line as its endpoint understands it: what to send, and the body that answers it."""

    group: GroupRequest
    render: Render


# Reads the body of one line. Raises ServiceError.
Endpoint = Callable[[Services, Principal, bytes], Awaitable[LineRequest]]


@dataclass(slots=True)
class _UnderWay:
    line: Line
    open_ids: set[UUID]
    render: Render | None = None  # of those that this process has sent
    is_stored: bool = True


class BatchProcessor:
    """Feeds batches until cancelled. One instance per process."""

    def __init__(self, services: Services, endpoints: Mapping[str, Endpoint]) -> None:
        self.id = uuid4()
        self._services = services
        self._lease = services.settings.lease_seconds
        self._endpoints = endpoints
        self._wake = asyncio.Event()
        self._feeds: dict[UUID, tuple[_Feed, asyncio.Task[None]]] = {}
        services.listener.subscribe(BATCHES, self._on_batch)
        services.listener.subscribe(ENDED, self._on_ended)

    async def run(self) -> None:
        """Take what nobody feeds, and feed it."""
        try:
            while True:
                self._wake.clear()
                try:
                    await self._take()
                except Exception as error:
                    if not is_transient(error):
                        raise
                    logger.info("batches wait: %s", error, extra={"action": "batches_wait"})
                await is_set_within(self._wake, min(_POLL_SECONDS, self._lease))
        finally:
            await self._hand_back()

    async def _take(self) -> None:
        free = _BATCHES - len(self._feeds)
        if free > 0:
            for batch_id in await self._services.batch_work.claim(self.id, free, self._lease):
                if batch_id not in self._feeds:
                    self._start(batch_id)

    def _start(self, batch_id: UUID) -> None:
        feed = _Feed(self._services, self._endpoints, self.id, batch_id)
        task = asyncio.create_task(feed.run(), name=f"batch {batch_id}")
        self._feeds[batch_id] = feed, task
        task.add_done_callback(lambda _: self._on_end(batch_id))

    def _on_end(self, batch_id: UUID) -> None:
        del self._feeds[batch_id]
        self._wake.set()

    async def _hand_back(self) -> None:
        ids = list(self._feeds)
        tasks = [task for _, task in self._feeds.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with contextlib.suppress(Exception):  # else the lease runs out
            async with asyncio.timeout(_GATHER_SECONDS * 20):
                await self._services.batch_work.release(self.id, ids)

    def _on_batch(self, payload: str) -> None:
        self._wake.set()
        for feed, _ in self._feeds.values():
            if not payload or str(feed.batch_id) == payload:
                feed.wake()

    def _on_ended(self, payload: str) -> None:
        ids = split_ids(payload) if payload else None
        for feed, _ in self._feeds.values():
            feed.on_ended(ids)


class _Feed:
    """One batch in this process's hands."""

    def __init__(
        self, services: Services, endpoints: Mapping[str, Endpoint], feeder_id: UUID, batch_id: UUID
    ) -> None:
        self.batch_id = batch_id
        self._services = services
        self._work = services.batch_work
        self._endpoints = endpoints
        self._feeder_id = feeder_id
        self._woken = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._lease = services.settings.lease_seconds
        self._under_way: dict[int, _UnderWay] = {}
        self._lines: dict[UUID, int] = {}  # of the results that are under way
        self._ended: set[UUID] = set()  # of them, as they were told
        self._after = 0  # no line up to this one waits
        self._is_all_sent = False
        self._is_stopped = False
        self._refused_until = 0.0
        self._renew_at = 0.0
        self._check_all_at = 0.0

    def wake(self) -> None:
        """There is news of the batch."""
        self._woken.set()

    def on_ended(self, ids: Sequence[UUID] | None) -> None:
        """These results have ended; None: nobody knows which."""
        ended = self._lines.keys() if ids is None else self._lines.keys() & set(ids)
        if ended:
            self._ended |= ended
            self._woken.set()

    async def run(self) -> None:
        """Feed the batch until it ends or is another's."""
        while True:
            try:
                await self._load()
                while await self._step():
                    pass
            except Exception as error:
                if is_transient(error) or isinstance(error, DatabaseUnavailableError):
                    logger.info("a batch waits: %s", error, extra=self._extra("batch_waits"))
                    await asyncio.sleep(_REFUSED_SECONDS)
                    continue
                # Its lease runs out, and somebody tries again.
                logger.exception("batch %s broke", self.batch_id, extra=self._extra("batch_broke"))
            return

    async def _load(self) -> None:
        """Begin with what is stored: another process, or this one, has come so far."""
        self._under_way.clear()
        self._lines.clear()
        self._after, self._is_all_sent, self._is_stopped = 0, False, False
        for line in await self._work.sent(self.batch_id):
            self._add(line, None)
        self._check_all_at = 0.0

    async def _step(self) -> bool:
        """Bring the batch on by one step; False when nothing is left to be done here."""
        self._woken.clear()
        if not await self._renew():
            return False
        batch = await self._work.look(self._feeder_id, self.batch_id)
        if batch is None:
            return False
        if batch.seconds_left <= 0 and batch.expiring_at is None and not batch.finalizing_at:
            await self._work.mark_expiring(self.batch_id)
            return True
        if batch.finalizing_at is not None:
            return not await self._end(batch)
        end = _end_of(batch)
        if end == "completed" and batch.state == "validating":
            await self._validate(batch)
            return True
        if end == "completed":
            await self._send(batch)
        else:
            await self._stop(batch, end)
        await self._collect(batch)
        if self._is_all_sent and not self._under_way:
            await self._work.begin_end(self.batch_id)
            # One that was frozen, and did not know that the batch is ours now, may have sent lines
            # since we looked: then it does not end yet.
            await self._load()
            return True
        await self._pause(batch)
        return True

    async def _renew(self) -> bool:
        if self._loop.time() < self._renew_at:
            return True
        self._renew_at = self._loop.time() + self._lease / _RENEWALS
        return await self._work.renew(self._feeder_id, self.batch_id, self._lease)

    async def _pause(self, batch: Batch) -> None:
        """Wait until results have ended, or there may be room."""
        now = self._loop.time()
        has_more = not self._is_all_sent and self._room() > 0
        if has_more and now >= self._refused_until:
            return
        until = self._refused_until - now if has_more else _POLL_SECONDS
        until = min(until, self._lease / _RENEWALS)
        if end_is_ahead := _end_of(batch) == "completed":
            until = min(until, max(batch.seconds_left, 0.0))
        if await is_set_within(self._woken, until) and end_is_ahead:
            await asyncio.sleep(_GATHER_SECONDS)

    # --- validating -----------------------------------------------------------------------------

    async def _validate(self, batch: Batch) -> None:
        """Read the file; store its lines, or what is wrong with it."""
        settings = self._services.settings
        reader = LineReader(batch.endpoint, settings.max_batch_lines)
        lines: list[NewLine] = []
        number = 0
        try:
            parts = self._services.files.read(batch.team_id, batch.input_file_id)
            async for content in split_lines(parts, settings.max_body_bytes):
                number += 1
                if content is None:
                    message = f"A line may have at most {settings.max_body_bytes} bytes."
                    reader.refuse("line_too_long", message, number)
                elif line := self._read_line(reader, number, content):
                    lines.append(line)
                if reader.is_full or reader.total > settings.max_batch_lines:
                    break
                if len(lines) == _PAGE or sum(len(line.body) for line in lines) > _PAGE_BYTES:
                    await self._add_lines(lines, is_wanted=not reader.errors)
                    lines = []
        except NotFoundError:
            reader.refuse("file_not_found", "The input file was deleted.")
        await self._add_lines(lines, is_wanted=not reader.errors)
        if not reader.total and not reader.errors:
            reader.refuse("empty_file", "The input file has no requests.")
        if reader.errors:
            await self._work.refuse(self.batch_id, reader.errors)
        else:
            await self._work.begin(self.batch_id, reader.total)

    def _read_line(self, reader: LineReader, number: int, content: bytes) -> NewLine | None:
        try:
            return reader.read(number, content)
        except Exception as error:  # noqa: BLE001 # told as what is wrong with the line
            reader.refuse("invalid_request", str(self._to_refusal(error)), number)
            return None

    async def _add_lines(self, lines: Sequence[NewLine], *, is_wanted: bool) -> None:
        if is_wanted and lines:
            await self._work.add_lines(self.batch_id, lines)
        await self._renew()

    # --- sending --------------------------------------------------------------------------------

    def _room(self) -> int:
        return self._services.settings.batch_in_flight - len(self._lines)

    async def _send(self, batch: Batch) -> None:
        """Send the next lines, as far as there is room."""
        room = self._room()
        if room <= 0 or self._is_all_sent or self._loop.time() < self._refused_until:
            return
        lines = await self._work.waiting(self.batch_id, self._after, min(room, _PAGE))
        self._is_all_sent = not lines
        read = await asyncio.gather(*(self._read(batch, line) for line in lines))
        requests = {
            line.line: request
            for line, request in zip(lines, read, strict=True)
            if isinstance(request, LineRequest)
        }
        ids = {line.line: list(line.result_ids) for line in lines if line.result_ids}
        new = {
            number: [new_id() for _ in range(request.group.size)]
            for number, request in requests.items()
            if number not in ids
        }
        if new:
            ids |= await self._work.assign(self.batch_id, new)
        answers = await asyncio.gather(
            *(self._submit(batch, requests.get(line.line), ids.get(line.line)) for line in lines)
        )
        refused = {
            line.line: answer if isinstance(answer, ServiceError) else request
            for line, request, answer in zip(lines, read, answers, strict=True)
            if isinstance(answer, ServiceError) or isinstance(request, ServiceError)
        }
        await self._note_sent(lines, requests, ids, refused)

    async def _read(self, batch: Batch, line: Line) -> LineRequest | ServiceError:
        try:
            request = await self._endpoints[batch.endpoint](
                self._services, _principal(batch), line.body.encode()
            )
        except Exception as error:  # noqa: BLE001 # told in the line
            return self._to_refusal(error)
        return replace(request, group=self._as_of_batch(batch, request.group))

    def _to_refusal(self, error: Exception) -> ServiceError:
        """Why a line cannot be sent or told; one that meets a bug must not hold up the others."""
        if isinstance(error, ServiceError):
            return error
        if is_transient(error):
            raise error
        logger.error(
            "a line of batch %s broke",
            self.batch_id,
            exc_info=error,
            extra=self._extra("line_broke"),
        )
        return InternalError("A bug in the service; its worker's log has the details.")

    def _as_of_batch(self, batch: Batch, group: GroupRequest) -> GroupRequest:
        deadline = max(1.0, min(batch.seconds_left, self._services.settings.max_deadline_seconds))
        options = group.options.model_copy(
            update={
                "deadline_seconds": deadline,
                "priority": _PRIORITY,
                "idempotency_key": None,
            }
        )
        return replace(group, options=options, on_disconnect="continue", waits_for_model=True)

    async def _submit(
        self, batch: Batch, request: LineRequest | None, ids: Sequence[UUID] | None
    ) -> ServiceError | None:
        if request is None or ids is None:
            return None
        try:
            await self._services.submissions.submit_group_once(
                _principal(batch), request.group, ids
            )
        except Exception as error:  # noqa: BLE001 # told in the line
            return self._to_refusal(error)
        return None

    async def _note_sent(
        self,
        lines: Sequence[Line],
        requests: Mapping[int, LineRequest],
        ids: Mapping[int, Sequence[UUID]],
        refused: Mapping[int, object],
    ) -> None:
        outcomes, sent, waiting = [], [], []
        for line in lines:
            answer = refused.get(line.line)
            if isinstance(answer, ServiceError) and _passes(answer, requests.get(line.line)):
                waiting.append(line.line)
            elif isinstance(answer, ServiceError):
                outcomes.append(self._refusal(line, answer))
            elif line.line in ids:
                sent.append(replace(line, result_ids=ids[line.line]))
        if sent:
            await self._work.mark_sent(self.batch_id, [line.line for line in sent])
        for line in sent:
            self._add(line, requests.get(line.line))
            self._ended |= set(line.result_ids)  # one may have ended before it was known here
        if outcomes:
            await self._work.mark_done(self.batch_id, outcomes)
        if waiting:
            self._refused_until = self._loop.time() + _REFUSED_SECONDS
            self._after = waiting[0] - 1
        elif lines:
            self._after = lines[-1].line

    def _add(self, line: Line, request: LineRequest | None) -> None:
        known = replace(line, body="")  # a batch's bodies would fill the memory
        render = request.render if request else None
        self._under_way[line.line] = _UnderWay(known, set(line.result_ids), render)
        for result_id in line.result_ids:
            self._lines[result_id] = line.line

    # --- stopping -------------------------------------------------------------------------------

    async def _stop(self, batch: Batch, end: Literal["cancelled", "expired"]) -> None:
        """Cancel what is under way, and conclude what was never sent."""
        if not self._is_stopped:
            await self._work.mark_assigned_sent(self.batch_id)
            await self._load()
            self._is_stopped = True
        await self._services.queue.cancel_ids(batch.team_id, list(self._lines))
        if batch.in_progress_at is None:  # not even its lines are all known
            self._is_all_sent = True
            return
        while lines := await self._work.waiting(self.batch_id, self._after, _PAGE):
            await self._work.mark_done(self.batch_id, [self._not_done(line, end) for line in lines])
            self._after = lines[-1].line
            await self._renew()
        self._is_all_sent = True

    # --- collecting -----------------------------------------------------------------------------

    async def _collect(self, batch: Batch) -> None:
        """Keep what became of the lines whose results are over."""
        now = self._loop.time()
        asked, self._ended = self._ended, set()
        if now >= self._check_all_at:
            self._check_all_at = now + _POLL_SECONDS
            asked = set(self._lines)
        if not asked:
            return
        for result_id in await self._work.over(list(asked)):
            if (number := self._lines.pop(result_id, None)) is not None:
                self._under_way[number].open_ids.discard(result_id)
        over = [one for one in self._under_way.values() if not one.open_ids]
        for start in range(0, len(over), _PAGE):
            page = over[start : start + _PAGE]
            outcomes = await asyncio.gather(*(self._conclude(batch, one) for one in page))
            await self._work.mark_done(self.batch_id, outcomes)
            if ids := [i for one in page if not one.is_stored for i in one.line.result_ids]:
                await self._services.erasure.erase(ids)
            for one in page:
                del self._under_way[one.line.line]
            await self._renew()

    async def _conclude(self, batch: Batch, one: _UnderWay) -> LineOutcome:
        line, end = one.line, _end_of(batch)
        try:
            rows = [
                await self._services.results.get(batch.team_id, result_id)
                for result_id in line.result_ids
            ]
            one.is_stored = all(row.store for row in rows)
            failed = next((row for row in rows if row.state == "failed"), None)
            if failed is not None and _is_stopped_by(failed, end):
                return self._not_done(line, end)
            if failed is not None:
                return self._refusal(line, failure_of(failed))
            if gone := next((row for row in rows if row.erased_at is not None), None):
                return self._refusal(line, erased(gone))
            return await self._success(batch, one, rows)
        except NotFoundError as error:
            return self._not_done(line, end) if end != "completed" else self._refusal(line, error)

    async def _success(
        self, batch: Batch, one: _UnderWay, rows: Sequence[ResultRow]
    ) -> LineOutcome:
        line = one.line
        render = one.render or await self._render_of(batch, line)
        if isinstance(render, ServiceError):
            return self._refusal(line, render)
        try:
            response = {
                "status_code": 200,
                "request_id": str(line.result_ids[0]),
                "body": render(rows),
            }
            wire = line_to_wire(self.batch_id, line.line, line.custom_id, response=response)
        except Exception as error:  # noqa: BLE001 # told in the line
            return self._refusal(line, self._to_refusal(error))
        return LineOutcome(line.line, True, wire)

    async def _render_of(self, batch: Batch, line: Line) -> Render | ServiceError:
        """How a line is answered that another process has sent."""
        body = await self._work.body(self.batch_id, line.line)
        request = await self._read(batch, replace(line, body=body))
        if isinstance(request, DatabaseUnavailableError):
            raise request  # the line's result stands
        return request if isinstance(request, ServiceError) else request.render

    def _refusal(self, line: Line, error: ServiceError) -> LineOutcome:
        """The outcome of a line that its endpoint would refuse."""
        answer = refusal(_PATH, error)
        body: Any = orjson.loads(bytes(answer.body))
        response = {
            "status_code": answer.status_code,
            "request_id": str(line.result_ids[0]) if line.result_ids else None,
            "body": body,
        }
        wire = line_to_wire(self.batch_id, line.line, line.custom_id, response=response)
        return LineOutcome(line.line, False, wire)

    def _not_done(self, line: Line, end: str) -> LineOutcome:
        """The outcome of a line that was not answered when its batch was stopped."""
        error = {"code": f"batch_{end}", "message": _NOT_DONE[end]}
        wire = line_to_wire(self.batch_id, line.line, line.custom_id, error=error)
        return LineOutcome(line.line, False, wire)

    # --- the files ------------------------------------------------------------------------------

    async def _end(self, batch: Batch) -> bool:
        """Write the files and end the batch; whether it is ended, or another's."""
        files = {is_completed: self._services.files.writer(batch.team_id)
                 for is_completed in (True, False)}  # fmt: skip
        try:
            after = 0
            while outcomes := await self._work.outcomes(self.batch_id, after, _PAGE):
                for one in outcomes:
                    await files[one.is_completed].write(one.outcome.encode() + b"\n")
                after = outcomes[-1].line
                if not await self._renew():
                    return True
            written: dict[bool, FileWriter | None] = {}
            for is_completed, writer in files.items():
                written[is_completed] = writer if writer.size else None
                if writer.size:
                    await writer.store_rest()
            await self._work.end(
                self._feeder_id, batch, _end_of(batch), written[True], written[False]
            )
            return True
        finally:
            for writer in files.values():
                await writer.discard()

    def _extra(self, action: str) -> dict[str, str]:
        return {"action": action, "batch_id": str(self.batch_id)}


_PATH = "/v1/batches"  # of the dialect in which lines are refused
_NOT_DONE = {
    "cancelled": "This request was not finished when the batch was cancelled.",
    "expired": "This request could not be executed before the completion window expired.",
}


def _passes(error: ServiceError, request: LineRequest | None) -> bool:
    """Whether a refusal is over some time: not if the request alone is more than may ever wait."""
    allowed = error.extra.get("allowed") if error.extra.get("limit") == "max_queued" else None
    is_too_much = allowed is not None and request is not None and request.group.size > allowed
    return error.status in _FULL and not is_too_much


def _principal(batch: Batch) -> Principal:
    return Principal(batch.team_id, frozenset({"use"}))


def _end_of(batch: Batch) -> Literal["completed", "cancelled", "expired"]:
    """As what the batch will end, as things stand."""
    if batch.cancelling_at is not None:
        return "cancelled"
    return "completed" if batch.expiring_at is None else "expired"


def _is_stopped_by(row: ResultRow, end: str) -> bool:
    return end != "completed" and row.error_code in ("cancelled", "deadline_exceeded")


async def split_lines(parts: AsyncIterator[bytes], max_bytes: int) -> AsyncIterator[bytes | None]:
    """The lines of a file that comes in parts; None for one that is longer than `max_bytes`."""
    rest = bytearray()
    is_too_long = False
    is_first = True
    async for part in parts:
        if is_first:
            part = part.removeprefix(b"\xef\xbb\xbf")  # editors' mark of UTF-8
            is_first = False
        *lines, last = part.split(b"\n")
        for place, line in enumerate(lines, 1):
            if not place % _LINES_A_TURN:
                await asyncio.sleep(0)  # the lines of one part may be a million
            whole = bytes(rest) + line
            yield None if is_too_long or len(whole) > max_bytes else whole
            rest.clear()
            is_too_long = False
        rest += last
        if len(rest) > max_bytes:
            rest.clear()
            is_too_long = True
    if rest or is_too_long:
        yield None if is_too_long else bytes(rest)
