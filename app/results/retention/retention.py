"""Retention: deletes results whose time is over, a little at a time.

Time counts from the end of a result, so a pending one is never deleted. Due results are found by their
ids, which hold the time of creation: no row has to be marked, a changed setting applies to all rows,
and a deployment that keeps everything pays nothing. Only a request's own `retain_seconds` is marked, by
the statement that ends its result.

Any number of processes may run it. One of them gets each pass. Each step is a transaction that locks
few rows and waits for none; the next pass repeats a lost one. Between steps it rests, by
`retention/pacing.py`. docs/retention.md has the rules.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TypeVar
from uuid import UUID

from app.core.database import Connection, Database, is_transient
from app.core.ids import LOWEST_ID, lowest_id
from app.core.settings import Settings
from app.results.retention import sql as sql
from app.results.retention.cleanup import cleaning_steps
from app.results.retention.pacing import SHARE, Pacing
from app.results.retention.policy import Kept, Policies, RetentionPolicy
from app.results.retention.prompts import MAX_ROWS, erase_page, ids_of, is_due, judge_unused
from app.results.usage import ledger

logger = logging.getLogger(__name__)

PERIOD_SECONDS = 60.0
# The trusted time follows the database's clock by no more than this per pass: after a jump by a year,
# deletion proceeds as if time ran ten times as fast, which leaves operators weeks to notice.
MAX_ADVANCE_SECONDS = 10 * PERIOD_SECONDS
_MAX_BATCHES = 5  # with their files, of hundreds of parts
_MAX_JOBS = 100
_HOLD_SECONDS = PERIOD_SECONDS / 4  # between renewals of the turn in a long pass
_CLEANING_SECONDS = 3600.0
_BROKEN_SECONDS = 60.0
_FEW_WORDS = 1_000  # rows whose words are not worth a new index
_BUILDING_SECONDS = 86_400.0
_BEGINNING = datetime(1970, 1, 1, tzinfo=UTC)

Clock = Callable[[], Awaitable[datetime]]
T = TypeVar("T")


class Retention:
    """Deletes due rows; `look` is one pass."""

    def __init__(
        self,
        database: Database,
        settings: Settings,
        *,
        clock: Clock | None = None,
        share: float = SHARE,
    ) -> None:
        """`clock`: the database's by default; `share`: the fraction of time that it works at least."""
        self._database = database
        self._policy = RetentionPolicy(database, settings)
        self._settings = settings
        self._clock = clock or self._database_time
        self._pacing = Pacing(share)
        self._is_behind = False
        self._held_at = 0.0  # monotonic

    async def run(self) -> None:
        while True:
            pause = PERIOD_SECONDS
            try:
                await self.look()
            except Exception as error:
                # No response depends on it: the process continues.
                if not is_transient(error):
                    pause = _BROKEN_SECONDS
                    logger.exception("nothing is deleted", extra={"action": "not_retained"})
            await asyncio.sleep(pause)

    async def look(self) -> bool:
        """Delete all due rows; False if another process has the turn."""
        now = await self._begin()
        if now is None:
            return False
        policies = await self._policy.all()
        deleted = await self._delete_expired(now, policies)
        for team_id in await self._teams(policies):
            deleted += await self._look_at(team_id, policies.of(team_id), now)
        if deleted:
            await self._keep_words_small(deleted)
            logger.info("%d results were over and deleted", deleted, extra={"action": "retained"})
        if await self._database.fetch(sql.BEGIN_CLEANING, now, _CLEANING_SECONDS):
            for step in cleaning_steps(self._settings, now):
                await self._repeat(step)
        return True

    async def _begin(self) -> datetime | None:
        """The trusted time of this pass; None if another process has the turn."""
        now = await self._clock()
        arguments = (now, 0.9 * PERIOD_SECONDS, MAX_ADVANCE_SECONDS)
        rows = await self._database.fetch(sql.BEGIN, *arguments)
        if not rows:
            return None
        trusted: datetime = rows[0]["trusted_at"]
        is_behind = trusted < now
        if is_behind and not self._is_behind:
            logger.warning(
                "the clock is %s ahead of the last look: either nothing ran, or it jumped. Deletion "
                "catches up at ten times its speed; set the clock right if it is wrong",
                now - trusted,
                extra={"action": "clock_ahead"},
            )
        self._is_behind = is_behind
        self._held_at = time.monotonic()
        self._pacing.begin()
        return trusted

    async def _database_time(self) -> datetime:
        (row,) = await self._database.fetch("SELECT clock_timestamp() AS now")
        now: datetime = row["now"]
        return now

    async def _teams(self, policies: Policies) -> list[str]:
        if policies.default.is_forever:
            return [team for team, kept in policies.of_teams.items() if not kept.is_forever]
        rows = await self._database.fetch(sql.TEAMS)
        return [row["team_id"] for row in rows if not policies.of(row["team_id"]).is_forever]

    async def _look_at(self, team_id: str, kept: Kept, now: datetime) -> int:
        results, prompts = _cutoff(now, kept.results_seconds), _cutoff(now, kept.prompts_seconds)
        deleted = 0
        if results is not None:
            deleted = await self._delete_old(team_id, now, results, prompts)
            await self._repeat(
                partial(_delete_batches, team_id=team_id, results=results, kept=kept)
            )
            await self._repeat(partial(_delete_jobs, team_id=team_id, results=results))
        if prompts is not None:
            await self._erase_prompts(team_id, now, prompts)
            await self._repeat(partial(judge_unused, team_id=team_id, now=now, prompts=prompts))
            await self._repeat(partial(_delete_inputs, team_id=team_id, prompts=prompts))
        return deleted

    # --- results --------------------------------------------------------------------------------

    async def _delete_expired(self, now: datetime, policies: Policies) -> int:
        """Delete results with a `retain_seconds` of their own."""
        deleted, place = 0, (_BEGINNING, LOWEST_ID)
        while True:
            rows = await self._database.fetch(sql.EXPIRED, now, *place, MAX_ROWS)
            for team_id in sorted({row["team_id"] for row in rows}):
                ids = [row["id"] for row in rows if row["team_id"] == team_id]
                prompts = _cutoff(now, policies.of(team_id).prompts_seconds)
                deleted += await self._delete(team_id, ids, now, None, prompts)
            if len(rows) < MAX_ROWS:
                return deleted
            place = (rows[-1]["expires_at"], rows[-1]["id"])

    async def _delete_old(
        self, team_id: str, now: datetime, results: datetime, prompts: datetime | None
    ) -> int:
        deleted, after = 0, LOWEST_ID
        while True:
            rows = await self._database.fetch(
                sql.PAGE, team_id, after, lowest_id(results), MAX_ROWS
            )
            ids = [row["id"] for row in rows if is_due(row, results)]
            if ids:
                deleted += await self._delete(team_id, ids, now, results, prompts)
            if len(rows) < MAX_ROWS:
                return deleted
            after = rows[-1]["id"]

    async def _delete(
        self,
        team_id: str,
        ids: Sequence[UUID],
        now: datetime,
        results: datetime | None,
        prompts: datetime | None,
    ) -> int:
        async def work(connection: Connection) -> int:
            rows = await connection.fetch(sql.DELETABLE, ids, results, now, team_id)
            if not rows:
                return 0
            chosen = [row["id"] for row in rows]
            contexts = {row["context_id"] for row in rows}
            last = await ids_of(connection, sql.LOCK_LAST, contexts, chosen, prompts)
            others = await ids_of(connection, sql.LOCK_OTHERS, contexts - last)
            chosen = [row["id"] for row in rows if row["context_id"] in last | others]
            locked = [row["id"] for row in await connection.fetch(sql.LOCK_RESULTS, chosen)]
            await ledger.settle(connection, locked)
            gone = await connection.fetch(sql.DELETE_RESULTS, locked)
            ended: dict[UUID, datetime] = {}
            for row in gone:
                at = row["finished_at"]
                ended[row["context_id"]] = max(at, ended.get(row["context_id"], at))
            empty = await ids_of(connection, sql.DELETE_CONTEXTS, last)
            unused = sorted(ended.keys() - empty)
            await connection.execute(sql.MARK_UNUSED, unused, [ended[one] for one in unused])
            return len(gone)

        return await self._step(work, rows=len(ids))

    async def _keep_words_small(self, gone: int) -> None:
        """Rebuild the index of words concurrently, once most of its entries are of deleted rows.

        A failure is left to the next time; an interrupted rebuild leaves an invalid index.
        https://www.postgresql.org/docs/current/sql-reindex.html#SQL-REINDEX-CONCURRENTLY
        """
        rows = await self._database.fetch(sql.OUTGROW_WORDS, gone, _FEW_WORDS)
        if not rows or not rows[0]["is_due"]:
            return
        if not await self._database.fetch(sql.TAKE_WORDS, _FEW_WORDS):
            return
        connection = await self._database.connect()
        try:
            await connection.execute("SET statement_timeout = 0; SET lock_timeout = 0")
            for row in await connection.fetch(sql.BROKEN_WORDS):
                await connection.execute(f"DROP INDEX CONCURRENTLY IF EXISTS {row['name']}")
            await connection.execute(
                "REINDEX INDEX CONCURRENTLY ix_result_search_words", timeout=_BUILDING_SECONDS
            )
        finally:
            connection.terminate()

    # --- prompts --------------------------------------------------------------------------------

    async def _erase_prompts(self, team_id: str, now: datetime, prompts: datetime) -> None:
        """Erase the prompts of a team whose results all ended before `prompts`.

        Each result is judged once it is due; the last one of a prompt erases it. The next pass begins
        at the first row that is not due or is locked.
        """
        rows = await self._database.fetch(sql.MARK, team_id)
        after: UUID = rows[0]["prompts_to"] if rows else LOWEST_ID
        is_gap = False  # rows behind it are judged again by the next pass
        while True:
            page = await self._database.fetch(
                sql.PAGE, team_id, after, lowest_id(prompts), MAX_ROWS
            )
            if not page:
                return
            work = partial(erase_page, team_id=team_id, page=page, now=now, prompts=prompts)
            is_gap |= not await self._step(partial(work, may_mark=not is_gap))
            after = page[-1]["id"]

    # --- with rests between the steps -------------------------------------------------------------

    async def _repeat(self, work: Callable[[Connection], Awaitable[bool]]) -> None:
        while await self._step(work):
            pass

    async def _step(self, work: Callable[[Connection], Awaitable[T]], rows: int = 0) -> T:
        """Run a piece of work in a transaction, then rest. `rows`: to be deleted, if it deletes results."""

        async def whole(connection: Connection) -> T:
            async with connection.transaction():
                return await work(connection)

        began = time.monotonic()
        answer = await self._database.run(whole)
        took = time.monotonic() - began
        if time.monotonic() - self._held_at > _HOLD_SECONDS:
            await self._database.fetch(sql.GO_ON, await self._clock())
            self._held_at = time.monotonic()
        await asyncio.sleep(self._pacing.rest(took, rows))
        return answer


def _cutoff(now: datetime, seconds: float | None) -> datetime | None:
    return None if seconds is None else now - timedelta(seconds=seconds)


async def _delete_batches(
    connection: Connection, team_id: str, results: datetime, kept: Kept
) -> bool:
    rows = await connection.fetch(
        sql.OLD_BATCHES, team_id, results, lowest_id(results), _MAX_BATCHES
    )
    if not rows:
        return False
    files = [row[name] for row in rows for name in ("output_file_id", "error_file_id") if row[name]]
    await connection.execute(sql.DELETE_FILES, files, team_id)
    await connection.execute(sql.DELETE_BATCHES, [row["id"] for row in rows])
    if kept.prompts_seconds is not None:
        inputs = [row["input_file_id"] for row in rows]
        ends = [row["ended_at"] + timedelta(seconds=kept.prompts_seconds) for row in rows]
        await connection.execute(sql.EXPIRE_INPUTS, inputs, ends, team_id)
    return len(rows) == _MAX_BATCHES


async def _delete_jobs(connection: Connection, team_id: str, results: datetime) -> bool:
    rows = await connection.fetch(sql.DELETE_JOBS, team_id, results, lowest_id(results), _MAX_JOBS)
    return len(rows) == _MAX_JOBS


async def _delete_inputs(connection: Connection, team_id: str, prompts: datetime) -> bool:
    rows = await connection.fetch(
        sql.DELETE_INPUTS, team_id, prompts, lowest_id(prompts), _MAX_BATCHES
    )
    return len(rows) == _MAX_BATCHES
