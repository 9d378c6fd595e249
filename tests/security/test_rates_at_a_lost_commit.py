"""A rate is charged once, also if the connection is lost in the middle of its COMMIT."""

from collections.abc import Sequence

import asyncpg
import pytest

from app.core.database import Connection, Database
from app.core.group_commit import Batcher
from app.core.settings import Settings
from app.queue.rate_buckets import Cost, RateBuckets, Shortage
from tests.conftest import connect

BUCKET = ("red", "m", "requests_per_minute")
COST = [Cost(BUCKET, capacity=1000.0, amount=900.0)]


class LossyRates(RateBuckets):
    """The connection is lost once: before COMMIT, or before its answer."""

    def __init__(self, *, is_committed: bool) -> None:
        super().__init__()
        self._is_committed = is_committed
        self.attempts = 0

    async def take(
        self, connection: Connection, requests: Sequence[Sequence[Cost]], resent: bool
    ) -> Sequence[Shortage | None]:
        self.attempts += 1
        if self.attempts > 1:
            return await super().take(connection, requests, resent)
        if self._is_committed:
            await super().take(connection, requests, resent)
        else:
            async with connection.transaction():
                await super().take(connection, requests, resent)
                raise asyncpg.ConnectionDoesNotExistError("the connection was lost")
        raise asyncpg.ConnectionDoesNotExistError("the connection was lost")


@pytest.mark.parametrize("is_committed", [True, False])
async def test_a_rate_is_charged_once(settings: Settings, is_committed: bool) -> None:
    rates = LossyRates(is_committed=is_committed)
    async with Database(settings, "rates") as database:
        takes: Batcher[Sequence[Cost], Shortage | None] = Batcher(
            database, rates.take, max_items=10, retry_seconds=20
        )
        # More than the bucket's rest, if it were charged twice.
        assert await takes.submit(COST) is None
        assert rates.attempts == 2
        connection = await connect(settings)
        # From now on it does not fill up, however long the test takes.
        level = await connection.fetchval(
            "UPDATE rate_buckets SET filled_at = filled_at + interval '1 hour' RETURNING level"
        )
        await connection.close()
        assert level < 900
        # Another request, which costs the same, is another one.
        shortage = await takes.submit(COST)
        assert shortage is not None
        await takes.close()


async def test_requests_beside_a_lost_one_are_charged(settings: Settings) -> None:
    """A batch that shares some requests with the lost one is another."""
    both = [COST, [Cost(("blue", "m", "requests_per_minute"), capacity=10.0, amount=4.0)]]
    rates = RateBuckets()
    async with Database(settings, "test") as database, database.connection() as connection:
        await rates.take(connection, [COST, COST], resent=False)
        await rates.take(connection, both, resent=True)
        levels = await connection.fetch("SELECT level FROM rate_buckets WHERE team_id = 'blue'")
    assert [round(row["level"]) for row in levels] == [6]
