"""Admission to the queue: the bound of the whole queue, and the limits of a team.

A request is admitted or refused whole. Rates are exact over all processes. Counts of what waits
are exact up to what other processes accept within the tenth of a second that a count may be old.
"""

import asyncio
import contextlib
import math
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass

from app.core.database import Connection, Database
from app.core.errors import LimitError
from app.core.group_commit import Batcher
from app.core.settings import Settings
from app.queue.budgets import BudgetGuard
from app.queue.depth import QueueDepth
from app.queue.enqueue import NewResult
from app.queue.rate_buckets import MAX_REQUESTS, Cost, RateBuckets, Shortage
from app.queue.team_limits import ANY_MODEL, Limits, TeamLimits

_Key = tuple[str, str]  # team, model

_REQUESTS, _TOKENS = "requests_per_minute", "tokens_per_minute"
_CACHE_TTL_SECONDS = 0.1
_RECOUNT_SECONDS = 0.01  # who is refused again and again costs no more than this
_SHARE_SECONDS = 1.0  # as old may a count of all models be: it is one of a long queue
# Half of a shorter queue is no share worth having.
_SHARED_QUEUE = 1_000
_MAX_BATCH = 100
_RETRY_SECONDS = 5

_COUNT = """
SELECT (SELECT count(*) FROM (
  SELECT FROM results r
  WHERE r.model_name = i.model_name AND r.team_id = i.team_id
    AND r.state = 'pending' AND r.worker_id IS NULL
  -- The order of the one index that holds this team's rows together.
  ORDER BY r.priority DESC, r.fair_key, r.id LIMIT i.most) q) AS queued
FROM unnest($1::text[], $2::text[], $3::int[]) WITH ORDINALITY AS i(team_id, model_name, most, place)
ORDER BY i.place
"""


@dataclass(slots=True)
class _Queued:
    """Count of the results of one team that wait for one model."""

    count: int = 0
    counted_at: float = float("-inf")
    since: int = 0  # accepted here since the count, or stored while it was made
    in_flight: int = 0  # accepted here, and not stored yet


class Admission:
    def __init__(
        self,
        database: Database,
        depth: QueueDepth,
        limits: TeamLimits,
        budgets: BudgetGuard,
        settings: Settings,
    ) -> None:
        self._depth = depth
        is_shared = settings.team_max_queued is None and settings.max_queued >= _SHARED_QUEUE
        self._share = settings.max_queued // 2 if is_shared else None  # of a team without a limit
        self._limits = limits
        self._budgets = budgets
        self._queued: dict[_Key, _Queued] = {}  # of limited teams: bounded by those and models
        seconds = settings.database_timeout_seconds
        self._counts: Batcher[tuple[str, str, int], int] = Batcher(
            database, _count, max_items=_MAX_BATCH, retry_seconds=seconds
        )
        self._takes: Batcher[Sequence[Cost], Shortage | None] = Batcher(
            database, RateBuckets().take, max_items=MAX_REQUESTS, retry_seconds=seconds
        )

    async def limits_of(self, team_id: str, model: str) -> Limits:
        await self._limits.load()
        return self._limits.of(team_id, model)

    @contextlib.asynccontextmanager
    async def admitted(self, results: Sequence[NewResult]) -> AsyncIterator[None]:
        """Admit all, and count them while they are stored.

        Raises QueueFullError, LimitError and BudgetExhaustedError.
        """
        await self._budgets.check(results)
        groups: dict[_Key, list[NewResult]] = {}
        for result in results:
            groups.setdefault((result.team_id, result.model_name), []).append(result)
        with contextlib.ExitStack() as stack:
            for key, group in groups.items():
                most = group[0].limits.max_queued
                if most is not None:
                    stack.enter_context(await self._in_queue(key, len(group), most))
            await self._depth.admit(len(results))
            if self._share is not None and self._depth.queued > self._share:
                unlimited = (one.team_id for one in results if one.limits.max_queued is None)
                for team_id, count in Counter(unlimited).items():
                    key = team_id, ANY_MODEL
                    stack.enter_context(await self._in_queue(key, count, self._share))
            await self._take_rates(groups)
            yield

    async def _in_queue(
        self, key: _Key, results: int, most: int
    ) -> contextlib.AbstractContextManager[None]:
        queued = self._queued.setdefault(key, _Queued())
        now = asyncio.get_running_loop().time()
        age = now - queued.counted_at
        is_over = queued.count + queued.since + results > most
        # Accepted results may run by now: they are counted again before a request is refused.
        seconds = (_CACHE_TTL_SECONDS, _RECOUNT_SECONDS)[is_over]
        if age > (_SHARE_SECONDS if key[1] == ANY_MODEL else seconds):
            count = await self._count_of(key, most)
            queued.count, queued.since = count, queued.in_flight
            queued.counted_at = asyncio.get_running_loop().time()
        waiting = queued.count + queued.since
        if waiting + results > most:
            team, model = key
            share = " while the whole queue is more than half full"
            raise LimitError(
                f"{waiting} results of team {team!r} wait{'' if model == ANY_MODEL else f' for model {model}'}, "
                f"of {most} that may{share if model == ANY_MODEL else ''}. Try again when some have run.",
                headers={"Retry-After": str(_RETRY_SECONDS)},
                extra={"limit": "max_queued", "allowed": most, "position": waiting + 1},
            )
        queued.since += results
        queued.in_flight += results
        return _in_flight(queued, results)

    async def _count_of(self, key: _Key, most: int) -> int:
        team_id, model = key
        models = await self._depth.by_model() if model == ANY_MODEL else [model]
        counts = (self._counts.submit((team_id, one, most)) for one in models)
        return sum(await asyncio.gather(*counts))

    async def _take_rates(self, groups: Mapping[_Key, Sequence[NewResult]]) -> None:
        costs = []
        for key, group in groups.items():
            limits = group[0].limits
            if limits.requests_per_minute is not None:
                costs.append(Cost((*key, _REQUESTS), limits.requests_per_minute, len(group)))
            if limits.tokens_per_minute is not None:
                tokens = sum(result.tokens for result in group)
                costs.append(Cost((*key, _TOKENS), limits.tokens_per_minute, tokens))
        shortage = await self._takes.submit(costs) if costs else None
        if shortage is None:
            return
        team, model, name = shortage.cost.bucket
        wait = max(1, math.ceil(shortage.seconds))
        raise LimitError(
            f"Team {team!r} has used its {name.replace('_', ' ')} of model {model}. Try again in "
            f"{wait} s.",
            headers={"Retry-After": str(wait)},
            extra={"limit": name, "allowed": int(shortage.cost.capacity), "position": None},
        )


@contextlib.contextmanager
def _in_flight(queued: _Queued, results: int) -> Iterator[None]:
    try:
        yield
    finally:
        queued.in_flight -= results


async def _count(
    connection: Connection, keys: Sequence[tuple[str, str, int]], _resent: bool
) -> Sequence[int]:
    rows = await connection.fetch(_COUNT, *(list(column) for column in zip(*keys, strict=True)))
    return [row["queued"] for row in rows]
