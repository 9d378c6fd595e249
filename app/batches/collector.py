"""Storing the outcomes of lines whose results have ended."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from uuid import UUID

from app.batches.dialect import BatchServices, Render
from app.batches.errors import to_service_error
from app.batches.in_flight import InFlightLine, InFlightLines
from app.batches.lease import BatchLease
from app.batches.outcomes import LineOutcomes
from app.batches.rows import Batch, End, LineOutcome
from app.core.errors import DatabaseUnavailableError, NotFoundError, ServiceError
from app.results.row_errors import erased, failure_of
from app.results.rows import ResultRow

_PAGE = 100  # lines whose outcomes are stored at once
_CHECK_SECONDS = 5.0  # between checks of all results, for lost notifications


class Collector:
    """Turns ended results of one batch into outcomes."""

    def __init__(
        self,
        services: BatchServices,
        batch_id: UUID,
        in_flight: InFlightLines,
        lease: BatchLease,
    ) -> None:
        self._services = services
        self._batch_id = batch_id
        self._in_flight = in_flight
        self._lease = lease
        self._outcomes = LineOutcomes(batch_id, services.dialect)
        self._check_all_at = 0.0

    def reset(self) -> None:
        """Check all results at the next collection."""
        self._check_all_at = 0.0

    async def collect(self, batch: Batch) -> None:
        """Store the outcomes of the lines all of whose results have ended."""
        now = asyncio.get_running_loop().time()
        candidates = list(self._in_flight.take_ended())
        if now >= self._check_all_at:
            self._check_all_at = now + _CHECK_SECONDS
            candidates = self._in_flight.result_ids
        if not candidates:
            return
        ended = self._in_flight.remove_results(await self._services.work.over(candidates))
        for start in range(0, len(ended), _PAGE):
            await self._store(batch, ended[start : start + _PAGE])

    async def _store(self, batch: Batch, lines: Sequence[InFlightLine]) -> None:
        outcomes = await asyncio.gather(*(self._outcome(batch, one) for one in lines))
        await self._services.work.mark_done(self._batch_id, outcomes)
        if ids := [i for one in lines if not one.is_stored for i in one.line.result_ids]:
            await self._services.erasure.erase(ids)
        self._in_flight.remove(lines)
        await self._lease.renew()

    async def _outcome(self, batch: Batch, one: InFlightLine) -> LineOutcome:
        line, end = one.line, batch.expected_end
        try:
            rows = [
                await self._services.results.get(batch.team_id, result_id)
                for result_id in line.result_ids
            ]
            one.is_stored = all(row.store for row in rows)
            failed = next((row for row in rows if row.state == "failed"), None)
            if failed is not None and _is_stopped_by(failed, end):
                return self._outcomes.stopped(line, end)
            if failed is not None:
                return self._outcomes.refused(line, failure_of(failed))
            if gone := next((row for row in rows if row.erased_at is not None), None):
                return self._outcomes.refused(line, erased(gone))
            return await self._completed(batch, one, rows)
        except NotFoundError as error:
            if end != "completed":
                return self._outcomes.stopped(line, end)
            return self._outcomes.refused(line, error)

    async def _completed(
        self, batch: Batch, one: InFlightLine, rows: Sequence[ResultRow]
    ) -> LineOutcome:
        render = one.render or await self._render_of(batch, one)
        if isinstance(render, ServiceError):
            return self._outcomes.refused(one.line, render)
        try:
            return self._outcomes.completed(one.line, render(rows))
        except Exception as error:  # noqa: BLE001 # reported in the line's outcome
            return self._outcomes.refused(one.line, to_service_error(error, self._batch_id))

    async def _render_of(self, batch: Batch, one: InFlightLine) -> Render | ServiceError:
        """The rendering of a line that another process has sent."""
        body = await self._services.work.body(self._batch_id, one.line.line)
        request = await self._services.read_line(batch, replace(one.line, body=body))
        if isinstance(request, DatabaseUnavailableError):
            raise request  # the line's result is valid: retry later
        return request if isinstance(request, ServiceError) else request.render


def _is_stopped_by(row: ResultRow, end: End) -> bool:
    return end != "completed" and row.error_code in ("cancelled", "deadline_exceeded")
