"""Claims as one list, for tests that look at all of them."""

from collections.abc import Mapping
from uuid import UUID

from app.queue.claim import Claim
from app.queue.job_queue import JobQueue


async def claim_all(queue: JobQueue, worker_id: UUID, free: Mapping[str, int]) -> list[Claim]:
    """The claims of a worker with these free slots."""
    return [claim async for claims in queue.claims(worker_id, free) for claim in claims]
