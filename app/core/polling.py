"""Polling: a step that is repeated, and survives a database that is unavailable for a time."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from app.core.database import is_transient
from app.core.errors import DatabaseUnavailableError
from app.core.waiting import is_set_within

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 1.0


class PollingLoop:
    """Runs `step` again and again: after as many seconds as it returns, otherwise after `seconds`.

    `wake` ends a pause. A transient error of the database is logged under `name`, and the next step
    tries again, soon; another error ends the loop.
    """

    def __init__(
        self, name: str, step: Callable[[], Awaitable[float | None]], *, seconds: float
    ) -> None:
        self._name = name
        self._step = step
        self._seconds = seconds
        self._wake = asyncio.Event()

    def wake(self) -> None:
        self._wake.set()

    async def run(self) -> None:
        while True:
            self._wake.clear()
            pause = None
            try:
                pause = await self._step()
            except Exception as error:
                if not is_transient(error) and not isinstance(error, DatabaseUnavailableError):
                    raise
                pause = min(_RETRY_SECONDS, self._seconds)
                extra = {"action": "poll_failed", "loop": self._name}
                logger.info("%s: waiting for the database: %s", self._name, error, extra=extra)
            await is_set_within(self._wake, self._seconds if pause is None else pause)
