"""Sending the lines of a batch, as far as the queue and its own bound have room."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from uuid import UUID

from app.batches.dialect import BatchServices, LineRequest
from app.batches.in_flight import InFlightLines
from app.batches.lines import LineOutcomes
from app.batches.rows import Batch, Line
from app.batches.work import BatchLease
from app.core.errors import ServiceError
from app.core.ids import new_id

_PAGE = 100  # lines that one step reads and sends
_RETRY_SECONDS = 1.0  # until a queue without room is tried again
_TRANSIENT_STATUSES = (429, 503)

_Requests = Mapping[int, LineRequest]


@dataclass(slots=True)
class Dispatcher:
    """Sends the waiting lines of one batch, in their order."""

    services: BatchServices
    outcomes: LineOutcomes
    in_flight: InFlightLines
    lease: BatchLease
    is_all_sent: bool = False
    _after: int = 0  # no line up to this one waits
    _refused_until: float = 0.0  # monotonic

    def reset(self) -> None:
        self._after, self.is_all_sent = 0, False

    def seconds_until_ready(self) -> float | None:
        """Seconds until lines can be sent; None while there are no lines or no room."""
        if self.is_all_sent or self._room <= 0:
            return None
        return max(0.0, self._refused_until - _now())

    @property
    def _room(self) -> int:
        return self.services.settings.batch_in_flight - self.in_flight.result_count

    async def send(self, batch: Batch) -> None:
        if self.seconds_until_ready() != 0.0:
            return
        lines = await self.services.work.waiting(batch.id, self._after, min(self._room, _PAGE))
        self.is_all_sent = not lines
        read = await asyncio.gather(*(self.services.read_line(batch, line) for line in lines))
        numbered = {line.line: one for line, one in zip(lines, read, strict=True)}
        requests = {place: one for place, one in numbered.items() if isinstance(one, LineRequest)}
        refused = {place: one for place, one in numbered.items() if isinstance(one, ServiceError)}
        ids = await self._assign_ids(batch, lines, requests)
        sent = [
            replace(line, result_ids=ids[line.line])
            for line in lines
            if line.line in requests and line.line in ids
        ]
        errors = await asyncio.gather(
            *(self.services.submit(batch, requests[one.line], one.result_ids) for one in sent)
        )
        refused |= {line.line: error for line, error in zip(sent, errors, strict=True) if error}
        await self._record_sent(batch, [one for one in sent if one.line not in refused], requests)
        await self._record_refused(batch, lines, requests, refused)

    async def discard(self, batch: Batch) -> None:
        """Store the outcomes of all waiting lines: their batch is stopped."""
        while lines := await self.services.work.waiting(batch.id, self._after, _PAGE):
            outcomes = [self.outcomes.stopped(line, batch.expected_end) for line in lines]
            await self.services.work.mark_done(batch.id, outcomes)
            self._after = lines[-1].line
            await self.lease.renew()
        self.is_all_sent = True

    async def _assign_ids(
        self, batch: Batch, lines: Sequence[Line], requests: _Requests
    ) -> dict[int, Sequence[UUID]]:
        """The ids of the lines' results, stored before the lines are sent."""
        ids = {line.line: line.result_ids for line in lines if line.result_ids}
        new = {
            number: [new_id() for _ in range(request.group.size)]
            for number, request in requests.items()
            if number not in ids
        }
        return ids | await self.services.work.assign(batch.id, new) if new else ids

    async def _record_sent(self, batch: Batch, sent: Sequence[Line], requests: _Requests) -> None:
        if sent:
            await self.services.work.mark_sent(batch.id, [line.line for line in sent])
        for line in sent:
            self.in_flight.add(line, requests[line.line].render)
            self.in_flight.mark_ended(line.result_ids)  # one may have ended before it was added

    async def _record_refused(
        self,
        batch: Batch,
        lines: Sequence[Line],
        requests: _Requests,
        refused: Mapping[int, ServiceError],
    ) -> None:
        waiting = [
            number
            for number, error in refused.items()
            if _is_transient(error, requests.get(number))
        ]
        outcomes = [
            self.outcomes.refused(batch, line, refused[line.line])
            for line in lines
            if line.line in refused and line.line not in waiting
        ]
        if outcomes:
            await self.services.work.mark_done(batch.id, outcomes)
        if waiting:
            self._refused_until = _now() + _RETRY_SECONDS
            self._after = min(waiting) - 1
        elif lines:
            self._after = lines[-1].line


def _is_transient(error: ServiceError, request: LineRequest | None) -> bool:
    """True if a refused line may be accepted later, and does not exceed the bound by itself."""
    allowed = error.extra.get("allowed") if error.extra.get("limit") == "max_queued" else None
    is_too_large = allowed is not None and request is not None and request.group.size > allowed
    return error.status in _TRANSIENT_STATUSES and not is_too_large


def _now() -> float:
    return asyncio.get_running_loop().time()
