"""Work on jobs that outlives its request, in this process: sending rows, and sending failed ones again.

It keeps no state: if the process dies, the job's page offers to continue. No row is sent twice, since each
has its key.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from app.ui.errors import ApiError, SignInError

logger = logging.getLogger(__name__)

MAX_OF_OWNER = 8
MAX_NOTES = 1_000

Report = Callable[[str], None]


class Background:
    """One piece of work a job at a time; a note has the reason why it waits, or ended."""

    def __init__(self) -> None:
        self._tasks: dict[str, tuple[bytes, asyncio.Task[None]]] = {}
        self._notes: dict[str, str] = {}

    def start(self, owner: bytes, job_id: str, work: Callable[[Report], Awaitable[None]]) -> None:
        """Start it, unless the job is worked on, or the owner of the token has too many of them."""
        if self.is_busy(job_id):
            return
        if sum(one == owner for one, _ in self._tasks.values()) >= MAX_OF_OWNER:
            self.report(
                job_id, f"You are sending {MAX_OF_OWNER} jobs. Continue when one of them is sent."
            )
            return
        task = asyncio.create_task(self._run(job_id, work), name=f"bulk-{job_id}")
        self._tasks[job_id] = owner, task

    def is_busy(self, job_id: str) -> bool:
        return job_id in self._tasks

    def note(self, job_id: str) -> str:
        return self._notes.get(job_id, "")

    async def close(self) -> None:
        tasks = [task for _, task in self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def report(self, job_id: str, text: str) -> None:
        """Replace the note of a job."""
        self._notes.pop(job_id, None)
        if text:
            self._notes[job_id] = text
            if len(self._notes) > MAX_NOTES:
                del self._notes[next(iter(self._notes))]

    async def _run(self, job_id: str, work: Callable[[Report], Awaitable[None]]) -> None:
        self.report(job_id, "")
        try:
            await work(lambda text: self.report(job_id, text))
        except SignInError:
            self.report(job_id, "Your sign-in has ended: sign in again, and continue.")
        except ApiError as error:
            self.report(job_id, error.message)
        except Exception:
            logger.exception("the work on a job failed", extra={"job_id": job_id})
            self.report(job_id, "The page failed; its log has the reason.")
        finally:
            self._tasks.pop(job_id, None)
