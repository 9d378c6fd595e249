"""Storing the outcomes of lines whose results have ended."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from app.batches.dialect import BatchServices, Render, to_service_error
from app.batches.in_flight import InFlightLine, InFlightLines
from app.batches.lines import LineOutcomes
from app.batches.rows import Batch, LineOutcome
from app.batches.work import BatchLease
from app.core.errors import DatabaseUnavailableError, NotFoundError, ServiceError
from app.core.off_loop import off_loop
from app.core.pieces import in_pieces
from app.results.rows import ResultRow, erased, failure_of

_PAGE = 100  # lines whose outcomes are stored at once
_PAGE_BYTES = 4_000_000  # or bytes of their outputs; a larger one is stored alone
_CHECK_SECONDS = 5.0  # between checks of all results, for lost notifications


@dataclass(slots=True)
class Collector:
    services: BatchServices
    outcomes: LineOutcomes
    in_flight: InFlightLines
    lease: BatchLease
    check_all_at: float = 0.0  # monotonic; 0: at the next collection

    async def collect(self, batch: Batch) -> None:
        now = asyncio.get_running_loop().time()
        candidates = list(self.in_flight.take_ended())
        if now >= self.check_all_at:
            self.check_all_at = now + _CHECK_SECONDS
            candidates = self.in_flight.result_ids
        if not candidates:
            return
        ended = self.in_flight.remove_results(await self.services.work.over(candidates))
        for page in in_pieces(ended, lambda one: one.size, _PAGE_BYTES, _PAGE):
            await self._store(batch, page)

    async def _store(self, batch: Batch, lines: Sequence[InFlightLine]) -> None:
        outcomes = await asyncio.gather(*(self._outcome(batch, one) for one in lines))
        await self.services.work.mark_done(batch.id, outcomes)
        if ids := [i for one in lines if not one.is_stored for i in one.line.result_ids]:
            await self.services.erasure.erase(ids)
        self.in_flight.remove(lines)
        await self.lease.renew()

    async def _outcome(self, batch: Batch, one: InFlightLine) -> LineOutcome:
        line, end = one.line, batch.expected_end
        try:
            rows = [
                await self.services.results.get(batch.team_id, result_id)
                for result_id in line.result_ids
            ]
            one.is_stored = all(row.store for row in rows)
            failed = next((row for row in rows if row.state == "failed"), None)
            if failed is not None:
                if end != "completed" and failed.error_code in ("cancelled", "deadline_exceeded"):
                    return self.outcomes.stopped(line, end)
                return self.outcomes.refused(batch, line, failure_of(failed))
            if gone := next((row for row in rows if row.erased_at is not None), None):
                return self.outcomes.refused(batch, line, erased(gone))
            return await self._completed(batch, one, rows)
        except NotFoundError as error:
            if end != "completed":
                return self.outcomes.stopped(line, end)
            return self.outcomes.refused(batch, line, error)

    async def _completed(
        self, batch: Batch, one: InFlightLine, rows: Sequence[ResultRow]
    ) -> LineOutcome:
        render = one.render or await self._render_of(batch, one)
        if isinstance(render, ServiceError):
            return self.outcomes.refused(batch, one.line, render)
        try:
            size = sum(row.output_size for row in rows)
            return await off_loop(size, lambda: self.outcomes.completed(one.line, render(rows)))
        except Exception as error:  # noqa: BLE001 # reported in the line's outcome
            return self.outcomes.refused(batch, one.line, to_service_error(error, batch.id))

    async def _render_of(self, batch: Batch, one: InFlightLine) -> Render | ServiceError:
        """The rendering of a line that another process has sent."""
        body = await self.services.work.body(batch.id, one.line.line)
        request = await self.services.read_line(batch, replace(one.line, body=body))
        if isinstance(request, DatabaseUnavailableError):
            raise request  # the line's result is valid: retry later
        return request if isinstance(request, ServiceError) else request.render
