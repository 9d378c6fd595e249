"""The dialect of a batch: its API reads the bodies of lines and answers them."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol
from uuid import UUID

from app.auth.principal import Principal
from app.batches.files import FileStore
from app.batches.rows import Batch, Line
from app.batches.work import BatchWork
from app.core.database import is_transient
from app.core.errors import InternalError, ServiceError
from app.core.listener import Listener
from app.core.settings import Settings
from app.queue.job_queue import JobQueue
from app.results.drafts import GroupRequest
from app.results.retention.erasure import Erasure
from app.results.rows import ResultRow
from app.results.store import ResultStore
from app.results.submission import Submissions

logger = logging.getLogger(__name__)

_PRIORITY = -1  # a batch has a day: requests with a waiting client go first

# The body of a response, as JSON members.
Render = Callable[[Sequence[ResultRow]], object]


@dataclass(slots=True, frozen=True)
class LineRequest:
    """The request of a line, and the body of its response."""

    group: GroupRequest
    render: Render


class BatchDialect(Protocol):
    """Reads the bodies of lines, and renders refusals."""

    async def read(self, principal: Principal, endpoint: str, body: bytes) -> LineRequest:
        """The request of a line. Raises ServiceError."""

    def refuse(self, endpoint: str, error: ServiceError) -> tuple[int, object]:
        """Status and body of the endpoint's response to a request that ends with this error."""


@dataclass(slots=True, frozen=True)
class BatchServices:
    """The parts of a process that batches are processed with."""

    settings: Settings
    listener: Listener
    work: BatchWork
    files: FileStore
    submissions: Submissions
    results: ResultStore
    erasure: Erasure
    queue: JobQueue
    dialect: BatchDialect

    async def read_line(self, batch: Batch, line: Line) -> LineRequest | ServiceError:
        """The request of a line, with the deadline and priority of its batch."""
        try:
            request = await self.dialect.read(
                _principal_of(batch), batch.endpoint, line.body.encode()
            )
        except Exception as error:  # noqa: BLE001 # reported in the line's outcome
            return to_service_error(error, batch.id)
        deadline = max(1.0, min(batch.seconds_left, self.settings.max_deadline_seconds))
        options = request.group.options.model_copy(
            update={"deadline_seconds": deadline, "priority": _PRIORITY, "idempotency_key": None}
        )
        group = replace(
            request.group, options=options, on_disconnect="continue", waits_for_model=True
        )
        return replace(request, group=group)

    async def submit(
        self, batch: Batch, request: LineRequest, ids: Sequence[UUID]
    ) -> ServiceError | None:
        try:
            await self.submissions.submit_group_once(_principal_of(batch), request.group, ids)
        except Exception as error:  # noqa: BLE001 # reported in the line's outcome
            return to_service_error(error, batch.id)
        return None


def to_service_error(error: Exception, batch_id: UUID) -> ServiceError:
    """The error to report in a line's outcome; a bug is logged. Raises transient database errors."""
    if isinstance(error, ServiceError):
        return error
    if is_transient(error):
        raise error
    extra = {"action": "line_broke", "batch_id": str(batch_id)}
    logger.error("a line of batch %s broke", batch_id, exc_info=error, extra=extra)
    return InternalError("A bug in the service; its worker's log has the details.")


def _principal_of(batch: Batch) -> Principal:
    return Principal(batch.team_id, frozenset({"use"}), token_id=batch.token_id)
