"""Outcomes of lines: the entries of a batch's output and error files."""

from dataclasses import dataclass
from uuid import UUID

from app.batches.dialect import BatchDialect
from app.batches.lines import line_to_wire
from app.batches.rows import End, Line, LineOutcome
from app.core.errors import ServiceError

_STOPPED = {
    "cancelled": "This request was not finished when the batch was cancelled.",
    "expired": "This request could not be executed before the completion window expired.",
}


@dataclass(slots=True, frozen=True)
class LineOutcomes:
    batch_id: UUID
    dialect: BatchDialect

    def completed(self, line: Line, body: object) -> LineOutcome:
        return self._with_response(line, 200, body, is_completed=True)

    def refused(self, line: Line, error: ServiceError) -> LineOutcome:
        """The outcome of a line that its endpoint refuses, or whose result failed."""
        return self._with_response(line, *self.dialect.refuse(error), is_completed=False)

    def stopped(self, line: Line, end: End) -> LineOutcome:
        """The outcome of a line without a response when its batch was stopped."""
        error = {"code": f"batch_{end}", "message": _STOPPED[end]}
        wire = line_to_wire(self.batch_id, line.line, line.custom_id, error=error)
        return LineOutcome(line.line, False, wire)

    def _with_response(
        self, line: Line, status: int, body: object, *, is_completed: bool
    ) -> LineOutcome:
        response = {
            "status_code": status,
            "request_id": str(line.result_ids[0]) if line.result_ids else None,
            "body": body,
        }
        wire = line_to_wire(self.batch_id, line.line, line.custom_id, response=response)
        return LineOutcome(line.line, is_completed, wire)
