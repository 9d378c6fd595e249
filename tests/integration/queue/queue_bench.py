"""The queue under test, with the rows behind it and short ways to fill it."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID

import asyncpg

from app.core.database import Database
from app.core.errors import Failure, FailureCode
from app.core.ids import new_id
from app.core.settings import Settings
from app.queue.claim import Claim
from app.queue.enqueue import NewContext, NewResult
from app.queue.finish import AttemptEnd, AttemptOutcome
from app.queue.idempotency import NewKey
from app.queue.job_queue import JobQueue
from app.queue.progress import Chunk
from tests.claims import claim_all
from tests.conftest import connect

MODEL = "m"
MAX_ATTEMPTS = 3
LOST = Failure(FailureCode.TRITON_LOST, "Triton was lost.", True)
REFUSED = Failure(FailureCode.INVALID_REQUEST, "No.", False)


class Bench:
    """The queue under test, and the rows behind it."""

    def __init__(
        self, database: Database, settings: Settings, connection: asyncpg.Connection
    ) -> None:
        self.database = database
        self.settings = settings
        self.queue = JobQueue(database, settings)
        self.connection = connection

    async def add(self, count: int = 1, **members: Any) -> list[UUID]:
        """Enqueue results, each with a context of its own."""
        results = [make_result(**members) for _ in range(count)]
        assert await self.queue.enqueue(results) == [True] * count
        return [result.id for result in results]

    async def limit_running(self, most: int) -> None:
        """Set the running limit of the default team."""
        await self.connection.execute(
            "INSERT INTO team_limits (team_id, model_name, max_running) VALUES ('default', $1, $2)",
            MODEL,
            most,
        )
        await self.queue.load_limits()

    async def worker(self, lease_seconds: float = 60.0) -> UUID:
        """Enter a worker whose lease ends so many seconds from now."""
        identifier = new_id()
        await self.connection.execute(
            "INSERT INTO workers (id, host, pid, lease_expires_at)"
            " VALUES ($1, 'h', 1, now() + make_interval(secs => $2))",
            identifier,
            lease_seconds,
        )
        return identifier

    async def claim(self, worker: UUID, count: int = 100, model: str = MODEL) -> list[Claim]:
        return await claim_all(self.queue, worker, {model: count})

    async def end(self, worker: UUID, *ends: AttemptEnd) -> list[bool]:
        lane = self.queue.end_batcher(worker, 5.0)
        return list(await lane.submit_all(ends))

    async def row(self, result_id: UUID) -> asyncpg.Record:
        row = await self.connection.fetchrow("SELECT * FROM results WHERE id = $1", result_id)
        assert row is not None
        return row

    async def chunks(self, result_id: UUID) -> int:
        count: int = await self.connection.fetchval(
            "SELECT count(*) FROM result_chunks WHERE result_id = $1", result_id
        )
        return count

    async def fast_forward(self) -> None:
        """Let every pause before a next attempt be over."""
        await self.connection.execute(
            "UPDATE results SET not_before = NULL WHERE state = 'pending'"
        )

    async def lose(self, worker: UUID, result_id: UUID) -> asyncpg.Record:
        """Claim a result and lose its engine."""
        await self.fast_forward()
        claims = await self.claim(worker) or await self.queue.claim_suspects(worker, [MODEL])
        (claim,) = [claim for claim in claims if claim.id == result_id]
        assert await self.end(worker, ended(claim, AttemptOutcome.LOST, failure=LOST)) == [True]
        return await self.row(result_id)


@contextlib.asynccontextmanager
async def open_bench(settings: Settings) -> AsyncIterator[Bench]:
    async with Database(settings, "test") as database:
        connection = await connect(settings)
        yield Bench(database, settings, connection)
        await connection.close()


def make_result(**members: Any) -> NewResult:
    context = NewContext(new_id(), "default", "a prompt", None, "{}")
    defaults: dict[str, Any] = {
        "id": new_id(),
        "team_id": "default",
        "context_id": context.id,
        "model_name": MODEL,
        "parameters": '{"max_tokens": 3}',
        "deadline_seconds": 3600.0,
        "new_context": context,
    }
    return NewResult(**(defaults | members))


def ended(
    claim: Claim, outcome: AttemptOutcome = AttemptOutcome.COMPLETED, **members: Any
) -> AttemptEnd:
    defaults: dict[str, Any] = {"output": "text", "finish_reason": "stop", "completion_tokens": 2}
    return AttemptEnd(claim.id, claim.attempt, outcome, **(defaults | members))


def chunk(claim: Claim, offset: int, text: str, tokens: int = 1) -> Chunk:
    return Chunk(claim.id, claim.attempt, offset, text, 7, tokens)


def keyed(key: str, seconds: float = 60.0, **members: Any) -> NewResult:
    return make_result(key=NewKey(key, b"hash", seconds), **members)
