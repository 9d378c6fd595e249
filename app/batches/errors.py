"""Errors of single lines, which must not stop their batch."""

import logging
from uuid import UUID

from app.core.database import is_transient
from app.core.errors import InternalError, ServiceError

logger = logging.getLogger(__name__)


def to_service_error(error: Exception, batch_id: UUID) -> ServiceError:
    """The error to report in a line's outcome; a bug is logged. Raises transient database errors."""
    if isinstance(error, ServiceError):
        return error
    if is_transient(error):
        raise error
    extra = {"action": "line_broke", "batch_id": str(batch_id)}
    logger.error("a line of batch %s broke", batch_id, exc_info=error, extra=extra)
    return InternalError("A bug in the service; its worker's log has the details.")
